// h = relu(u)^2, or with a gate relu(gate)^2 u, each product rounded to the type of u; of every four h in a row the two of largest
// magnitude (the lower column of equal ones, NaN above all), in one pass over u.
//
// Written are, for a row: packed, the two kept values of every four and a mask of where they were, as a packed weight has them
// (compressed and bitmask); or dense, zeros included.  As they are, or as float8_e4m3fn: h / scale, scale = the row's largest
// magnitude over 448.
//
// A block takes a row.  With scales it holds the row's first 8 HELD THREADS columns in registers; longer rows are read twice.
//
// Compile with -D for all of:
//   BF16     1: u is bfloat16, 0: float16      FP8       1: to float8_e4m3fn, with scales
//   GATED    1: there is a gate                KEEP_TWO  0: all h are kept
//   PACKED   1: of KEEP_TWO, packed            THREADS   of a block
//   HELD     reads of eight columns that a thread holds
// K must be a multiple of 8.

#include "common.cuh"
#include "squared_relu.cuh"

static_assert(KEEP_TWO || !PACKED, "");

__device__ __forceinline__ u32 two_fp8(u32 two, float inverse) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(number(u16(two >> 16)) * inverse), "f"(number(u16(two)) * inverse));
    return both;
}

// Eight columns, from the i-th eight of a row on.
__device__ __forceinline__ void write(uint4 h, int i, u8* values, u8* mask, float inverse, const u32* choices) {
#if PACKED
    const u32 left = found(choices, choice_of(h.x, h.y)), right = found(choices, choice_of(h.z, h.w));
    const u32 a = __byte_perm(h.x, h.y, left), b = __byte_perm(h.z, h.w, right);
    mask[i] = u8(left >> 16 | right >> 12);
    if (FP8)
        reinterpret_cast<u32*>(values)[i] = two_fp8(a, inverse) | two_fp8(b, inverse) << 16;
    else
        reinterpret_cast<uint2*>(values)[i] = make_uint2(a, b);
#else
    if (KEEP_TWO) drop(h.x, h.y, choices), drop(h.z, h.w, choices);
    if (FP8)
        reinterpret_cast<uint2*>(values)[i] =
            make_uint2(two_fp8(h.x, inverse) | two_fp8(h.y, inverse) << 16, two_fp8(h.z, inverse) | two_fp8(h.w, inverse) << 16);
    else
        reinterpret_cast<uint4*>(values)[i] = h;
#endif
}

__device__ __forceinline__ u32 largest_of(const uint4& h, u32 largest) {
    return larger_two(larger_two(larger_two(magnitudes(h.x), magnitudes(h.y)), larger_two(magnitudes(h.z), magnitudes(h.w))), largest);
}

// u, gate: (M, K).  values: (M, K / 2) if packed, else (M, K).  bitmask: (M, K / 8), if packed.  scales: (M), of float8.
// All aligned to 16 bytes.  One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
squared_relu(const uint4* __restrict__ u, const uint4* __restrict__ gate, u8* __restrict__ values, u8* __restrict__ bitmask, float* __restrict__ scales,
             long long k) {
    const int eights = int(k / 8);
    const u64 row = blockIdx.x;
    u += row * eights, gate += row * eights, bitmask += row * eights;
    values += row * eights * (PACKED ? 4 : 8) * (FP8 ? 1 : 2);
    __shared__ u32 choices[8];
    if (KEEP_TWO) fill_choices(choices);
    start_kernel_after();
    wait_for_kernel_before();
#if FP8
    uint4 held[HELD];
    u32 largest_two = 0;
#pragma unroll
    for (int t = 0; t < HELD; ++t) {
        const int i = t * THREADS + threadIdx.x;
        held[t] = i < eights ? activated(u, gate, i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int t = 0; t < HELD; ++t) largest_two = largest_of(held[t], largest_two);
    for (int i = HELD * THREADS + threadIdx.x; i < eights; i += THREADS) largest_two = largest_of(activated(u, gate, i), largest_two);
    float largest = larger(number(u16(largest_two)), number(u16(largest_two >> 16)));
    __shared__ float of_warp[THREADS / 32];
#pragma unroll
    for (int step = 16; step; step /= 2) largest = larger(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) largest = larger(largest, of_warp[w]);
    const float scale = largest > 0 || largest != largest ? largest / 448.f : 1.f, inverse = 1.f / scale;
    if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
    for (int t = 0; t < HELD; ++t) {
        const int i = t * THREADS + threadIdx.x;
        if (i < eights) write(held[t], i, values, bitmask, inverse, choices);
    }
    for (int i = HELD * THREADS + threadIdx.x; i < eights; i += THREADS) write(activated(u, gate, i), i, values, bitmask, inverse, choices);
#else
    if (KEEP_TWO) __syncthreads();
    for (int first = 0; first < eights; first += HELD * THREADS) {
        uint4 held[HELD];
#pragma unroll
        for (int t = 0; t < HELD; ++t) {
            const int i = first + t * THREADS + threadIdx.x;
            if (i < eights) held[t] = activated(u, gate, i);
        }
#pragma unroll
        for (int t = 0; t < HELD; ++t) {
            const int i = first + t * THREADS + threadIdx.x;
            if (i < eights) write(held[t], i, values, bitmask, 1.f, choices);
        }
    }
#endif
}
