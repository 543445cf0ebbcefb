"""The disassembly shows what kernels must and must not have."""

import pytest

from hf_sparse24.kernels import compile
from tests.kernels.machine_code import instructions, resources

CODE = r"""
extern "C" __global__ void sparse(const unsigned* a, const unsigned* b, float* c) {
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(a[4]));
    c[threadIdx.x] = c0 + c1 + c2 + c3;
}
extern "C" __global__ void has_local_array(const int* at, float* out, int n) {
    float table[64];
    for (int i = 0; i < 64; i++) table[i] = out[i + n];
    for (int i = 0; i < n; i++) table[at[i] & 63] += 1.0f;
    out[threadIdx.x] = table[at[threadIdx.x] & 63];
}
__device__ __noinline__ float square(float x) { return x * x; }
extern "C" __global__ void calls(float* out) {
    __shared__ float reversed[32];
    reversed[31 - threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = square(reversed[threadIdx.x]);
}
"""


@pytest.fixture(scope="module", params=["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def cubin(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "code.cu").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "SOURCES", folder)
        patch.setenv("HF_SPARSE24_CACHE", str(folder / "cache"))
        return compile.compile_kernel("code", request.param)


def has(lines, opcode):
    return any(opcode in line for line in lines)


def test_instructions_show_the_sparse_tensor_core(cubin):
    found = instructions(cubin)
    assert set(found) == {"sparse", "has_local_array", "calls"}
    assert sum("HMMA.SP" in line for line in found["sparse"]) == 1
    assert not has(found["calls"] + found["has_local_array"], "HMMA")
    assert all("/*" not in line and line for lines in found.values() for line in lines)


def test_instructions_show_calls_and_local_memory(cubin):
    found = instructions(cubin)
    assert has(found["calls"], "CALL") and not has(found["sparse"], "CALL")
    assert has(found["has_local_array"], "STL") and has(found["has_local_array"], "LDL")
    assert not has(found["sparse"], "STL") and not has(found["sparse"], "LDL")


def test_resources_show_registers_local_and_shared_memory(cubin):
    found = resources(cubin)
    assert set(found) == {"sparse", "has_local_array", "calls"}
    assert found["has_local_array"].local_bytes == 256
    assert found["sparse"].local_bytes == found["sparse"].shared_bytes == 0
    assert found["calls"].shared_bytes in (128, 128 + 1024)
    assert all(8 <= kernel.registers <= 64 for kernel in found.values())
