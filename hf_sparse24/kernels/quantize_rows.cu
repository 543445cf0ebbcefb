// Rows of x as float8_e4m3fn or int8 with a scale each: q = x / scale, rounded to nearest even, scale = largest magnitude of the row
// over the largest of the type; or with one given scale, beyond which values are clipped.
//
// A block takes a row and holds its first 8 HELD THREADS columns in registers; longer rows are read twice.
//
// Compile with -D for all of:
//   BF16       1: x is bfloat16, 0: float16     FP8     1: to float8_e4m3fn, 0: to int8
//   THREADS    of a block                       HELD    reads of eight columns that a thread holds
// K must be a multiple of 8.

#include "common.cuh"

constexpr float LARGEST = FP8 ? 448.f : 127.f;

__device__ __forceinline__ void floats_of(float (&f)[8], const uint4& words) {
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) f[2 * i] = number(u16(w[i])), f[2 * i + 1] = number(u16(w[i] >> 16));
}

// NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

__device__ __forceinline__ float largest_of(const float (&f)[8], float largest) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = larger(largest, fabsf(f[i]));
    return largest;
}

__device__ __forceinline__ u32 four_of(const float* f, float inverse) {
#if FP8
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(f[1] * inverse), "f"(f[0] * inverse));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(f[3] * inverse), "f"(f[2] * inverse));
    return low | u32(high) << 16;
#else
    u32 four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int whole;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(whole) : "f"(fmaxf(f[i] * inverse, -127.f)));
        four |= u32(whole & 0xFF) << 8 * i;
    }
    return four;
#endif
}

// x: (M, K), 16-byte aligned.  q: (M, K).  scales: (M).  given: one scale, of float32 (given_type 0), bfloat16 (1) or float16 (2),
// or null.  One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const uint4* __restrict__ x, uint2* __restrict__ q, float* __restrict__ scales, const void* __restrict__ given, long long given_type,
              long long k) {
    const int eights = int(k / 8);
    const uint4* const from = x + u64(blockIdx.x) * eights;
    uint2* const to = q + u64(blockIdx.x) * eights;
    start_kernel_after();
    wait_for_kernel_before();
    uint4 held[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = h * THREADS + threadIdx.x;
        held[h] = i < eights ? from[i] : make_uint4(0, 0, 0, 0);
    }
    float f[8], largest = 0, scale;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        floats_of(f, held[h]);
        largest = largest_of(f, largest);
    }
    if (given) {
        scale = scale_at(given, given_type, 0);
    } else {
        for (int i = HELD * THREADS + threadIdx.x; i < eights; i += THREADS) {
            floats_of(f, from[i]);
            largest = largest_of(f, largest);
        }
        __shared__ float of_warp[THREADS / 32];
#pragma unroll
        for (int step = 16; step; step /= 2) largest = larger(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) largest = larger(largest, of_warp[w]);
        scale = largest > 0 || largest != largest ? largest / LARGEST : 1.f;
    }
    const float inverse = 1.f / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = h * THREADS + threadIdx.x;
        floats_of(f, held[h]);
        if (i < eights) to[i] = make_uint2(four_of(f, inverse), four_of(f + 4, inverse));
    }
    for (int i = HELD * THREADS + threadIdx.x; i < eights; i += THREADS) {
        floats_of(f, from[i]);
        to[i] = make_uint2(four_of(f, inverse), four_of(f + 4, inverse));
    }
}
