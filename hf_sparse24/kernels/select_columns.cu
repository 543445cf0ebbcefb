// y = h W^T + bias for one to eight rows of h that are mostly zeros: of W only the columns are read at which some h is not zero.
// h is relu(u)^2, or relu(gate)^2 u, of every four the two largest if KEEP_TWO: as squared_relu.cu finds them.
//
// W is stored by columns, (K, N), so that a column is one run of memory.  A cluster of SPLIT blocks has 256 columns of y, each block
// a part of K: it lists the columns of its part that count, its warps read them in turn, every lane eight values of each, and the
// sums of warps, then of blocks, are added in a fixed order.
//
// Compile with -D for all of:
//   BF16      1: u and y are bfloat16, 0: float16     FP8       1: W is float8_e4m3fn with scales, 0: of the type of u
//   GATED     1: there is a gate                      KEEP_TWO  0: all h count
//   ROWS      1, 2, 4 or 8, as many rows of u or more  SPLIT    1, 2, 4 or 8 blocks of a cluster
//   WARPS     of a block                              AT_ONCE   columns that a warp reads at once
// K and N must be multiples of 8.

#include "common.cuh"
#include "squared_relu.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 256;           // of y, of a block
constexpr int WORDS = (ROWS + 1) / 2;  // that hold a listed column's h, of two rows each
constexpr int SUMS = ROWS * COLUMNS;
static_assert(THREADS >= COLUMNS / 4, "");

// Eight values of a column of W, as they are stored.
struct Eight { u32 words[FP8 ? 2 : 4]; };

__device__ __forceinline__ Eight load_eight(const u8* at) {
    Eight eight;
#if FP8
    asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(eight.words[0]), "=r"(eight.words[1]) : "l"(at));
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(eight.words[0]), "=r"(eight.words[1]), "=r"(eight.words[2]), "=r"(eight.words[3]) : "l"(at));
#endif
    return eight;
}

__device__ __forceinline__ void numbers_of(float (&w)[8], const Eight& eight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if FP8
        u32 two;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(u16(eight.words[i / 2] >> i % 2 * 16)));
        w[2 * i] = half_number(u16(two)), w[2 * i + 1] = half_number(u16(two >> 16));
#else
        w[2 * i] = number(u16(eight.words[i])), w[2 * i + 1] = number(u16(eight.words[i] >> 16));
#endif
    }
}

// What a thread finds in eight columns of all rows: h, and which columns count.
struct Found { u32 h[ROWS][4], live; };

__device__ __forceinline__ Found find(const uint4* u, const uint4* gate, int rows, int eights, int i, bool within, const u32* choices) {
    Found found;
    found.live = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        uint4 h = make_uint4(0, 0, 0, 0);
        if (within && r < rows) h = activated(u + u64(r) * eights, gate + u64(r) * eights, i);
        if (KEEP_TWO) drop(h.x, h.y, choices), drop(h.z, h.w, choices);
        found.h[r][0] = h.x, found.h[r][1] = h.y, found.h[r][2] = h.z, found.h[r][3] = h.w;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            found.live |= u32((found.h[r][w] & 0x7FFF) != 0) << 2 * w | u32((found.h[r][w] & 0x7FFF0000) != 0) << (2 * w + 1);
    }
    return found;
}

// u, gate: (rows, K), 16-byte aligned.  columns: (K, N).  scales: of float8, (N) or one, see `scale_at`.  bias: (N) or null.
// y: (rows, N).  part: columns of W of a block, a multiple of 8.
// Dynamic shared memory: WORDS words of h and an index for each of `part` columns, or SUMS floats for each warp; then SUMS floats.
extern "C" __global__ void __launch_bounds__(THREADS)
select_columns(const uint4* __restrict__ u, const uint4* __restrict__ gate, const u8* __restrict__ columns, const void* __restrict__ scales,
               long long scale_type, long long scale_stride, const u16* __restrict__ bias, u16* __restrict__ y, long long num_rows, long long n_columns,
               long long k_rows, long long part) {
    const int rows = int(num_rows), N = int(n_columns), K = int(k_rows), eights = K / 8;
    extern __shared__ __align__(16) u8 shared[];
    __shared__ u32 of_warp[WARPS];
    u32* const listed_h = reinterpret_cast<u32*>(shared);
    u16* const listed = reinterpret_cast<u16*>(shared + part * WORDS * 4);
    float* const sums = reinterpret_cast<float*>(shared);
    const u32 partial_at = part * (WORDS * 4 + 2) > WARPS * SUMS * 4 ? u32(part * (WORDS * 4 + 2) + 15) / 16 * 16 : WARPS * SUMS * 4;
    float* const partial = reinterpret_cast<float*>(shared + partial_at);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLIT, n0 = blockIdx.x / SPLIT * COLUMNS;
    const int first = rank * int(part), end = min(first + int(part), K);

    __shared__ u32 choices[8];
    if (KEEP_TWO) {
        fill_choices(choices);
        __syncthreads();
    }
    start_kernel_after();
    wait_for_kernel_before();
    // The columns that count, in order.
    int total = 0;
    for (int from = first; from < end; from += 8 * THREADS) {
        const int k = from + 8 * int(threadIdx.x);
        const Found found = find(u, gate, rows, eights, k / 8, k < end, choices);
        const int own = __popc(found.live);
        int before = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFF, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) of_warp[warp] = before;
        __syncthreads();
        int at = total + before - own;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) at += of_warp[w];
            total += of_warp[w];
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if (!(found.live >> c & 1)) continue;
            listed[at] = u16(k + c - first);
#pragma unroll
            for (int r = 0; r < WORDS; ++r)
                listed_h[at * WORDS + r] = __byte_perm(found.h[2 * r][c / 2], 2 * r + 1 < ROWS ? found.h[(2 * r + 1) % ROWS][c / 2] : 0, c % 2 ? 0x7632 : 0x5410);
            ++at;
        }
    }
    __syncthreads();

    float sum[ROWS][8] = {};
    const int n = n0 + 8 * lane;
    if (n < N) {
        const u8* const own = columns + (u64(first) * N + n) * (FP8 ? 1 : 2);
        const u64 pitch = u64(N) * (FP8 ? 1 : 2);
        for (int e = warp; e < total; e += WARPS * AT_ONCE) {
            Eight eight[AT_ONCE];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t)
                if (e + t * WARPS < total) eight[t] = load_eight(own + listed[e + t * WARPS] * pitch);
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                if (e + t * WARPS >= total) continue;
                float w[8];
                numbers_of(w, eight[t]);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const u32 two = listed_h[(e + t * WARPS) * WORDS + r / 2];
                    const float h = number(u16(two >> r % 2 * 16));
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum[r][i] += h * w[i];
                }
            }
        }
    }
    __syncthreads();  // the list has been read
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float4* const to = reinterpret_cast<float4*>(sums + (warp * ROWS + r) * COLUMNS + 8 * lane);
        to[0] = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), to[1] = make_float4(sum[r][4], sum[r][5], sum[r][6], sum[r][7]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS; i += THREADS) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all += sums[w * SUMS + i];
        partial[i] = all;
    }
    if (SPLIT > 1) cluster_sync(); else __syncthreads();
    for (int i = threadIdx.x + rank * THREADS; i < SUMS / 4; i += SPLIT * THREADS) {
        const int row = i / (COLUMNS / 4), column = n0 + i % (COLUMNS / 4) * 4;
        if (row >= rows || column >= N) continue;
        float four[4] = {};
#pragma unroll
        for (int p = 0; p < SPLIT; ++p) add_remote(four, shared_address(partial + 4 * i), p);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#if FP8
            four[c] *= scale_at(scales, scale_type, (column + c) * int(scale_stride));
#endif
            if (bias) four[c] += number(bias[column + c]);
        }
        *reinterpret_cast<uint2*>(y + u64(row) * N + column) = make_uint2(pair(four[0], four[1]), pair(four[2], four[3]));
    }
    if (SPLIT > 1) cluster_sync();  // a block's memory must outlive the others' reading it
}
