"""`marlin-24`: 2:4 weights of 4 or 8 bits, in the order in which the Marlin kernel reads them; and the same under GPTQ's names.

    weight_packed   B_24     (K/32, 2N) or (K/32, 4N)  int32     the kept integers, 2^(b-1) added, b bits each
    meta            B_meta   (K/32, 2N)                int16     where they were: a nibble per group of four
    scale_packed    s        (G, N)                    float16   scales; G is K/128, or 1 for one per row

with N = out_features and K = in_features.  There is no shape tensor.  Both orders are permutations of axes.  Writing an index by its
bits (n3 is bit 3 of row n of the weight, T its bits 4 and 5; k counts kept integers, c words of metadata in a row, c0 its bit 0):

    weight_packed[k / 16, n / 64, ...]   4 bits: T, n3, k2 k1, n1 n0 | k0, n2, k3      8 bits: T, n3, k2 k1, n1 n0, n2 | k0, k3
    meta[c / 2, n / 64, ...]             n1, n5, n4, n3, n0, c0, n2

where | stands between the index of a word and that of the field in it, the lowest bits of the word being field 0.  A nibble is
`first | second << 2`, the columns of the two integers; groups 4c to 4c+3 share a word of metadata, the first in the lowest bits.

Scales of groups are stored with each run of eight rows as 0 4 1 5 2 6 3 7, if the weight is wider than a limit; compressed-tensors
compared the limit with K/2, GPTQ's writers with K, which differs at K = 256 only.  A file says which by its names.

Source: files of compressed-tensors 0.12.2 (tests/golden), loader code of vLLM.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparse24.compressors.base import BaseQuantizedCompressor, Cuts, PackedTensorError, Spec, require_finite, specs_of
from hf_sparse24.errors import CheckpointError
from hf_sparse24.pattern import find_bad_groups
from hf_sparse24.quantization import (
    GPTQ_MARLIN,
    MARLIN,
    Format,
    QuantizationScheme,
    group_formats,
    scheme_of_groups,
    why_not_quantized,
)

GROUP_SIZE = 128
# N and K are multiples of these.
ROWS, COLUMNS = 64, 32
SCALE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Mask of the non-zeros (bit i: column i) -> nibble; with fewer than two, which zeros are stored as well is the old writer's choice.
# 0 marks three and four.
CODE_OF_NONZERO = (0xE, 0x8, 0x9, 0x4, 0xE, 0x8, 0x9, 0, 0xE, 0xC, 0xD, 0, 0xE, 0, 0, 0)
CODES = sorted({code for code in CODE_OF_NONZERO if code})


# ---- the three tensors -------------------------------------------------------------------------------------------------------


def pack_integers(integers: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Lay out 2:4 integers.

    Args:
        integers: (N, K), int8, within `num_bits`; N a multiple of 64, K of 32; at most two non-zeros per group of four.
        num_bits: 4 or 8.

    Returns:
        weight_packed: (K / 32, N * num_bits / 2), int32.
        meta: (K / 32, 2 N), int16.
    """
    n, k = integers.shape
    groups = integers.view(n, k // 4, 4)
    bits = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=integers.device)
    nonzero = ((groups != 0) * bits).sum(-1, dtype=torch.uint8)
    codes = torch.tensor(CODE_OF_NONZERO, dtype=torch.uint8, device=integers.device)[nonzero.int()]  # (N, K/4)
    kept = groups.gather(-1, torch.stack((codes & 3, codes >> 2), -1).long()).view(n, k // 2)
    unsigned = (kept.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8).t()  # (K/2, N)
    # k = 16 kt + 8 k3 + 2 k12 + k0, n = 64 nb + 16 T + 8 n3 + 4 n2 + n01
    split = unsigned.reshape(k // 32, 2, 4, 2, n // 64, 4, 2, 2, 4)  # kt, k3, k12, k0, nb, T, n3, n2, n01
    if num_bits == 4:
        fields = split.permute(0, 4, 5, 6, 2, 8, 3, 7, 1).reshape(k // 32, -1, 2)
        packed = fields[..., 0] | fields[..., 1] << 4
    else:
        packed = split.permute(0, 4, 5, 6, 2, 8, 7, 3, 1).reshape(k // 32, -1)
    words = codes.view(n, k // 16, 2, 2)
    words = (words[..., 0] | words[..., 1] << 4).view(torch.int16).view(n // 64, 2, 2, 2, 2, 2, 2, k // 32, 2)  # nb, n5..n0, c/2, c0
    meta = words.permute(7, 0, 5, 1, 2, 3, 6, 8, 4).reshape(k // 32, 2 * n)
    return packed.contiguous().view(torch.int32), meta.contiguous()


def unpack_integers(weight_packed: Tensor, meta: Tensor, num_bits: int) -> Tensor:
    """The integers of `pack_integers`: (N, K), int8."""
    k, n = 32 * meta.shape[0], meta.shape[1] // 2
    packed = weight_packed.contiguous().view(torch.uint8)
    if num_bits == 4:
        fields = torch.stack((packed & 15, packed >> 4), -1).view(
            k // 32, n // 64, 4, 2, 4, 4, 2, 2, 2
        )  # kt, nb, T, n3, k12, n01, k0, n2, k3
        kept = fields.permute(1, 2, 3, 7, 5, 0, 8, 4, 6)
    else:
        fields = packed.view(k // 32, n // 64, 4, 2, 4, 4, 2, 2, 2)  # kt, nb, T, n3, k12, n01, n2, k0, k3
        kept = fields.permute(1, 2, 3, 6, 5, 0, 8, 4, 7)
    signed = (kept.reshape(n, k // 4, 2).to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)
    codes = _codes(meta)
    integers = torch.zeros(n, k // 4, 4, dtype=torch.int8, device=meta.device)
    return integers.scatter_(-1, torch.stack((codes & 3, codes >> 2), -1).long(), signed).view(n, k)


def _codes(meta: Tensor) -> Tensor:
    """(K / 32, 2 N) int16 -> (N, K / 4) uint8, a nibble each."""
    k, n = 32 * meta.shape[0], meta.shape[1] // 2
    words = meta.view(k // 32, n // 64, 2, 2, 2, 2, 2, 2, 2)  # c/2, nb, n1, n5, n4, n3, n0, c0, n2
    octets = words.permute(1, 3, 4, 5, 8, 2, 6, 0, 7).contiguous().view(torch.uint8).view(n, k // 8)
    return torch.stack((octets & 15, octets >> 4), -1).view(n, k // 4)


def order_scales(scale: Tensor, permuted: bool) -> Tensor:
    """(N, G) in rows -> (G, N) as stored."""
    stored = scale.t()
    return (stored.unflatten(1, (-1, 8))[..., list(SCALE_ORDER)].flatten(1) if permuted else stored).contiguous()


def scales_in_rows(scale_packed: Tensor, permuted: bool) -> Tensor:
    """`order_scales`, undone: (G, N) -> (N, G)."""
    back = [SCALE_ORDER.index(place) for place in range(8)]
    return (scale_packed.unflatten(1, (-1, 8))[..., back].flatten(1) if permuted else scale_packed).t()


# ---- the format ----------------------------------------------------------------------------------------------------------------


class Marlin24Compressor(BaseQuantizedCompressor):
    """Stores a 2:4 weight in 4 or 8 bits per kept value, and 2 for where it is: 3/16 or 5/16 of the bytes of bfloat16, and scales."""

    format: str = MARLIN
    config_format = "sparse-24-bitmask"
    stored_sparsity_format = "dense"
    parts: tuple[str, ...] = ("weight_packed", "meta", "scale_packed")
    key_parts = frozenset({"weight_packed", "scale_packed"})
    value_part = "weight_packed"
    _file_format: Format = MARLIN

    def finds(self, specs: Mapping[str, Spec]) -> bool:
        """Whether two of the parts are there: one, `weight_packed`, may be another format's."""
        return len(set(self.parts) & specs.keys()) >= 2

    def claim(self, block: Mapping[str, Any]) -> QuantizationScheme | None:
        """A block of compressed-tensors that names this format for all layers, or for some of them."""
        return scheme_of_groups(block, MARLIN) if MARLIN in group_formats(block) else None

    def read_shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """(N, K)."""
        if missing := sorted(set(self.parts) - set(parts)):
            raise PackedTensorError(f"the part {missing[0]} is missing")
        packed, _, scale = (tuple(parts[part].get_shape()) for part in self.parts)
        if len(packed) != 2 or len(scale) != 2:
            raise PackedTensorError(f"{self.parts[0]} has shape {packed} and {self.parts[2]} {scale}, expected two axes each")
        return scale[1], COLUMNS * packed[0]

    def scheme_of(self, specs: Mapping[str, Spec]) -> QuantizationScheme:
        """The scheme, from the shapes."""
        return _scheme(self.num_bits(specs), specs[self.parts[2]][1][0] > 1, self._file_format)

    def num_bits(self, specs: Mapping[str, Spec]) -> int:
        """4 or 8, if the shapes are right."""
        return 2 * specs[self.parts[0]][1][1] // max(1, specs[self.parts[2]][1][1])

    def scales_permuted(self, in_features: int, num_groups: int) -> bool:
        """Whether scales are stored in SCALE_ORDER: by compressed-tensors' rule, which looks at K/2."""
        return num_groups > 1 and in_features // 2 > GROUP_SIZE

    def why_not(self, weight: Tensor) -> str | None:
        """Why this format cannot hold a weight, or None if it can."""
        assert self.scheme is not None
        if weight.ndim != 2:
            return f"only 2-D weights can be 2:4, got shape {tuple(weight.shape)}"
        if reason := self._why_not_shape(tuple(weight.shape)):
            return reason
        if self.scheme.group_size not in (None, GROUP_SIZE):
            return f"group size {self.scheme.group_size}: {self.format} holds groups of {GROUP_SIZE}, or a scale per row"
        if reason := why_not_quantized(weight, self.scheme):
            return reason
        bad = find_bad_groups(weight)
        return None if bad is None else f"not 2:4: {bad}"

    def _why_not_shape(self, shape: tuple[int, ...]) -> str | None:
        n, k = shape
        if n % ROWS or not n:
            return f"out_features {n} is not a multiple of {ROWS}, as {self.format} needs it"
        return f"in_features {k} is not a multiple of {COLUMNS}, as {self.format} needs it" if k % COLUMNS or not k else None

    def part_specs(self, shape: tuple[int, ...], dtype: torch.dtype, num_values: int) -> dict[str, Spec]:
        """dtype and shape of each part of a weight."""
        assert self.scheme is not None
        n, k = shape
        shapes = (k // 32, n * self.scheme.num_bits // 2), (k // 32, 2 * n), (k // (self.scheme.group_size or k), n)
        return dict(zip(self.parts, zip((torch.int32, torch.int16, torch.float16), shapes, strict=True), strict=True))

    def compress_integers(self, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Store integers and scales as they are.

        Args:
            integers: (N, K), int8, 2:4.
            scale: (N, G), any float dtype.

        Raises:
            ValueError: The format cannot hold the shape, an integer is out of range, the integers are not 2:4, or a scale is no
                float16.
        """
        assert self.scheme is not None
        low, high = self.scheme.int_range
        halves, (n, k) = scale.to(torch.float16), integers.shape
        if reason := self._why_not_shape((n, k)):
            raise ValueError(reason)
        if tuple(scale.shape) not in {(n, 1), (n, k // GROUP_SIZE)}:
            raise ValueError(
                f"scale has shape {tuple(scale.shape)}, expected ({n}, 1) or, for groups of {GROUP_SIZE}, ({n}, {k // GROUP_SIZE})"
            )
        if not torch.equal(halves.float(), scale.float()):
            raise ValueError("a scale is not a float16 number, in which this format stores it")
        if integers.numel() and (int(integers.min()) < low or int(integers.max()) > high):
            raise ValueError(f"integers run from {int(integers.min())} to {int(integers.max())}, {self.format} holds {low} to {high}")
        if bad := find_bad_groups(integers):
            raise ValueError(f"not 2:4: {bad}")
        packed, meta = pack_integers(integers, self.scheme.num_bits)
        return dict(zip(self.parts, (packed, meta, order_scales(halves, self.scales_permuted(k, scale.shape[1]))), strict=True))

    def decompress_integers(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The integers, (N, K) int8, and the scales, (N, G) float16.

        Raises:
            PackedTensorError: The parts disagree with each other.
        """
        packed, meta, scale = (parts[part].detach() for part in self.parts)
        specs, shape = specs_of(parts), (scale.shape[1], COLUMNS * packed.shape[0])
        self.check_parts(specs, shape)
        self.check_values(parts, shape, packed.numel())
        return unpack_integers(packed, meta, self.num_bits(specs)), scales_in_rows(scale, self.scales_permuted(shape[1], scale.shape[0]))

    def check_parts(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> None:
        """Check dtypes and shapes against each other.

        Raises:
            PackedTensorError: Names the part and both numbers.
        """
        self.require_names(specs)
        if reason := self._why_not_shape(shape):
            raise PackedTensorError(reason)
        n, k = shape
        (_, packed), (_, _), (_, scale) = (specs[part] for part in self.parts)
        num_bits = 2 * packed[1] // n
        if num_bits not in (4, 8) or packed[1] * 2 != num_bits * n:
            raise PackedTensorError(
                f"{self.parts[0]} has shape {packed}, expected {(k // 32, 2 * n)} for 4 bits or {(k // 32, 4 * n)} for 8"
            )
        expected = {
            self.parts[0]: (torch.int32, packed),
            self.parts[1]: (torch.int16, (k // 32, 2 * n)),
            self.parts[2]: (torch.float16, scale),
        }
        for part, spec in expected.items():
            if specs[part] != spec:
                raise PackedTensorError(f"{part} is {specs[part][0]} of shape {specs[part][1]}, expected {spec[0]} of shape {spec[1]}")
        if scale[0] not in (1, k // GROUP_SIZE) or (scale[0] > 1 and k % GROUP_SIZE):
            raise PackedTensorError(f"{self.parts[2]} has {scale[0]} rows for in_features {k}: groups of {GROUP_SIZE}, or one, are read")

    def cuts(self, specs: Mapping[str, Spec]) -> Cuts:
        """Between the runs of rows and columns that are stored together; parts hold columns first."""
        packed, meta, scale = self.parts
        grouped = specs[scale][1][0] > 1
        axes = {packed: (1, 0), meta: (1, 0), scale: (1, 0 if grouped else None)}
        return Cuts(axes, rows=ROWS, columns=GROUP_SIZE if grouped else COLUMNS)

    def check_values(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], num_values: int) -> None:
        """Check that metadata names two columns for each group, and that scales are numbers.

        Raises:
            PackedTensorError: Names the first bad row and group.
        """
        codes = _codes(parts[self.parts[1]].detach().contiguous())
        valid = torch.zeros(16, dtype=torch.bool, device=codes.device)
        valid[CODES] = True
        bad = (~valid[codes.int()]).nonzero()
        if len(bad):
            row, group = bad[0].tolist()
            columns = f"{4 * group}..{4 * group + 3}"
            raise PackedTensorError(f"{self.parts[1]} keeps no two columns: row {row}, columns {columns} have 0x{int(codes[row, group]):x}")
        require_finite(parts, self.parts[2])

    def dense_dtype(self, specs: Mapping[str, Spec]) -> torch.dtype:
        """float16."""
        return torch.float16

    def num_values(self, specs: Mapping[str, Spec], shape: tuple[int, ...]) -> int:
        """Half of the weight."""
        return shape[0] * shape[1] // 2


class GptqMarlin24Compressor(Marlin24Compressor):
    """The same tensors under the names of GPTQ's checkpoints (`checkpoint_format: marlin_24`), whose scales follow the other rule."""

    format = GPTQ_MARLIN
    parts = ("B_24", "B_meta", "s")
    key_parts = frozenset({"B_24"})
    value_part = "B_24"
    _file_format = GPTQ_MARLIN

    def finds(self, specs: Mapping[str, Spec]) -> bool:
        """Whether one of the parts is there that nobody else has."""
        return bool({"B_24", "B_meta"} & specs.keys())

    def claim(self, block: Mapping[str, Any]) -> QuantizationScheme | None:
        """A block of GPTQ with this `checkpoint_format`, or one that names vLLM's method.

        Raises:
            CheckpointError: Bits or group size are none that the format has.
        """
        method = block.get("quant_method")
        if method != "gptq_marlin_24" and not (method in ("gptq", None) and block.get("checkpoint_format") == "marlin_24"):
            return None
        num_bits, group_size = block.get("bits"), block.get("group_size", -1)
        if num_bits not in (4, 8) or group_size not in (-1, None, GROUP_SIZE):
            found = f"bits {str(num_bits)[:60]} and group_size {str(group_size)[:60]}"
            raise CheckpointError(f"{found}: marlin_24 has 4 or 8 bits and group_size {GROUP_SIZE} or -1")
        if block.get("sym") is False:
            raise CheckpointError("sym is false: asymmetric weights (with zero points) are not read, symmetric ones only")
        return _scheme(num_bits, group_size == GROUP_SIZE, GPTQ_MARLIN)

    def to_block(self, targets: list[str], ignore: list[str]) -> dict[str, Any]:
        """The keys that loaders of GPTQ's checkpoints read."""
        assert self.scheme is not None
        return {
            "quant_method": "gptq",
            "checkpoint_format": "marlin_24",
            "bits": self.scheme.num_bits,
            "group_size": self.scheme.group_size or -1,
            "desc_act": False,
            "sym": True,
        }

    def scales_permuted(self, in_features: int, num_groups: int) -> bool:
        """Whether scales are stored in SCALE_ORDER: by GPTQ's rule, which looks at K."""
        return num_groups > 1 and in_features > GROUP_SIZE


def _scheme(num_bits: Any, grouped: bool, format: Format) -> QuantizationScheme:
    group_size = GROUP_SIZE if grouped else None
    return QuantizationScheme(num_bits=num_bits, strategy="group" if grouped else "channel", group_size=group_size, format=format)
