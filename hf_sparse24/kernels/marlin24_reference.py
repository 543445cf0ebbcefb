"""What `marlin24.cu` reads, in plain PyTorch: the oracle of its tests."""

import torch
from torch import Tensor

# Of eight scales as they are stored, where permuted: which row each belongs to.
SCALE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_marlin24(
    weight_packed: Tensor, meta: Tensor, scale_packed: Tensor, num_bits: int, scales_permuted: bool, dtype: torch.dtype
) -> Tensor:
    """The dense weight.

    Args:
        weight_packed: (in_features / 32, num_bits / 2 * out_features), int32.
        meta: (in_features / 32, 2 * out_features), int16.
        scale_packed: (in_features / 128 or 1, out_features), float16.
        num_bits: 4 or 8.
        scales_permuted: Whether scales lie in SCALE_ORDER within eight rows.
        dtype: Of the result, which is rounded once, from float32.

    Returns:
        (out_features, in_features).
    """
    n, k = scale_packed.shape[1], 32 * weight_packed.shape[0]
    kept = _kept(weight_packed, num_bits, n)
    codes = _codes(meta, n)
    integers = torch.zeros(n, k // 4, 4)
    integers.scatter_(2, torch.stack([codes & 3, codes >> 2 & 3], 2), kept.view(n, k // 4, 2))
    scales = scale_packed.float()
    if scales_permuted:
        scales = torch.empty_like(scales).view(-1, n // 8, 8).index_copy_(2, torch.tensor(SCALE_ORDER), scales.view(-1, n // 8, 8))
    scales = scales.reshape(-1, n).t()  # (N, G)
    grouped = integers.view(n, scales.shape[1], -1) * scales[:, :, None]
    return grouped.view(n, k).to(dtype)


def _kept(weight_packed: Tensor, num_bits: int, n: int) -> Tensor:
    """The kept integers (N, K / 2), in float32."""
    fields = 32 // num_bits
    shifts = torch.arange(fields) * num_bits
    stored = (weight_packed.long()[:, :, None] >> shifts & (1 << num_bits) - 1) - (1 << num_bits - 1)  # (K / 32, words, fields)
    word, field = torch.arange(32 * num_bits)[:, None], torch.arange(fields)[None]
    if num_bits == 4:
        row = 16 * (word >> 5) + 8 * (word >> 4 & 1) + 4 * (field >> 1 & 1) + (word & 3)
        column = 2 * (word >> 2 & 3) + (field >> 2) + 8 * (field & 1)
    else:
        row = 16 * (word >> 6) + 8 * (word >> 5 & 1) + 4 * (word & 1) + (word >> 1 & 3) + 0 * field
        column = 2 * (word >> 3 & 3) + (field >> 1) + 8 * (field & 1)
    units = torch.zeros(len(stored), n // 64, 64, 16)
    units[:, :, row, column] = stored.view(len(stored), n // 64, 32 * num_bits, fields).float()
    return units.permute(1, 2, 0, 3).reshape(n, -1)


def _codes(meta: Tensor, n: int) -> Tensor:
    """The index nibbles (N, K / 4)."""
    row = torch.arange(64)[:, None]
    half = torch.arange(2)[None]
    bit = [row >> i & 1 for i in range(6)]
    at = 64 * bit[1] + 32 * bit[5] + 16 * bit[4] + 8 * bit[3] + 4 * bit[0] + 2 * half + bit[2]  # (64, 2)
    words = meta.long().view(len(meta), n // 64, 128)[:, :, at]  # (K / 32, N / 64, 64, 2)
    codes = words[..., None] >> torch.arange(4) * 4 & 15
    return codes.permute(1, 2, 0, 3, 4).reshape(n, -1)
