"""The binding of cuSPARSELt: choices and cache on the CPU against a stand-in for the library; the real one where there is a GPU.

The stand-in follows the header: structs by address, arguments by position, memory by pointer. It computes on CPU memory, so that
the self-test, the padding of rows and the interchange with torch run here, and can be made to fail.
"""

import contextlib
import ctypes
import threading
from collections import OrderedDict
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from hf_sparse24.compressors import Sparse24Compressor
from hf_sparse24.compressors.base import pack_bits, unpack_bits
from hf_sparse24.kernels import cusparselt, reference
from hf_sparse24.kernels.cusparselt import DEFAULT, Algorithm, CusparseltError, CusparseltWeight, sample_bitmask
from hf_sparse24.kernels.semi_structured_tensor import from_torch, to_torch

# torch says once per process that its tensors are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")

DTYPES = {number: dtype for dtype, number in cusparselt.CUDA_TYPE.items()}


def memory(pointer, dtype, *shape):
    """A tensor over memory at an address."""
    size_bytes = dtype.itemsize
    for size in shape:
        size_bytes *= size
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(pointer), dtype=dtype).view(shape)


class StandIn:
    """A cuSPARSELt that computes on the CPU; the attributes of the class are the ways in which it may differ from the real one."""

    version = (0, 8, 0)
    workspace_bytes = 64
    row_multiple = 1  # of x, else NOT_SUPPORTED
    bias_is_read = "matmul"  # or "plan": when the plan is made; "never": refused
    pads = False
    reverses_values = False
    num_algorithms = 3

    def __init__(self):
        self.alive, self.calls = {}, []

    def call(self, name, *arguments):
        assert len(arguments) == len(cusparselt.SIGNATURES[name]), name
        self.calls.append(name)
        if status := getattr(self, name)(*arguments):
            raise CusparseltError(f"{name} returned {status}", status)

    @property
    def functions(self):
        return {name: partial(self._status, name) for name in ("Matmul", "MatmulSearch")}

    def _status(self, name, *arguments):
        self.calls.append(name)
        return getattr(self, name)(*arguments)

    def _make(self, address, **fields):
        assert address % cusparselt.STRUCT_ALIGNMENT == 0 and address not in self.alive
        self.alive[address] = fields

    def _destroy(self, address):
        del self.alive[address]

    MatDescriptorDestroy = MatmulAlgSelectionDestroy = MatmulPlanDestroy = _destroy

    def StructuredDescriptorInit(self, handle, matrix, rows, columns, stride, alignment, dtype, order, sparsity):
        assert (stride, alignment, order, sparsity) == (columns, 16, cusparselt.ORDER_ROW, 0)
        self._make(matrix, size=(rows, columns), dtype=DTYPES[dtype])

    def DenseDescriptorInit(self, handle, matrix, rows, columns, stride, alignment, dtype, order):
        assert alignment == 16 and stride == (columns if order == cusparselt.ORDER_ROW else rows)
        if (rows if order == cusparselt.ORDER_ROW else columns) % self.row_multiple:
            return cusparselt.NOT_SUPPORTED
        self._make(matrix, size=(rows, columns), dtype=DTYPES[dtype], order=order)
        return 0

    def MatmulDescriptorInit(self, handle, matmul, op_a, op_b, a, b, c, d, compute):
        assert (op_a, op_b, compute) == (cusparselt.NO_TRANSPOSE, cusparselt.TRANSPOSE, cusparselt.COMPUTE_32F)
        w, x, y = (self.alive[matrix] for matrix in (a, b, d))
        assert c == d and w["size"][1] == x["size"][1] and y["size"] == (w["size"][0], x["size"][0])
        assert x["order"] == cusparselt.ORDER_ROW and y["order"] == cusparselt.ORDER_COLUMN
        self._matmuls = getattr(self, "_matmuls", {})
        self._matmuls[matmul] = {"w": w["size"], "rows": x["size"][0], "dtype": w["dtype"], "bias": None}

    def MatmulDescSetAttribute(self, handle, matmul, name, value, size):
        assert (name, size) == (cusparselt.MATMUL_BIAS_POINTER, 8)
        if self.bias_is_read == "never":
            return cusparselt.NOT_SUPPORTED
        self._matmuls[matmul]["bias"] = value._obj.value
        return 0

    def MatmulAlgSelectionInit(self, handle, selection, matmul, algorithm):
        values = dict.fromkeys((0, 3, 4, 5), 0) | {cusparselt.ALG_CONFIG_MAX_ID: self.num_algorithms, cusparselt.ALG_SPLIT_K: 1}
        self._make(selection, matmul=self._matmuls[matmul], values=values)

    def MatmulAlgSetAttribute(self, handle, selection, name, value, size):
        if name == cusparselt.ALG_CONFIG_ID and value._obj.value >= self.num_algorithms:
            return 3
        self.alive[selection]["values"][name] = value._obj.value
        return 0

    def MatmulAlgGetAttribute(self, handle, selection, name, value, size):
        value._obj.value = self.alive[selection]["values"][name]

    def MatmulPlanInit(self, handle, plan, matmul, selection):
        self._make(plan, matmul=self._matmuls[matmul], bias=self._matmuls[matmul]["bias"], selection=self.alive[selection])

    def MatmulGetWorkspace(self, handle, plan, size):
        size._obj.value = self.workspace_bytes

    def SpMMACompressedSize2(self, handle, matrix, size, scratch_size):
        rows, columns = self.alive[matrix]["size"]
        size._obj.value, scratch_size._obj.value = rows * columns * 9 // 8 + 128 * self.pads, 0

    def SpMMACompress2(self, handle, matrix, is_sparse_a, op, dense, compressed, scratch, stream):
        (rows, columns), dtype = self.alive[matrix]["size"], self.alive[matrix]["dtype"]
        weight = memory(dense, dtype, rows, columns)
        groups = (weight != 0).view(rows, -1, 4)
        order = groups.int().argsort(dim=-1, descending=True, stable=True)[..., :2].sort(-1).values
        mask = torch.zeros_like(groups).scatter_(-1, order, True).view(rows, columns)
        values = weight[mask].flip(0) if self.reverses_values else weight[mask]
        memory(compressed, dtype, rows * columns // 2).copy_(values)
        memory(compressed + rows * columns, torch.uint8, rows, columns // 8).copy_(pack_bits(mask))

    def Matmul(self, handle, plan, alpha, a, b, beta, c, d, workspace, streams, num_streams):
        assert num_streams == 1 and c == d and (workspace is not None) == (self.workspace_bytes > 0)
        matmul = self.alive[plan]["matmul"]
        (n, k), rows, dtype = matmul["w"], matmul["rows"], matmul["dtype"]
        mask = unpack_bits(memory(a + n * k, torch.uint8, n, k // 8), k)
        dense = torch.zeros(n, k).masked_scatter_(mask, memory(a, dtype, n * k // 2).float())
        pointer = matmul["bias"] if self.bias_is_read == "matmul" else self.alive[plan]["bias"]
        bias = 0 if pointer is None else memory(pointer, dtype, n).float()
        memory(d, dtype, rows, n).copy_(memory(b, dtype, rows, k).float() @ dense.t() + bias)
        return 0

    def MatmulSearch(self, handle, plan, *rest):
        self.alive[plan]["selection"]["values"].update(
            {cusparselt.ALG_CONFIG_ID: 2, cusparselt.ALG_SPLIT_K: 4, cusparselt.ALG_SPLIT_K_MODE: 1}
        )
        return self.Matmul(handle, plan, *rest)


class CpuContext(cusparselt._Context):
    def __init__(self, library):
        self.library, self.index, self.device, self.capability = library, 0, torch.device("cpu"), (9, 0)
        self.lock, self.handle = threading.RLock(), cusparselt._Opaque()
        self.plans, self.facts = OrderedDict(), {}


@pytest.fixture
def stand_in(monkeypatch):
    """A function: ways of the stand-in -> context; the module uses it from then on."""
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Mock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cusparselt, "_stream", lambda _: 0)
    monkeypatch.setattr(cusparselt, "TEST_SHAPES", ((32, 64), (16, 48)))
    monkeypatch.setattr(cusparselt, "why_not", lambda device=None: None)
    monkeypatch.setattr(cusparselt, "choose_algorithm", lambda capability, dtype, rows: cusparselt.DEFAULT)

    def make(**ways):
        context = CpuContext(type("StandIn", (StandIn,), ways)())
        monkeypatch.setattr(cusparselt, "_context", lambda device: context)
        return context

    return make


def draw(out_features, in_features, dtype=torch.bfloat16, device="cpu"):
    """Packed tensors in which groups keep 0, 1 and 2 non-zeros, and the dense weight."""
    dice = torch.Generator().manual_seed(out_features + in_features)
    bitmask, kept = sample_bitmask(out_features, in_features, dice)
    values = (torch.randn(kept.shape, generator=dice) * kept).to(dtype)
    compressed, bitmask = values.to(device), bitmask.to(device)
    return compressed, bitmask, reference.unpack(compressed, bitmask, in_features)


def draw_x(rows, in_features, dtype=torch.bfloat16, device="cpu"):
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def assert_right(y, x, dense, bias=None):
    """Every element within one unit of rounding of the sum of the absolute products."""
    expected, scale = x.double() @ dense.double().t(), x.double().abs() @ dense.double().abs().t()
    if bias is not None:
        expected, scale = expected + bias.double(), scale + bias.double().abs()
    bound = torch.finfo(y.dtype).eps * scale
    assert y.shape == expected.shape
    assert bool(((y.double() - expected).abs() <= bound + 1e-12).all())  # false for NaN


def test_a_build_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cusparselt.why_not() == "this torch is built without CUDA"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cusparselt, "SONAME", "libcusparseLt.so.none")
    cusparselt._library.cache_clear()
    try:
        assert "no wheel nvidia-cusparselt-cu*" in cusparselt.why_not()
    finally:
        cusparselt._library.cache_clear()


@pytest.mark.parametrize("version", [(0, 7, 1), (0, 9, 0), (0, 10, 0), (1, 8, 0)], ids=str)
def test_a_version_that_nobody_checked_is_refused_with_the_reason(version):
    reason = cusparselt.why_not_version(version)
    assert ".".join(map(str, version)) in reason and "0.8.x" in reason


@pytest.mark.parametrize("patch", [0, 1])
def test_the_checked_version_is_accepted(patch):
    assert cusparselt.why_not_version((0, 8, patch)) is None


@pytest.mark.parametrize(
    ("out_features", "in_features", "dtype", "reason"),
    [
        (64, 64, torch.float32, "dtype must be float16 or bfloat16"),
        (64, 64, torch.int8, "dtype must be float16 or bfloat16"),
        (24, 64, torch.bfloat16, "out_features must be a positive multiple of 16"),
        (64, 72, torch.float16, "in_features must be a positive multiple of 16"),
        (0, 64, torch.float16, "out_features must be a positive multiple of 16"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused_with_the_reason(out_features, in_features, dtype, reason):
    assert reason in cusparselt.why_not_weight(out_features, in_features, dtype)


@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_a_weight_that_fits_has_no_reason(dtype):
    assert cusparselt.why_not_weight(576, 1536, dtype) is None


def test_structs_are_as_large_and_aligned_as_the_header_says():
    for _ in range(20):
        struct = cusparselt._Opaque()
        assert struct.address % 16 == 0
        start = ctypes.addressof(struct.memory)
        assert start <= struct.address and struct.address + 512 <= start + ctypes.sizeof(struct.memory)


def test_algorithms_are_for_the_device_they_were_measured_on():
    chosen = [cusparselt.choose_algorithm((9, 0), torch.bfloat16, rows) for rows in (256, 767, 768, 8192)]
    assert [algorithm.id for algorithm in chosen] == [20, 20, 17, 17]
    assert cusparselt.choose_algorithm((8, 0), torch.bfloat16, 8192) == cusparselt.DEFAULT


def test_only_what_is_not_left_to_the_library_is_set():
    assert DEFAULT.attributes() == []
    assert Algorithm(0, split_k=2).attributes() == [(cusparselt.ALG_CONFIG_ID, 0), (cusparselt.ALG_SPLIT_K, 2)]


def test_a_call_stays_below_2_31_elements():
    rows = cusparselt._max_rows(4096, 28672)
    assert rows % 8 == 0 and rows * 28672 < 2**31 <= (rows + 8) * 28672


@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_the_self_test_accepts_a_library_that_does_what_we_think(stand_in, dtype):
    context = stand_in()
    assert cusparselt.check_layout(context.device, dtype) is None
    assert context.facts[dtype] == cusparselt._Facts(None, "live", True)


@pytest.mark.parametrize(
    ("ways", "bias", "exact_rows"),
    [({"bias_is_read": "plan"}, "plan", True), ({"bias_is_read": "never"}, "after", True), ({"row_multiple": 8}, "live", False)],
    ids=str,
)
def test_what_the_library_cannot_do_is_worked_around(stand_in, ways, bias, exact_rows):
    context = stand_in(**ways)
    compressed, bitmask, dense = draw(64, 96)
    weight = CusparseltWeight.from_parts(compressed, bitmask, 96)
    assert (context.facts[torch.bfloat16].bias, context.facts[torch.bfloat16].exact_rows) == (bias, exact_rows)
    x = draw_x(13, 96)
    for added in (None, torch.ones(64).bfloat16(), torch.full((64,), -3.0).bfloat16()):
        y = weight.linear(x, added)
        if bias == "after" and added is not None:
            assert torch.equal(y, weight.linear(x) + added)
        else:
            assert_right(y, x, dense, added)


def test_the_self_test_refuses_another_order_of_values(stand_in):
    context = stand_in(reverses_values=True)
    reason = cusparselt.check_layout(context.device, torch.bfloat16)
    assert "does not begin with the row-major values" in reason
    with pytest.raises(CusparseltError, match="row-major"):
        CusparseltWeight.from_parts(*draw(64, 96)[:2], 96)


def test_the_self_test_refuses_wrong_products(stand_in):
    def drop_a_column(self, *arguments):
        StandIn.Matmul(self, *arguments)
        memory(arguments[7], torch.bfloat16, 1).zero_()
        return 0

    context = stand_in(Matmul=drop_a_column)
    assert "product of 32 x 64 torch.bfloat16 is wrong" in cusparselt.check_layout(context.device, torch.bfloat16)


def test_the_self_test_does_not_run_inside_a_graph(stand_in, monkeypatch):
    context = stand_in()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "before you capture" in cusparselt.check_layout(context.device, torch.bfloat16)
    assert not context.facts


def test_values_are_the_beginning_of_the_buffer_bit_for_bit(stand_in):
    stand_in()
    compressed, bitmask, _ = draw(64, 96)
    compressed[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    weight = CusparseltWeight.from_parts(compressed, bitmask, 96)
    assert torch.equal(weight.values.view(torch.int16), compressed.view(torch.int16))
    assert weight.values.data_ptr() == weight.buffer.data_ptr()
    assert weight.buffer.numel() == cusparselt.compressed_bytes(64, 96) == 9 * 64 * 96 // 8
    assert weight.metadata.data_ptr() == weight.values.data_ptr() + weight.values.nbytes


def test_a_padded_shape_is_refused(stand_in):
    context = stand_in()
    assert cusparselt.check_layout(context.device, torch.bfloat16) is None
    context.library.pads = True
    with pytest.raises(CusparseltError, match="pads 64 x 96"):
        CusparseltWeight.from_parts(*draw(64, 96)[:2], 96)


def test_all_shapes_of_x(stand_in):
    stand_in()
    compressed, bitmask, dense = draw(64, 96)
    weight = CusparseltWeight.from_parts(compressed, bitmask, 96)
    x = draw_x(24, 96)
    assert_right(weight.linear(x.view(2, 3, 4, 96)).view(24, 64), x, dense)
    assert_right(weight.linear(x[0])[None], x[:1], dense)
    assert_right(weight.linear(draw_x(96, 24).t()), draw_x(96, 24).t(), dense)
    misaligned = draw_x(1, 24 * 96 + 1)[0, 1:].view(24, 96)
    assert_right(weight.linear(misaligned), misaligned, dense)
    assert weight.linear(x[:0]).shape == (0, 64)


def test_a_call_with_too_many_rows_is_cut(stand_in, monkeypatch):
    stand_in()
    compressed, bitmask, dense = draw(64, 96)
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, 96), draw_x(50, 96)
    monkeypatch.setattr(cusparselt, "_max_rows", lambda *_: 16)
    assert_right(weight.linear(x), x, dense)


@pytest.mark.parametrize("wrong", ["buffer", "buffer dtype", "out_features", "bias", "bias dtype", "dtype"])
def test_tensors_that_do_not_fit_are_refused(stand_in, wrong):
    stand_in()
    compressed, bitmask, _ = draw(64, 96)
    weight, x, bias = CusparseltWeight.from_parts(compressed, bitmask, 96), draw_x(16, 96), torch.zeros(64).bfloat16()
    arguments = {
        "buffer": (x, weight.buffer[:-16], 64),
        "buffer dtype": (x, weight.buffer.view(torch.bfloat16), 64),
        "out_features": (x, weight.buffer, 48),
        "bias": (x, weight.buffer, 64, bias[:-1]),
        "bias dtype": (x, weight.buffer, 64, bias.float()),
        "dtype": (x.float(), weight.buffer, 64),
    }[wrong]
    with pytest.raises((ValueError, CusparseltError)):
        cusparselt.linear(*arguments)
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16"):
        weight.linear(x.half())


def test_a_plan_is_made_once_and_the_oldest_is_destroyed(stand_in, monkeypatch):
    monkeypatch.setattr(cusparselt, "MAX_PLANS", 3)
    context = stand_in()
    compressed, bitmask, _ = draw(64, 96)
    weight = CusparseltWeight.from_parts(compressed, bitmask, 96)
    context.clear()
    assert not context.library.alive

    def plans_made():
        made = context.library.calls.count("MatmulPlanInit")
        context.library.calls.clear()
        return made

    plans_made()
    for rows in (8, 16, 24, 8, 8):
        weight.linear(draw_x(rows, 96))
    assert plans_made() == 3
    weight.linear(draw_x(32, 96))  # 16 was used longest ago
    weight.linear(draw_x(8, 96))
    assert plans_made() == 1
    weight.linear(draw_x(16, 96))
    assert plans_made() == 1
    assert len(context.plans) == 3 and len(context.library.alive) == 3 * 5  # three matrices, selection, plan
    context.clear()
    assert not context.library.alive


def test_a_plan_that_fails_leaves_nothing_behind(stand_in):
    context = stand_in()
    weight = CusparseltWeight.from_parts(*draw(64, 96)[:2], 96)
    context.clear()
    with pytest.raises(CusparseltError):
        weight.linear(draw_x(16, 96), algorithm=Algorithm(99))
    assert not context.library.alive and not context.plans


def test_a_chosen_algorithm_that_is_refused_warns_and_the_default_runs(stand_in, monkeypatch):
    context = stand_in()
    compressed, bitmask, dense = draw(64, 96)
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, 96), draw_x(16, 96)
    monkeypatch.setattr(cusparselt, "choose_algorithm", lambda capability, dtype, rows: Algorithm(99))
    with pytest.warns(UserWarning, match="is refused, the library's default runs"):
        assert_right(weight.linear(x), x, dense)
    context.library.calls.clear()
    assert_right(weight.linear(x), x, dense)
    assert context.library.calls == ["Matmul"]


def test_two_biases_share_a_plan(stand_in):
    context = stand_in()
    compressed, bitmask, dense = draw(64, 96)
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, 96), draw_x(16, 96)
    biases = [torch.full((64,), value).bfloat16() for value in (1.0, -2.0)]
    context.clear()
    for bias in (*biases, *biases):
        assert_right(weight.linear(x, bias), x, dense, bias)
    assert len(context.plans) == 1


def test_the_candidates_are_all_ids_and_what_the_library_found(stand_in):
    stand_in()
    weight = CusparseltWeight.from_parts(*draw(64, 96)[:2], 96)
    found = cusparselt.algorithms(weight, draw_x(16, 96))
    assert found == [Algorithm(0), Algorithm(1), Algorithm(2), Algorithm(2, split_k=4, split_k_mode=1)]


def test_search_sorts_by_time_and_drops_what_is_refused(stand_in, monkeypatch):
    stand_in()
    times_us = {DEFAULT: 30.0, Algorithm(0): 30.0, Algorithm(1): 10.0}
    monkeypatch.setattr(
        cusparselt,
        "_replay_us",
        lambda functions, _: [times_us[functions[0].args[2]] * len(functions), 2 * times_us[functions[0].args[2]] * len(functions)],
    )
    weight = CusparseltWeight.from_parts(*draw(64, 96)[:2], 96)
    found = cusparselt.search([weight, weight], draw_x(16, 96), candidates=[Algorithm(0), Algorithm(1), Algorithm(50)])
    assert [timing.algorithm for timing in found] == [Algorithm(1), DEFAULT, Algorithm(0)]
    assert (found[0].time_us, found[0].spread) == (10.0, 1.0)


@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_to_torch_and_back_gives_the_same_bits(stand_in, dtype):
    stand_in()
    compressed, bitmask, _ = draw(64, 96, dtype)
    compressed[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    tensor = to_torch({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[64], [96]])})
    assert isinstance(tensor, SparseSemiStructuredTensorCUSPARSELT) and tensor.shape == (64, 96) and tensor.dtype == dtype
    assert tensor.packed.numel() == 64 * 96 * 9 // 16  # torch derives the rows from it
    parts = from_torch(tensor)
    assert torch.equal(parts["compressed"].view(torch.int16), compressed.view(torch.int16))
    assert torch.equal(parts["bitmask"], bitmask)
    assert parts["shape"].tolist() == [[64], [96]]
    Sparse24Compressor().decompress_weight(parts)  # valid parts


def test_from_torch_reads_wide_weights_in_pieces(stand_in, monkeypatch):
    monkeypatch.setattr("hf_sparse24.kernels.semi_structured_tensor.ROWS_AT_ONCE", 64)
    stand_in(row_multiple=8)
    compressed, bitmask, _ = draw(32, 208)
    parts = from_torch(to_torch({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[32], [208]])}))
    assert torch.equal(parts["bitmask"], bitmask)


def test_from_torch_does_not_change_or_share_the_tensor(stand_in):
    stand_in()
    compressed, bitmask, _ = draw(32, 64)
    tensor = to_torch({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[32], [64]])})
    before = tensor.packed.clone()
    from_torch(tensor)["compressed"].zero_()
    assert torch.equal(tensor.packed, before)


def test_from_torch_refuses_what_it_cannot_read(stand_in):
    stand_in()
    compressed, bitmask, dense = draw(32, 64)
    tensor = to_torch({"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[32], [64]])})
    with pytest.raises(TypeError, match="got Tensor"):
        from_torch(dense)
    with pytest.raises(ValueError, match="transpose"):
        from_torch(tensor.t())
    with pytest.raises(ValueError, match=r"1152 bytes|2304 bytes"):
        from_torch(SparseSemiStructuredTensorCUSPARSELT(torch.Size((64, 64)), tensor.packed, None, None, None, None))
    broken = tensor.packed.clone()
    stored = broken.flatten().view(torch.uint8)
    stored[32 * 64] ^= 0b1111  # the other two columns: as good as before
    stored[32 * 64 + 1] = 0b0111_0001  # three and one
    with pytest.raises(ValueError, match=r"row 0, columns 8\.\.15"):
        from_torch(SparseSemiStructuredTensorCUSPARSELT(torch.Size((32, 64)), broken, None, None, None, None))


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_the_real_library_is_what_we_think(dtype):
    assert cusparselt.check_layout(torch.device("cuda"), dtype) is None


@gpu
@pytest.mark.parametrize("rows", [1, 7, 8, 64, 100, 256])
@pytest.mark.parametrize("shape", [(4096, 4096), (576, 1536), (1024, 576)], ids=str)
@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_the_real_library_multiplies_right(dtype, shape, rows):
    compressed, bitmask, dense = draw(*shape, dtype, "cuda")
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, shape[1]), draw_x(rows, shape[1], dtype, "cuda")
    for bias in (None, torch.ones(shape[0], dtype=dtype, device="cuda"), torch.randn(shape[0], device="cuda").to(dtype)):
        torch.full((rows, shape[0]), float("nan"), dtype=dtype, device="cuda")  # the memory that y gets
        assert_right(weight.linear(x, bias), x, dense, bias)


@gpu
def test_the_values_exist_once_on_the_device():
    compressed, bitmask, _ = draw(4096, 4096, device="cuda")
    weight = CusparseltWeight.from_parts(compressed, bitmask, 4096)
    assert torch.equal(weight.values, compressed)
    assert weight.buffer.numel() + bitmask.numel() <= 0.63 * 2 * 4096 * 4096


@gpu
def test_a_captured_call_is_replayed_on_new_inputs():
    compressed, bitmask, dense = draw(1024, 576, device="cuda")
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, 576), draw_x(100, 576, device="cuda")
    bias = torch.randn(1024, device="cuda").bfloat16()
    weight.linear(x, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight.linear(x, bias)
    weight.linear(x, -bias)
    x.copy_(draw_x(100, 576, device="cuda").flip(0))
    y.fill_(float("nan"))
    graph.replay()
    assert_right(y, x, dense, bias)


@gpu
def test_another_stream_is_used():
    compressed, bitmask, dense = draw(1024, 576, device="cuda")
    weight, x = CusparseltWeight.from_parts(compressed, bitmask, 576), draw_x(64, 576, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        y = weight.linear(late)
    stream.synchronize()
    assert_right(y, x, dense)


@gpu
@pytest.mark.parametrize("dtype", cusparselt.CUDA_TYPE)
def test_interchange_with_torch_on_the_device(dtype):
    compressed, bitmask, dense = draw(576, 1536, dtype, "cuda")
    parts = {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[576], [1536]])}
    x = draw_x(64, 1536, dtype, "cuda")
    ours, theirs = to_torch(parts), torch.sparse.to_sparse_semi_structured(dense)
    assert type(ours) is type(theirs)
    assert_right(torch.nn.functional.linear(x, ours), x, dense)
    assert torch.equal(from_torch(ours)["bitmask"], bitmask)
    assert torch.equal(Sparse24Compressor().decompress_weight(from_torch(theirs)), dense)
