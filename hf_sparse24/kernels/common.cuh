// What more than one kernel needs.  Compile with -D BF16: 1: x and y are bfloat16, 0: float16.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// With programmatic launch a kernel starts before the one before it has ended.  What that one writes, and reads, must not be
// touched before `wait_for_kernel_before`.
__device__ __forceinline__ void start_kernel_after() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void add_remote(float (&sum)[4], u32 address, u32 rank) {
    u32 remote;
    float a, b, c, d;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(remote));
    sum[0] += a, sum[1] += b, sum[2] += c, sum[3] += d;
}
#endif

// ---- numbers ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float half_number(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float bfloat_number(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Of the type of x and y.
__device__ __forceinline__ float number(u16 bits) { return BF16 ? bfloat_number(bits) : half_number(bits); }

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

// Two numbers of the type of x and y.
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// scale_type: 0 float32, 1 bfloat16, 2 float16.
__device__ __forceinline__ float scale_at(const void* scales, long long scale_type, int i) {
    if (scale_type == 0) return static_cast<const float*>(scales)[i];
    const u16 bits = static_cast<const u16*>(scales)[i];
    const float half = half_number(bits);
    return scale_type == 1 ? bfloat_number(bits) : half;
}

// ---- sparse tensor cores ----------------------------------------------------------------------------------------------------

// Mask nibbles with two bits set, each to its two column indices: 2 bits each, ascending, the first in the low bits.
__device__ __forceinline__ u32 indices_of(u32 mask) {
    u32 first, second, indices;
    asm("lop3.b32 %0, %1, %2, 0x11111111, 0x4D;" : "=r"(first) : "r"(mask), "r"(mask >> 1));
    asm("lop3.b32 %0, %1, %2, 0x22222222, 0x56;" : "=r"(second) : "r"(mask), "r"(mask << 1));
    asm("lop3.b32 %0, %1, %2, 0x55555555, 0xE4;" : "=r"(indices) : "r"(first), "r"(second));
    return indices;
}

// sum (16, 8) += 16 rows of W times 32 columns of x.  SELECTOR: which pair of lanes of each quad holds the indices.
template <int SELECTOR>
__device__ __forceinline__ void multiply_16x8x32(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[4], u32 indices) {
#if BF16
#define TYPES_16X8X32 "f32.bf16.bf16.f32"
#else
#define TYPES_16X8X32 "f32.f16.f16.f32"
#endif
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES_16X8X32
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(indices), "n"(SELECTOR));
}
