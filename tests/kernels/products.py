"""Random 2:4 weights on the GPU, and the exact product that a kernel's is compared with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.compressors.base import unpack_bits
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


@dataclass
class Weight8Bit:
    dense: Tensor
    compressed: Tensor
    bitmask: Tensor
    scale: Tensor


LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def random_weight_8bit(n, k, values, scale_dtype, one_scale=False, seed=0):
    """The same in 8 bits, scales for each row or one; `dense` is float32, and exactly what the packed tensors say."""
    weight = random_weight(n, k, torch.float32, deficient=True, seed=seed)
    scale = weight.dense.abs().amax(1, keepdim=True) / LARGEST[values]
    scale = (scale.max().reshape(1) if one_scale else scale).to(scale_dtype)
    quantised = weight.compressed / scale.float()
    quantised = quantised.round().clamp(-127, 127).to(values) if values == torch.int8 else quantised.clamp(-448, 448).to(values)
    dense = torch.zeros_like(weight.dense).masked_scatter_(unpack_bits(weight.bitmask, k), quantised.float()) * scale.float()
    return Weight8Bit(dense, quantised, weight.bitmask, scale)


def rounded(x, values, given=None):
    """x in 8 bits, with a scale for each row or a given one, and back in float32."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / torch.tensor(LARGEST[values], device="cuda") if given is None else given.float()
    scale = torch.where(scale > 0, scale, 1)
    quantised = x * (1 / scale)
    quantised = quantised.round().clamp(-127, 127) if values == torch.int8 else quantised.clamp(-448, 448).to(values).float()
    return quantised * scale


def check(y, x, dense, bias=None, epsilon=None):
    """Every element of y within rounding of the float32 product: a norm would hide a few wrong rows."""
    x, dense = x.float(), dense.float()
    bias = bias.float() if bias is not None else torch.zeros(dense.shape[0], device=x.device)
    error = (y.float() - F.linear(x, dense, bias)).abs()
    bound = (epsilon or EPSILON[y.dtype]) * (F.linear(x.abs(), dense.abs(), bias.abs()))
    wrong = ~(error <= bound + 1e-6)  # NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements, first at {wrong.nonzero()[0].tolist()}"
