"""Linear layers that hold their weight packed.

    y = x W^T + b,  W stored as parts (compressors/), multiplied by one operator (kernels/ops.py)

The parts are the module's parameters, under the names that the checkpoint uses: loading, moving, sharding and saving need
no conversion.  `weight` answers like the parameter of an `nn.Linear` and is unpacked when its values are asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hf_sparse24.compressors import BaseCompressor, PackedTensorError, Sparse24Compressor, SparseBitmaskCompressor
from hf_sparse24.compressors.base import Spec, specs_of
from hf_sparse24.errors import get_logger
from hf_sparse24.kernels import dispatch, ops
from hf_sparse24.kernels.cusparselt import CusparseltError, CusparseltWeight
from hf_sparse24.projection_group import SHARED, ProjectionGroup

logger = get_logger(__name__)
# Parts that hold sizes.
SHAPE_PARTS = ("shape", "weight_shape")


class PackedWeight(Tensor):
    """A packed weight as a read-only tensor: dtype, shape and device are known, values are unpacked on use.

    Writing to it would be lost, so it is refused: PEFT's `merge_and_unload` does `layer.weight.data += delta`.
    """

    unpack: Callable[[], Tensor]
    _is_hf_initialized: bool

    @staticmethod
    def __new__(cls, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, unpack: Callable[[], Tensor]) -> "PackedWeight":
        """A view of the values that `unpack` returns; it is not called yet."""
        view = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        view.unpack = unpack
        view._is_hf_initialized = True  # Transformers' initialisers pass over such tensors
        return view

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *_named(func._schema.arguments, kwargs)):
            if isinstance(value, PackedWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(_READ_ONLY.format(what=f"{func._schema.name} on"))
        args, kwargs = tree_map_only(PackedWeight, lambda view: view.unpack(), (args, kwargs))
        result = func(*args, **kwargs)
        # A view of the unpacked values is as temporary as they are: writing to it would be lost, too.
        return tree_map_only(Tensor, cls._read_only, result) if func.is_view else result

    @classmethod
    def _read_only(cls, values: Tensor) -> "PackedWeight":
        return cls(tuple(values.shape), values.dtype, values.device, lambda: values)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError(_READ_ONLY.format(what="assigning to elements of"))

    @property
    def data(self) -> Tensor:
        """The view itself; assigning is refused."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(_READ_ONLY.format(what="assigning to"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_READ_ONLY = (
    "{what} the weight of a packed layer would be lost: call model.dequantize() (or layer.to_linear()) first, change the dense "
    "weight, and pack it again"
)


def _named(arguments: Any, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]


class PackedLinear(nn.Linear):
    """`nn.Linear` whose weight is stored as parts; use a subclass.

    Subclasses nn.Linear because tensor-parallel styles, PEFT and module walkers test for it; it has no dense parameter.
    """

    compressor: ClassVar[BaseCompressor]
    part_names: tuple[str, ...]
    """Suffixes of the parts that the layer holds."""
    local_shape: tuple[int, int]
    """Rows and columns of the weight that this process multiplies by: under tensor parallelism a piece of it."""
    # Transformers' tensor parallelism then calls `forward` with this process's pieces as plain tensors.
    _hf_quantized_needs_local_tp = True

    @classmethod
    def from_specs(
        cls,
        in_features: int,
        out_features: int,
        bias: bool,
        specs: Mapping[str, Spec],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "PackedLinear":
        """A layer with uninitialised parts.

        Args:
            in_features: Columns of the weight.
            out_features: Rows of the weight.
            bias: Whether there is a bias.
            specs: dtype and shape of each part.
            dtype: Of the bias.
            device: Of all tensors.
        """
        layer = cls.__new__(cls)
        layer._register(in_features, out_features, bias, specs, dtype, device)
        return layer

    def _register(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        specs: Mapping[str, Spec],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the dense weight
        self.in_features, self.out_features = in_features, out_features
        self.local_shape = out_features, in_features
        self.part_names = tuple(part for part in (*self.compressor.parts, *self.compressor.optional_parts) if part in specs)
        for part in self.part_names:
            empty = torch.empty(specs[part][1], dtype=specs[part][0], device=device)
            if part in SHAPE_PARTS:
                # A buffer: tensor parallelism and FSDP shard parameters.
                self.register_buffer(part, empty)
            else:
                self.register_parameter(part, nn.Parameter(empty, requires_grad=False))
        bias_value = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", bias_value)
        # Transformers initialises what it thinks is missing: never this layer.
        self._is_hf_initialized = True

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], bias: Tensor | None = None) -> "PackedLinear":
        """A layer around packed tensors, which are taken as they are and not copied.

        Args:
            parts: What `compressor.compress_weight` returns.
            bias: (out_features,) or None.
        """
        out_features, in_features = cls.compressor.read_shape({part: _Header(value) for part, value in parts.items()})
        layer = cls.from_specs(in_features, out_features, bias is not None, specs_of(parts), device="meta")
        for part, value in parts.items():
            setattr(layer, part, value if part in SHAPE_PARTS else nn.Parameter(value, requires_grad=False))
        if bias is not None:
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return layer

    def to_linear(self) -> nn.Linear:
        """The plain layer with the unpacked weight; the bias is shared.

        Raises:
            PackedTensorError: The packed tensors disagree with each other.
            ValueError: The layer is sharded over several processes.
        """
        self._require_whole()
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=self.dense_dtype)
        linear.weight = nn.Parameter(self.compressor.decompress_weight(self.parts()), requires_grad=self.dense_dtype.is_floating_point)
        linear.bias = self.bias
        return linear.train(self.training)

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by suffix; no copies."""
        return {part: getattr(self, part).detach() for part in self.part_names}

    def _require_whole(self) -> None:
        if isinstance(self.values, DTensor):
            raise ValueError("this layer is sharded over several processes: save the model, and load it in one to unpack its weight")

    @property
    def values(self) -> Tensor:
        """The largest part."""
        return getattr(self, self.compressor.value_part)

    @property
    def num_weights(self) -> int:
        """Elements of the dense weight."""
        return self.out_features * self.in_features

    @property
    def num_values(self) -> int:
        """How many values are stored."""
        return self.compressor.num_values(specs_of(self.parts()), (self.out_features, self.in_features))

    @property
    def dense_dtype(self) -> torch.dtype:
        """Of the unpacked weight."""
        return self.compressor.dense_dtype(specs_of(self.parts()))

    def check(self) -> None:
        """Check the values of the parts.

        Raises:
            PackedTensorError: They disagree with each other.
        """
        shape = (self.out_features, self.in_features)
        found = self.compressor.read_shape({part: _Header(value) for part, value in self.parts().items()})
        if found != shape:
            raise PackedTensorError(f"shape holds {found}, the layer is {shape}")
        parts = self.parts()
        if isinstance(self.values, DTensor):
            # Pieces of whole rows, columns or units of them are checked where they are; others are put together.
            in_pieces = self.compressor.cuts(specs_of(parts)) is not None
            sharded = {part: value for part, value in parts.items() if isinstance(value, DTensor)}
            whole = {part: value.to_local() if in_pieces else value.full_tensor() for part, value in sharded.items()}
            parts, shape = {**parts, **whole}, self.local_shape
        self.compressor.check_values(parts, shape, self.compressor.num_values(specs_of(parts), shape))

    def unpack(self) -> Tensor:
        """The dense weight (out_features, in_features), made anew for every call."""
        return self.compressor.decompress_weight(self.parts())

    def _unpack_whole(self) -> Tensor:
        self._require_whole()
        return self.unpack()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as a read-only tensor."""
        return PackedWeight((self.out_features, self.in_features), self.dense_dtype, self.values.device, self._unpack_whole)

    def explain(self, rows: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> dispatch.Choice[Any]:
        """Which path multiplies by this layer's weight, and why each other does not; of a fused layer, by its group's.

        Args:
            rows: Of x.
            dtype: Of x; that of the weight if None.
            device: Where the layer would be moved; where it is if None.
        """
        where = dispatch.with_index(torch.device(device) if device is not None else self.values.device)
        return self._choose(rows, dtype or self.dense_dtype, where, moved=device is not None)

    def _choose(self, rows: int, dtype: torch.dtype, device: torch.device, moved: bool) -> dispatch.Choice[Any]:
        return dispatch.Choice("unpack", None, {"any kernel": f"there is none for {self.compressor.format}"})

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), by unpacking: subclasses know better."""
        return nn.functional.linear(x, self.unpack().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{super().extra_repr()}, format={self.compressor.format}, num_values={self.num_values}"


class _Header:
    """A tensor with the interface of an open slice, of which compressors read shapes."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class SparseLinear(PackedLinear):
    """A layer whose weight is stored without its zeros, in its own dtype.

    Args:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bias: Whether there is a bias.
        num_values: How many values are stored.
        dtype: Of weight and bias.
        device: Of all tensors.
    """

    compressed: nn.Parameter
    bitmask: nn.Parameter
    shape: Tensor
    metadata: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_values: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        specs = self.compressor.part_specs((out_features, in_features), dtype or torch.get_default_dtype(), num_values)
        self._register(in_features, out_features, bias, specs, dtype, device)

    def _register(self, *args: Any) -> None:
        super()._register(*args)
        self.register_buffer("metadata", None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "PackedLinear":
        """Pack a layer.

        Args:
            linear: Its weight must fit the format; it is not changed, the bias is shared.

        Raises:
            ValueError: The weight does not fit; names the first offending group.
        """
        return cls.from_parts(cls.compressor.compress_weight(linear.weight), linear.bias)

    @property
    def dense_dtype(self) -> torch.dtype:
        """That of the values."""
        return self.compressed.dtype

    def unpack(self) -> Tensor:
        """The dense weight (out_features, in_features), made anew for every call."""
        return ops.unpack(self.compressed, self.bitmask, self.local_shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        # From where they are: looked up as attributes, four of them cost microseconds.
        parameters: dict[str, Any] = self._parameters
        compressed, bitmask, bias = parameters["compressed"], parameters["bitmask"], parameters["bias"]
        if torch.is_autocast_enabled(x.device.type):
            x, compressed, bias = autocast(x, compressed, bias)
        multiply = ops.linear if torch.is_grad_enabled() else ops.linear_inference
        return multiply(x, compressed, bitmask, bias, self._buffers["metadata"], self.local_shape[1])


def autocast(x: Tensor, compressed: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `F.linear` makes of its arguments under `torch.autocast`; operators of others than torch are not asked."""
    if x.dtype == torch.float64 or not compressed.is_floating_point():
        return x, compressed, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), compressed.to(dtype), None if bias is None else bias.to(dtype)


def own_storage(tensor: Tensor) -> Tensor:
    """The same memory under a storage of its own: writers of files look for tensors that share one."""
    return torch.from_dlpack(tensor.view(torch.uint8)).view(tensor.dtype)


class Sparse24Linear(SparseLinear):
    """A linear layer whose weight keeps two of every four values; 9/16 of the bytes of bfloat16, 10/16 with `prepare`."""

    compressor: ClassVar[BaseCompressor] = Sparse24Compressor()
    # Set on layers that share one packed weight with their siblings (fusion.py).
    group: ProjectionGroup | None = None
    index_in_group: int = 0

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features); columns of the group's product if the layer is fused."""
        if self.group is not None and (y := self.group.columns_of(self.index_in_group, x)) is not None:
            return y
        return super().forward(x)

    def _choose(self, rows: int, dtype: torch.dtype, device: torch.device, moved: bool) -> dispatch.Choice[Any]:
        whole, holder = (self, self) if self.group is None else (self.group, self.group.layers[0])
        # Moving to a GPU calls `prepare`.
        has_metadata = dispatch.why_not("cusparselt", device, dtype) is None if moved else holder._buffers["metadata"] is not None
        return dispatch.choose(whole.out_features, whole.in_features, rows, dtype, device, has_metadata)

    def prepare(self) -> str | None:
        """Put cuSPARSELt's metadata behind the values, for products with many rows; takes two dense weights for a moment.

        Loading to a GPU, and moving there, do it.  The parameters keep their values and become views of other memory.

        Returns:
            Why not, or None if it was done.
        """
        if self.group is not None:
            return self.group.prepare()
        if isinstance(self.compressed, DTensor):
            return "the weight is sharded over several processes"
        if reason := dispatch.why_not("cusparselt", self.compressed.device, self.compressed.dtype):
            return reason
        try:
            weight = CusparseltWeight.from_parts(self.compressed, self.bitmask, self.in_features)
        except (CusparseltError, torch.OutOfMemoryError) as error:
            # Products with many rows take another path; that it is slower must not go unsaid.
            logger.warning_once(f"a packed layer goes without cuSPARSELt: {error}")
            return str(error)
        self.compressed.data, self.metadata = weight.values, weight.metadata
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sparse24Linear":
        self.metadata = None  # it would be moved on its own
        super()._apply(fn, recurse)
        if self.group is None:
            self.prepare()
        else:
            self.group.share_again()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        holder = self if self.group is None else self.group.layers[0]
        before = None if holder._buffers["metadata"] is None or self.bitmask.is_meta else self.bitmask.detach().clone()
        super()._load_from_state_dict(*args)
        if before is not None and not torch.equal(before, self.bitmask.to(before.device)):
            # It tells of other positions.  Not made anew: that would move the values, which CUDA graphs may read.
            holder._buffers["metadata"] = None
            logger.warning_once("a packed layer got values in other places: it goes without cuSPARSELt until prepare() is called")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group is None or keep_vars or self.compressed.is_meta:
            return
        for name in SHARED:
            if (key := f"{prefix}{name}") in destination:
                destination[key] = own_storage(destination[key])

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the metadata would be one of the values, too; so would be a pickled view of the group's.
        state = {**self.__dict__, "_buffers": {**self._buffers, "metadata": None}}
        if state.pop("group", None) is not None:
            copies = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in self._parameters.items() if p is not None}
            state["_parameters"] = {**self._parameters, **copies}
        return state


class SparseBitmaskLinear(SparseLinear):
    """A linear layer whose weight has zeros anywhere."""

    compressor: ClassVar[BaseCompressor] = SparseBitmaskCompressor()
