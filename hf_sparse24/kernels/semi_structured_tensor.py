"""Packed weights as torch's `SparseSemiStructuredTensorCUSPARSELT` and back, without leaving the device.

torch's tensor holds cuSPARSELt's compressed buffer (kernels/cusparselt.py); the layout of its CUTLASS backend, which runs on
compute capability 8.x only, is in compressors/semi_structured.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from hf_sparse24.compressors.base import bits_per_nibble, pack_bits, shape_of
from hf_sparse24.kernels.cusparselt import CusparseltError, CusparseltWeight, check_layout, compressed_bytes, linear, why_not_weight

ROWS_AT_ONCE = 1024  # columns of the weight that are looked up together


def to_torch(parts: Mapping[str, Tensor]) -> SparseSemiStructuredTensorCUSPARSELT:
    """A packed weight as torch's tensor; kept positions stay, and every stored value bit for bit, NaN and -0.0 too.

    Args:
        parts: `Sparse24Linear.parts()`: compressed (out_features, in_features // 2), float16 or bfloat16, on a CUDA device;
            bitmask (out_features, ceil(in_features / 8)), uint8, two bits per group of four; shape.

    Returns:
        The weight (out_features, in_features), with memory of its own.

    Raises:
        CusparseltError: cuSPARSELt is no option here, or pads this shape, which torch's tensor does not know.
    """
    out_features, in_features = shape_of(parts["shape"])
    weight = CusparseltWeight.from_parts(parts["compressed"], parts["bitmask"], in_features)
    return SparseSemiStructuredTensorCUSPARSELT(
        shape=torch.Size((out_features, in_features)),
        packed=weight.buffer.view(weight.dtype).view(out_features, -1),
        meta=None,
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def from_torch(tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a `SparseSemiStructuredTensorCUSPARSELT`, for `Sparse24Linear.from_parts`.

    Positions are read by multiplying the identity by the tensor's metadata with ones for values, so that no value is touched:
    NaN, infinities and -0.0 come through.  Where a group of four has fewer than two non-zeros, the stored zeros are where torch
    put them; for the bytes of a file of compressed-tensors, pack `to_dense` again.

    Args:
        tensor: (out_features, in_features), float16 or bfloat16, as `to_sparse_semi_structured` returns it, not transposed.

    Returns:
        compressed: (out_features, in_features // 2), dtype and device of tensor; a copy.
        bitmask: (out_features, in_features // 8), uint8, exactly two bits per group of four.
        shape: (2, 1), int64, on the CPU.

    Raises:
        TypeError: It is no tensor of torch's cuSPARSELt backend.
        ValueError: It is transposed, its memory is not cuSPARSELt's buffer, or its metadata does not keep two of every four.
        CusparseltError: cuSPARSELt is no option here.
    """
    if not isinstance(tensor, SparseSemiStructuredTensorCUSPARSELT):
        raise TypeError(f"expected a SparseSemiStructuredTensorCUSPARSELT, got {type(tensor).__name__}; see torch.sparse")
    out_features, in_features = tensor.shape
    packed = tensor.packed
    if packed is None:
        raise ValueError("the tensor holds its transpose only; pass the tensor before .t()")
    if tensor.meta is not None:
        raise ValueError("the tensor keeps its metadata apart, as for training; make it with to_sparse_semi_structured")
    if reason := why_not_weight(out_features, in_features, packed.dtype) or check_layout(packed.device, packed.dtype):
        raise CusparseltError(reason)
    # A copy: the values of the result are its beginning, and no part of torch's tensor.
    buffer = packed.detach().contiguous().flatten().view(torch.uint8).clone()
    if buffer.numel() != compressed_bytes(out_features, in_features):
        expected_bytes = compressed_bytes(out_features, in_features)
        raise ValueError(f"the tensor holds {buffer.numel()} bytes, expected {expected_bytes} for {out_features} x {in_features}")
    values = buffer[: out_features * in_features].view(packed.dtype).view(out_features, in_features // 2)
    compressed = values.clone()
    values.fill_(1)
    bitmask = _bitmask_of(buffer, out_features, in_features, packed.dtype)
    if bool((bad := bits_per_nibble(bitmask) != 0x22).any()):
        row, byte = bad.nonzero()[0].tolist()
        raise ValueError(f"metadata is not 2:4: row {row}, columns {8 * byte}..{8 * byte + 7} do not keep 2 of every 4 values")
    return {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[out_features], [in_features]])}


def _bitmask_of(buffer: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """The positions of a compressed buffer whose values are ones."""
    bitmask = torch.empty((out_features, in_features // 8), dtype=torch.uint8, device=buffer.device)
    for start in range(0, in_features, ROWS_AT_ONCE):
        columns = torch.arange(start, min(start + ROWS_AT_ONCE, in_features), device=buffer.device)
        identity = torch.zeros((len(columns), in_features), dtype=dtype, device=buffer.device)
        identity[columns - start, columns] = 1
        kept = linear(identity, buffer, out_features).t()  # (out, columns)
        if not bool(((kept == 0) | (kept == 1)).all()):
            raise ValueError(f"metadata is not 2:4: some of the columns {start}..{start + len(columns) - 1} are kept twice")
        bitmask[:, start // 8 : (start + len(columns)) // 8] = pack_bits(kept != 0)
    return bitmask
