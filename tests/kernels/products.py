"""Random 2:4 weights on the GPU, and the exact product that a kernel's is compared with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.pattern import mask_2_4

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


@dataclass
class Weight:
    dense: Tensor
    compressed: Tensor
    bitmask: Tensor


def random_weight(n, k, dtype, deficient=False, seed=0):
    """A 2:4 weight of mean 0.1; `deficient`: every tenth kept value is zero, some of them -0.0, and whole groups are."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dense = torch.randn(n, k, device="cuda", generator=generator) + 0.1
    dense = dense * mask_2_4(dense)
    if deficient:
        dense *= torch.rand(n, k, device="cuda", generator=generator) < 0.9
        dense *= torch.rand(n, k // 4, 1, device="cuda", generator=generator).expand(n, k // 4, 4).reshape(n, k) < 0.9
    dense = dense.to(dtype)
    parts = Sparse24Compressor().compress_weight(dense)
    return Weight(dense, parts["compressed"], parts["bitmask"])


def random_x(m, k, dtype, seed=1):
    """(m, k) of mean 0.1."""
    return (torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) + 0.1).to(dtype)


def check(y, x, dense, bias=None):
    """Every element of y within rounding of the float32 product: a norm would hide a few wrong rows."""
    x, dense = x.float(), dense.float()
    bias = bias.float() if bias is not None else torch.zeros(dense.shape[0], device=x.device)
    error = (y.float() - F.linear(x, dense, bias)).abs()
    bound = EPSILON[y.dtype] * (F.linear(x.abs(), dense.abs(), bias.abs()))
    wrong = ~(error <= bound + 1e-6)  # NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, first at {wrong.nonzero()[0].tolist()}"
