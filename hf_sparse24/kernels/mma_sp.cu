// y = x W^T + bias for few rows of x, on the sparse tensor cores of compute capability 8.0 and up (mma.sp), W as it is stored:
// values (N, K / 2), bitmask (N, K / 8), and for values of 8 bits a scale for each row, or one for all.
//
// Weights go from memory straight to the registers of the multiplication, DEPTH steps ahead; x is staged in shared memory.
// In a step, of 64 dense columns or 128 of 8-bit values, lane q of a quad reads 16 bytes of its row, which are GROUPS groups of
// four, and product j of the step takes groups 2 j and 2 j + 1 of every lane.  The order of the columns of a product is free, so
// x is staged in the order that this gives.  Values of 8 bits become x's type in registers, exactly.
// COLUMN_WARPS warps share the columns, ROW_WARPS the rows of W; a block walks over groups of rows.
//
// Compile with -D for all of:
//   BF16       1: bfloat16, 0: float16                BN           8 to 64 rows of x
//   FP8, INT8  1: values are float8_e4m3fn or int8, both 0: as x
//   TILES      tiles of 16 rows of W a warp           DEPTH        steps that are loaded ahead
//   ROW_WARPS, COLUMN_WARPS                           STEPS        of a warp in a chunk of x, a multiple of DEPTH
//   BUFFERS    1: all columns of x fit one chunk, 2: chunks take turns
//   MIN_BLOCKS blocks that must fit on a multiprocessor
// K must be a multiple of 16, with values of 8 bits of 32.

#include "common.cuh"

constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROWS = 16 * TILES * ROW_WARPS;             // of W, a block at a time
constexpr int VALUE_BYTES = FP8 || INT8 ? 1 : 2;
constexpr int GROUPS = 8 / VALUE_BYTES, PRODUCTS = GROUPS / 2, STEP = 16 * GROUPS;
constexpr int CHUNK = STEP * STEPS * COLUMN_WARPS;       // columns of x
constexpr int X_PITCH = CHUNK * 2 + 16;                  // bytes
constexpr int X_BYTES = BN * X_PITCH;
constexpr int PITCH = ROWS + 4;                          // of partial sums, in floats: their writes meet no bank twice
static_assert(STEPS % DEPTH == 0, "");

// Eight bytes from memory to shared memory, zeros if not `inside`.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(inside ? 8 : 0) : "memory");
}

// What a lane needs of 16 rows and a step: of rows g and g + 8 its 16 bytes of values, and the mask of all columns.
struct Fragment {
    u32 values[4], values8[4], mask[PRODUCTS], mask8[PRODUCTS];
};

// Loads that leave registers as they are if not `inside`; without a branch.
__device__ __forceinline__ void load_four(u32 (&v)[4], const u8* at, bool inside) {
    asm volatile("{ .reg .pred inside; setp.ne.b32 inside, %5, 0;\n"
        "@inside ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "l"(at), "r"(int(inside)));
}

__device__ __forceinline__ void load_mask(u32 (&mask)[PRODUCTS], const u8* at, bool inside) {
#if FP8 || INT8
    asm volatile("{ .reg .pred inside; setp.ne.b32 inside, %5, 0; @inside ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(mask[0]), "+r"(mask[1]), "+r"(mask[2]), "+r"(mask[3]) : "l"(at), "r"(int(inside)));
#else
    asm volatile("{ .reg .pred inside; setp.ne.b32 inside, %3, 0; @inside ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
        : "+r"(mask[0]), "+r"(mask[1]) : "l"(at), "r"(int(inside)));
#endif
}

constexpr u32 NOTHING = 0x33333333;  // a legal mask, of zeros

// Where `columns` are left of the row, and masks are aligned to two bytes.
__device__ __forceinline__ void load_end_of_mask(u32 (&mask)[PRODUCTS], const u8* at, int columns) {
    const u16* half = reinterpret_cast<const u16*>(at);
#pragma unroll
    for (int w = 0; w < PRODUCTS; ++w)
        mask[w] = (columns > 32 * w ? half[2 * w] : NOTHING & 0xFFFF) | (columns > 32 * w + 16 ? half[2 * w + 1] << 16 : NOTHING << 16);
}

// Nibbles of a lane of even number and the next, side by side: of each byte the low ones (HIGH 0) or the high ones.
__device__ __forceinline__ u32 side_by_side(u32 even, u32 odd, int high) {
    return (even >> 4 * high & 0x0F0F0F0F) | (odd << 4 - 4 * high & 0xF0F0F0F0);
}

// Indices of 16 rows of W for products 2 r and 2 r + 1 of a step, which lane pairs 0 and 1 of a quad hold: of the groups of lanes
// 0 to 3, the even lane of a pair the first ones, the odd one the second ones; row g in the low half, g + 8 in the high half.
__device__ __forceinline__ void find_indices(u32 (&indices)[PRODUCTS / 2], const Fragment& f, int q) {
#if FP8 || INT8
    // A word of mask belongs to a lane, its byte j to product j.
    const int bytes = q / 2 ? 0x7351 : 0x6240;
    const u32 low = __byte_perm(side_by_side(f.mask[0], f.mask[1], q % 2), side_by_side(f.mask[2], f.mask[3], q % 2), bytes);
    const u32 low8 = __byte_perm(side_by_side(f.mask8[0], f.mask8[1], q % 2), side_by_side(f.mask8[2], f.mask8[3], q % 2), bytes);
    indices[0] = indices_of(__byte_perm(low, low8, 0x5410));
    indices[1] = indices_of(__byte_perm(low, low8, 0x7632));
#else
    // Half a word belongs to a lane.
    const int bytes = q / 2 ? 0x7531 : 0x6420;
    const u32 low = __byte_perm(f.mask[0], f.mask[1], bytes) >> q % 2 * 4 & 0x0F0F0F0F;
    const u32 low8 = __byte_perm(f.mask8[0], f.mask8[1], bytes) >> q % 2 * 4 & 0x0F0F0F0F;
    indices[0] = indices_of(__byte_perm(low | low >> 4, low8 | low8 >> 4, 0x6420));
#endif
}

// Two values of a group as the multiplication takes them: of 8 bits the two in the low (HALF 0) or high half of a word.
template <int HALF>
__device__ __forceinline__ u32 two_of(u32 word) {
    u32 two;
#if FP8 && BF16
    // The seven bits of exponent and mantissa, moved to where bfloat16 has them, are 2^-120 of the value, subnormal ones included.
    const u32 high = __byte_perm(word, 0, HALF ? 0x3424 : 0x1404), bits = (high & 0x80008000) | (high >> 4 & 0x07F007F0);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(bits), "r"(0x7B807B80), "r"(0x80008000));
#elif FP8
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(u16(HALF ? word >> 16 : word)));
#else
    const u32 high = __byte_perm(word, 0, HALF ? 0x3424 : 0x1404), bits = (high & 0x80008000) | (high >> 1 & 0x3F803F80);  // 2^-8 of it
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(two) : "r"(bits), "r"(0x5C005C00));
#endif
#elif INT8 && BF16
    // 0x43vv: 128 + the low seven bits of v, less 128 or, if v is negative, 256.
    const u32 high = __byte_perm(word, 0x43434343, HALF ? 0x4342 : 0x4140);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(high & 0xFF7FFF7F), "r"(0x3F803F80), "r"((high & 0xFF80FF80) ^ 0x80008000));
#elif INT8
    const u32 high = __byte_perm(word ^ 0x80808080, 0x64646464, HALF ? 0x4342 : 0x4140);  // 1024 + v + 128
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(two) : "r"(high), "r"(0x64806480));
#endif
    return two;
}

// sum += product J of a step.
template <int J>
__device__ __forceinline__ void multiply_part(float (&sum)[4], const Fragment& f, const u32 (&b)[4], u32 indices) {
#if FP8 || INT8
    multiply_16x8x32<J % 2>(sum, two_of<0>(f.values[J]), two_of<0>(f.values8[J]), two_of<1>(f.values[J]), two_of<1>(f.values8[J]), b, indices);
#else
    multiply_16x8x32<J % 2>(sum, f.values[2 * J], f.values8[2 * J], f.values[2 * J + 1], f.values8[2 * J + 1], b, indices);
#endif
}

// sum += product J of a step, whose columns of x lie `at` bytes behind `x_rows`.
template <int J>
__device__ __forceinline__ void multiply_all(float (&sum)[TILES][BN / 8][4], const Fragment (&f)[TILES], const u32 (&x_rows)[BN / 8], int at,
                                             const u32 (&indices)[TILES][PRODUCTS / 2]) {
#pragma unroll
    for (int n = 0; n < BN / 8; ++n) {
        u32 b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(x_rows[n] + at + J * 64));
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply_part<J>(sum[t][n], f[t], b, indices[t][J / 2]);
    }
}

// values: (N, K / 2).  bitmask: (N, K / 8).  x: (M, K), row m at x + m * x_pitch elements, rows aligned to 8 bytes.
// scales: of values of 8 bits, (N) or one, as `scale_type` and `scale_stride` (1 or 0) say.  bias: (N) or null.  y: (M, N).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
mma_sp(const u8* __restrict__ values, const u8* __restrict__ bitmask, const u16* __restrict__ x, const u16* __restrict__ bias,
       u16* __restrict__ y, long long m, long long n, long long k, long long x_pitch, const void* __restrict__ scales,
       long long scale_type, long long scale_stride) {
    const int M = int(m), N = int(n), K = int(k);
    extern __shared__ __align__(16) u8 shared[];  // chunks of x, and the partial sums (in their place if they take turns)
    float* const partial = reinterpret_cast<float*>(shared + (BUFFERS == 1 ? X_BYTES : 0));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int column_warp = warp % COLUMN_WARPS, row_warp = warp / COLUMN_WARPS;
    const int m0 = blockIdx.y * BN, rows_x = min(BN, M - m0);
    const int groups = (N + ROWS - 1) / ROWS, chunks = (K + CHUNK - 1) / CHUNK;
    const bool aligned = K % STEP == 0;

    // Loads run ahead of products: where the next one is.  There are none behind the last group of rows.
    int next_group = blockIdx.x, next_chunk = 0, next_step = 0, column;
    const u8 *values_at[TILES], *values8_at[TILES], *mask_at[TILES], *mask8_at[TILES];
    auto find_group = [&] {
        column = next_group < groups ? column_warp * (STEPS * STEP) : K;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = next_group * ROWS + (row_warp * TILES + t) * 16 + g;
            const u64 at = u64(min(row, N - 1)), at8 = u64(min(row + 8, N - 1));
            values_at[t] = values + at * (K / 2 * VALUE_BYTES) + column_warp * (STEPS * STEP / 2 * VALUE_BYTES) + 16 * q;
            values8_at[t] = values_at[t] + (at8 - at) * (K / 2 * VALUE_BYTES);
            mask_at[t] = bitmask + at * (K / 8) + column_warp * (STEPS * STEP / 8);
            mask8_at[t] = mask_at[t] + (at8 - at) * (K / 8);
        }
    };
    auto move = [&](int columns) {
        column += columns;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            values_at[t] += columns / 2 * VALUE_BYTES, values8_at[t] += columns / 2 * VALUE_BYTES;
            mask_at[t] += columns / 8, mask8_at[t] += columns / 8;
        }
    };
    Fragment fragments[DEPTH][TILES];
    auto load = [&](Fragment (&fragment)[TILES]) {
        const bool any = column < K, mine = column + 4 * GROUPS * q < K;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            Fragment& f = fragment[t];
#pragma unroll
            for (int i = 0; i < 4; ++i) f.values[i] = f.values8[i] = 0;
            load_four(f.values, values_at[t], mine);
            load_four(f.values8, values8_at[t], mine);
            if (aligned) {
                load_mask(f.mask, mask_at[t], any);  // or it stays what it was, for values that are zeros
                load_mask(f.mask8, mask8_at[t], any);
            } else {
                load_end_of_mask(f.mask, mask_at[t], K - column);
                load_end_of_mask(f.mask8, mask8_at[t], K - column);
            }
        }
        if (++next_step < STEPS) {
            move(STEP);
        } else {
            next_step = 0;
            if (++next_chunk < chunks)
                move(CHUNK - (STEPS - 1) * STEP);
            else
                next_chunk = 0, next_group += gridDim.x, find_group();
        }
    };

    auto stage = [&](int chunk, int buffer) {
        const u32 to = shared_address(shared) + buffer * X_BYTES;
        for (int i = threadIdx.x; i < rows_x * (CHUNK / 4); i += THREADS) {
            const int m = i / (CHUNK / 4), group = i % (CHUNK / 4), column = chunk * CHUNK + group * 4;
            const int p = group % (4 * GROUPS), place = group - p + p % GROUPS * 4 + p / GROUPS;
            const bool inside = column < K;
            copy_async(to + m * X_PITCH + place * 8, x + (m0 + m) * x_pitch + (inside ? column : 0), inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    find_group();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i) fragments[d][t].mask[i] = fragments[d][t].mask8[i] = NOTHING;
        load(fragments[d]);
    }
    start_kernel_after();
    wait_for_kernel_before();
    if (BUFFERS == 1) stage(0, 0);

    float sum[TILES][BN / 8][4] = {};
    // ldmatrix: lane l names row l % 8 of matrix l / 8, which is 8 columns of 8 rows of x.  Rows that are not there repeat the last.
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        if (BUFFERS > 1) stage(0, 0);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (BUFFERS > 1) {
                if (chunk + 1 < chunks) {
                    stage(chunk + 1, (chunk + 1) % BUFFERS);
                    asm volatile("cp.async.wait_group 1;" ::: "memory");
                } else {
                    asm volatile("cp.async.wait_group 0;" ::: "memory");
                }
                __syncthreads();
            } else if (group == blockIdx.x) {
                asm volatile("cp.async.wait_group 0;" ::: "memory");
                __syncthreads();
            }
            const u32 x_at = shared_address(shared) + (BUFFERS > 1 ? chunk % BUFFERS * X_BYTES : 0) + column_warp * STEPS * (STEP * 2) + lane / 8 * 16;
            u32 x_rows[BN / 8];
#pragma unroll
            for (int t = 0; t < BN / 8; ++t) x_rows[t] = x_at + min(8 * t + lane % 8, rows_x - 1) * X_PITCH;
#pragma unroll 1
            for (int step = 0; step < STEPS; step += DEPTH) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    u32 indices[TILES][PRODUCTS / 2];
#pragma unroll
                    for (int t = 0; t < TILES; ++t) find_indices(indices[t], fragments[d][t], q);
                    const int at = (step + d) * (STEP * 2);
                    multiply_all<0>(sum, fragments[d], x_rows, at, indices);
                    multiply_all<1>(sum, fragments[d], x_rows, at, indices);
#if FP8 || INT8
                    multiply_all<2>(sum, fragments[d], x_rows, at, indices);
                    multiply_all<3>(sum, fragments[d], x_rows, at, indices);
#endif
                    load(fragments[d]);
                }
            }
            if (BUFFERS > 1) __syncthreads();  // the next chunk but one overwrites this one
        }

        // Sum over the warps that shared the columns, in their order.
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int n = 0; n < BN / 8; ++n) {
                float* to = partial + (column_warp * BN + 8 * n + 2 * q) * PITCH + (row_warp * TILES + t) * 16 + g;
                to[0] = sum[t][n][0], to[PITCH] = sum[t][n][1], to[8] = sum[t][n][2], to[PITCH + 8] = sum[t][n][3];
                sum[t][n][0] = sum[t][n][1] = sum[t][n][2] = sum[t][n][3] = 0;
            }
        __syncthreads();
        for (int i = threadIdx.x; i < rows_x * ROWS; i += THREADS) {
            const int m = i / ROWS, row = i % ROWS, out = group * ROWS + row;
            if (out >= N) continue;
            float all = 0;
#pragma unroll
            for (int c = 0; c < COLUMN_WARPS; ++c) all += partial[(c * BN + m) * PITCH + row];
#if FP8 || INT8
            all *= scale_at(scales, scale_type, out * int(scale_stride));
#endif
            y[u64(m0 + m) * N + out] = rounded(bias ? all + number(bias[out]) : all);
        }
        __syncthreads();
    }
}
