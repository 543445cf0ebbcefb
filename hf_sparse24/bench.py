"""How long a packed layer takes on a GPU, against `F.linear` on its dense weight in the same run.

A result is checked, every element, before it is timed: |y - exact| <= c |x| |W|^T, exact in float32.  Times are of CUDA graphs that
walk over copies of the weight beyond the L2; the replays of ours and of dense alternate on a device that is never idle between them.
benchmarks/ measure with these functions, too.
"""

import copy
import itertools
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from hf_sparse24 import __version__
from hf_sparse24.kernels import reference
from hf_sparse24.kernels.compile import KernelCompileError, compiler_version
from hf_sparse24.kernels.dispatch import Choice
from hf_sparse24.linear import PackedLinear, Sparse24Linear
from hf_sparse24.quantized_linear import Marlin24Linear, QuantizedLinear, QuantizedSparse24Linear

DEVICE = "cuda"
# (n, k) of an 8B Llama: o_proj, q/k/v and gate/up fused, down_proj.
LLAMA_8B = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
WALK_BYTES = 240e6  # of packed weights, four times the L2 of an H200
BIG = 2**36  # multiply-adds


@dataclass(frozen=True)
class Time:
    """Of repeated measurements: the median of microseconds a call, and (largest - smallest) / median."""

    us: float
    spread: float
    output: Tensor | None = None
    """What the last call returned, if it was kept."""

    @classmethod
    def of(cls, times: Sequence[float], output: Tensor | None = None) -> "Time":
        """From single measurements."""
        us = statistics.median(times)
        return cls(us, (max(times) - min(times)) / us, output)


@dataclass(frozen=True)
class Cell:
    """A layer and a number of rows.  Errors are the largest, over what is allowed; a wrong result has no times."""

    n: int
    k: int
    m: int
    dtype: str
    """Of x."""
    path: str
    config: str | None
    error: float
    graph_error: float | None = None
    """Of the last call in the timed graph, where kernels overlap."""
    us: float | None = None
    dense_us: float | None = None
    spread: float | None = None
    dense_spread: float | None = None
    failure: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster than dense; None if the result was wrong."""
        return self.dense_us / self.us if self.us and self.dense_us else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the ratio; what is None is left out, `config` excepted."""
        ratio = None if self.ratio is None else round(self.ratio, 4)
        return {name: value for name, value in {**asdict(self), "ratio": ratio}.items() if value is not None or name == "config"}


class Copies:
    """Packed layers and their dense weights, so many that the packed ones exceed the L2 several times.

    Args:
        layers: Of one shape and form.
        dense: The dense weight of each, dtype of x.
    """

    def __init__(self, layers: Sequence[Any], dense: Sequence[Tensor]):
        self.layers, self.dense = layers, dense
        self.n, self.k = dense[0].shape
        self.dtype = dense[0].dtype

    @classmethod
    def random(cls, n: int, k: int, dtype: torch.dtype, device: str = DEVICE) -> "Copies":
        """Random 2:4 weights, each another."""
        layers, dense = [], []
        for seed in range(num_copies(n, k)):
            weight, compressed, bitmask = random_24(n, k, dtype, seed, device)
            layers.append(packed_layer(n, k, compressed, bitmask))
            dense.append(weight)
        return cls(layers, dense)

    @classmethod
    def of(cls, layer: PackedLinear, dtype: torch.dtype) -> "Copies":
        """Copies of one layer that has no bias."""
        layers = [layer, *(copy.deepcopy(layer) for _ in range(num_copies(layer.out_features, layer.in_features) - 1))]
        for own in layers:
            if isinstance(own, Sparse24Linear):
                own.prepare()
        weight = exact_weight(layer).to(dtype)
        return cls(layers, [weight, *(weight.clone() for _ in layers[1:])])


def measure(copies: Copies, m: int) -> Cell:
    """Check, then time, m rows of x."""
    n, k, dtype, layers, dense = copies.n, copies.k, copies.dtype, copies.layers, copies.dense
    choice: Choice[Any] = layers[0].explain(m, dtype)
    x = random_x(m, k, dtype, str(dense[0].device))
    seen, tolerance = x_as_seen(layers[0], choice, x), tolerance_of(layers[0], choice, dtype)
    config = None if choice.config is None else repr(choice.config)
    poison = torch.full((m, n), float("nan"), dtype=dtype, device=x.device)
    del poison  # its memory is what y gets next
    config = None if choice.config is None else repr(choice.config)
    found = Cell(
        n, k, m, str(dtype).removeprefix("torch."), choice.path, config, error_of(layers[0](x), seen, _exact(copies, 0), tolerance)
    )
    if found.error > 1:
        return replace(found, failure="wrong result")
    ours, theirs = time_side_by_side([lambda i: layers[i](x), lambda i: F.linear(x, dense[i])], len(layers), n * k * m > BIG)
    assert ours.output is not None
    # In a graph a kernel starts before the one before it has ended, and the last call's weight is another than that above.
    graph_error = error_of(ours.output, seen, _exact(copies, -1), tolerance)
    if graph_error > 1:
        return replace(found, graph_error=graph_error, failure="wrong result in a graph")
    found = replace(found, graph_error=graph_error, us=round(ours.us, 3), dense_us=round(theirs.us, 3))
    return replace(found, spread=round(ours.spread, 4), dense_spread=round(theirs.spread, 4))


def _exact(copies: Copies, index: int) -> Tensor:
    """What a layer stores; of a quantised weight `dense` is rounded."""
    return exact_weight(copies.layers[index]) if isinstance(copies.layers[index], QuantizedLinear) else copies.dense[index]


# ---- weights and inputs --------------------------------------------------------------------------------------------------------


def num_copies(n: int, k: int) -> int:
    """Of a weight, to walk over."""
    return max(2, int(WALK_BYTES / (n * k * 1.125)) + 1)


def random_24(n: int, k: int, dtype: torch.dtype, seed: int, device: str = DEVICE) -> tuple[Tensor, Tensor, Tensor]:
    """dense (n, k), compressed (n, k / 2), bitmask (n, k / 8); the mean is not zero."""
    generator = torch.Generator(device).manual_seed(seed)
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=device)
    kept = pairs[torch.randint(6, (n, k // 4), device=device, generator=generator)]  # (n, k / 4, 2)
    compressed = ((torch.randn(n, k // 2, device=device, generator=generator) + 0.1) / 32).to(dtype)
    dense = torch.zeros(n, k // 4, 4, dtype=dtype, device=device).scatter_(2, kept, compressed.view(n, k // 4, 2)).view(n, k)
    nibbles = (1 << kept).sum(-1).view(n, k // 8, 2)
    return dense, compressed, (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)


def random_x(m: int, k: int, dtype: torch.dtype, device: str = DEVICE) -> Tensor:
    """(m, k), the same for every weight; the mean is not zero."""
    return (torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(m)) + 0.1).to(dtype)


def packed_layer(n: int, k: int, compressed: Tensor, bitmask: Tensor) -> Sparse24Linear:
    """As it is after loading to a GPU: with what every path needs."""
    layer = Sparse24Linear.from_parts({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[n], [k]])})
    assert isinstance(layer, Sparse24Linear)
    layer.prepare()
    return layer


# ---- what is right -------------------------------------------------------------------------------------------------------------


def error_of(y: Tensor, x: Tensor, weight: Tensor, tolerance: float) -> float:
    """The largest error of an element, over what is allowed; 1e9 for NaN.

    Args:
        y: (m, n), the result.
        x: (m, k), as the product sees it.
        weight: (n, k), dense.
        tolerance: What is allowed, over |x| |W|^T.
    """
    exact, worst = weight.float(), 0.0
    absolute = exact.abs()
    for first in range(0, len(x), 1024):
        rows = x[first : first + 1024].float()
        bound = rows.abs() @ absolute.T * tolerance
        error = (y[first : first + 1024].float() - rows @ exact.T).abs() / bound
        worst = max(worst, error.nan_to_num(float("inf")).max().item())
    return round(min(worst, 1e9), 4)  # JSON has no infinity


def tolerance_of(layer: Any, choice: Choice[Any], dtype: torch.dtype) -> float:
    """What is allowed over |x| |W|^T.  Paths that round x or the products of integers and scales may err as bfloat16 does."""
    return 2**-8 if isinstance(layer, QuantizedLinear) and choice.path != "mma_sp" else TOLERANCE[dtype]


def exact_weight(layer: Any) -> Tensor:
    """What a layer stores, dense; in float32 if it is quantised."""
    if isinstance(layer, Marlin24Linear):
        packed, meta, scale = layer.tensors
        return reference.dequantize_marlin24(packed, meta, scale.float(), layer.num_bits, layer.scales_permuted)
    if isinstance(layer, QuantizedSparse24Linear):
        return reference.dequantize_8bit(layer.compressed, layer.bitmask, layer.weight_scale.float(), layer.in_features)
    return layer.unpack()


def x_as_seen(layer: Any, choice: Choice[Any], x: Tensor) -> Tensor:
    """x, or what is left of it where the path rounds it to the dtype of the weight's values."""
    if not isinstance(layer, QuantizedSparse24Linear) or choice.path != "wgmma_sp":
        return x
    return round_x(x, layer.compressed.dtype, getattr(layer, "input_scale", None))


def round_x(x: Tensor, values: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x in 8 bits and back, in float32; with a scale for each row if none is given."""
    largest = LARGEST[values]
    scale = x.float().abs().amax(1, keepdim=True) / torch.tensor(largest, device=x.device) if scale is None else scale.float()
    quantised = x.float() * (1 / scale)
    if values == torch.int8:
        return quantised.round().clamp(-largest, largest) * scale
    return quantised.clamp(-largest, largest).to(values).float() * scale


# ---- timing --------------------------------------------------------------------------------------------------------------------


def time_side_by_side(calls: list[Callable[[int], Any]], copies: int, big: bool) -> list[Time]:
    """Time functions of the number of a copy, whose graphs are replayed in turn.

    Args:
        calls: Each returns its result.
        copies: How many there are.
        big: Whether one call is long: fewer are made.
    """
    num_calls = copies * (1 if big else max(1, 16 // copies))
    stream = _stream()
    torch.cuda.synchronize()  # what another stream still works on may lie where results do now
    graphs, outputs = [], []
    with torch.cuda.stream(stream):
        for call in calls:
            for i in range(copies):  # in a graph, ours reads a weight ahead only if it has been read before
                call(i)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(num_calls):
                    y = call(i % copies)
            graphs.append(graph)
            outputs.append(y)
        repeats = 3 if big else 5
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(graphs) + 1)]
        for graph in graphs:  # the first replay of each uploads it
            graph.replay()
        torch.cuda.synchronize()
        graphs[-1].replay()  # not timed: while it runs, the next ones are queued
        events[0].record()
        for i, event in enumerate(events[1:]):
            graphs[i % len(graphs)].replay()
            event.record()
        torch.cuda.synchronize()
    us = [start.elapsed_time(end) * 1000 / num_calls for start, end in itertools.pairwise(events)]
    return [Time.of(us[i :: len(graphs)], output) for i, output in enumerate(outputs)]


_STREAM: list[Any] = []


def _stream() -> Any:
    """One for all graphs: cuBLAS keeps a workspace for each stream."""
    if not _STREAM:
        _STREAM.append(torch.cuda.Stream())
    return _STREAM[0]


def environment() -> dict[str, Any]:
    """What was measured on, and when."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_core": _version("cuda-core"),
        "nvrtc": _compiler(),
        "transformers": transformers.__version__,
        "hf_sparse24": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    """As Linux calls it; elsewhere the architecture."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    try:
        return compiler_version()
    except KernelCompileError:
        return None
