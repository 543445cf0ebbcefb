// y = x W^T + bias for few rows of x, on the sparse tensor cores of compute capability 8.0 and up (mma.sp), W of 4 or 8 bits a
// weight as marlin-24 stores it on disk: nothing is reordered.
//
// A unit is 64 rows of W by 32 columns, a contiguous piece of weight_packed and of meta.  Its rows go to four tiles of 16: row g
// of tile j is row 8 g + j of the unit, row g + 8 is row 8 g + j + 4.  So every lane reads its own registers of the
// multiplication with 16-byte loads, straight from memory, DEPTH steps ahead; x is staged in shared memory in its own order.
// A step is 128 columns, one group of scales.  COLUMN_WARPS warps share the columns, ROW_WARPS take units below each other, the
// SPLIT blocks of a cluster share the chunks of columns and sum in rank order.
//
// For many rows of x the second kernel, marlin24_expand, writes W as our other kernels read it.
//
// Compile with -D for all of:
//   BF16       1: bfloat16, 0: float16                BITS         4 or 8
//   GROUPED    1: a scale for 128 columns, 0: a row   PERMUTED     1: scales lie 0 4 1 5 2 6 3 7 within eight rows
//   EXPAND     1: only marlin24_expand, and nothing else needs to be given
//   BN         8 to 32 rows of x                      DEPTH        steps that are loaded ahead
//   ROW_WARPS, COLUMN_WARPS                           STEPS        of a warp in a chunk of x, a multiple of DEPTH
//   SPLIT      1 to 8, above 1 from compute capability 9.0
// N must be a multiple of 64, K of 32, of 128 if GROUPED.

#include "common.cuh"

constexpr int WORDS = BITS / 4;                          // 16-byte loads of a lane and unit

__device__ __forceinline__ u32 add(u32 a, u32 b) {
    u32 c;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3F803F80), "r"(b));  // sums come with 9.0
#else
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
    return c;
}

// word & mask | magic in one instruction: the compiler takes two for two constants.
__device__ __forceinline__ u32 masked(u32 word, u32 mask, u32 magic) {
    u32 c;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(c) : "r"(word), "r"(mask), "r"(magic));
    return c;
}

// Two numbers stored + 2^(BITS - 1), in the low BITS of each half: a float with a mantissa step of 1 holds them, less an offset.
__device__ __forceinline__ u32 integers(u32 word) {
#if BITS == 4 && BF16
    return add(masked(word, 0x000F000F, 0x43004300), 0xC308C308);                                // 128 + u - 136
#elif BITS == 4
    return add(masked(word, 0x000F000F, 0x64006400), 0xE408E408);                                // 1024 + u - 1032
#elif BF16
    return add(masked(word, 0x007F007F, 0x43004300), 0xC380C380 ^ word & 0x00800080);            // less 256, or 128 from u = 128
#else
    return add(masked(word, 0x00FF00FF, 0x64006400), 0xE480E480);                                // 1024 + u - 1152
#endif
}

__device__ __forceinline__ uint4 load16(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// What a lane needs of 64 rows and 128 columns.  indices: of tiles 0 and 1 in lanes q < 2 of a quad, of 2 and 3 in the others.
struct Fragment {
    uint4 values[4][WORDS];
    u32 indices[4][2];
    uint4 scales;

    // Those of 32 columns kt, as number i; zeros if not `inside`.
    __device__ __forceinline__ void load_values(int i, const u32* weight_packed, int N, int unit, int lane, int kt, bool inside) {
        const u32* const at = weight_packed + u64(kt) * (BITS / 2 * N) + unit * (32 * BITS) + lane * BITS;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) values[i][w] = inside ? load16(at + 4 * w) : make_uint4(0, 0, 0, 0);
    }

    // The registers of tile j of 32 columns.
    __device__ __forceinline__ void tile(int i, int j, u32 (&a)[4]) const {
        const u32 words[8] = {values[i][0].x, values[i][0].y, values[i][0].z, values[i][0].w, values[i][WORDS - 1].x,
            values[i][WORDS - 1].y, values[i][WORDS - 1].z, values[i][WORDS - 1].w};
        if (BITS == 4) {
            const u32 w = words[j];
            a[0] = integers(w), a[1] = integers(w >> 8), a[2] = integers(w >> 4), a[3] = integers(w >> 12);
        } else {
            const u32 w = words[2 * j], w8 = words[2 * j + 1];
            a[0] = integers(w), a[1] = integers(w8), a[2] = integers(w >> 8), a[3] = integers(w8 >> 8);
        }
    }
};

// Of row 8 g + j, or with `below` of row 8 g + j + 4, of eight scales as they are stored.
__device__ __forceinline__ float scale_of(uint4 scales, int j, int below) {
    const u32 words[4] = {scales.x, scales.y, scales.z, scales.w};
    const int at = PERMUTED ? 2 * j + below : j + 4 * below;
    return half_number(u16(words[at / 2] >> at % 2 * 16));
}

#if EXPAND

constexpr int WARPS = 4;  // of a block

// Two integers times a scale, rounded once.
__device__ __forceinline__ u32 scaled(u32 two, float scale) {
    return pair(number(u16(two)) * scale, number(u16(two >> 16)) * scale);
}

// Of index nibbles, column c0 in the low two bits and c1 above c0 in the high ones, the mask nibbles.
__device__ __forceinline__ u32 mask_of(u32 indices) {
    const u32 each = 0x11111111, a = indices & each, b = indices >> 1 & each, c = indices >> 2 & each, d = indices >> 3 & each;
    return (~(a | b) & each) | (a & ~b | c & ~d) << 1 | (b & ~a | d & ~c) << 2 | (c & d) << 3;
}

// Every warp takes a unit of four times 32 columns.  values: (N, K / 2), scaled.  bitmask: (N, K / 8).  The others as below.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
marlin24_expand(const u32* __restrict__ weight_packed, const u32* __restrict__ meta, const u16* __restrict__ scales,
                u16* __restrict__ values, u8* __restrict__ bitmask, long long n, long long k) {
    const int N = int(n), K = int(k);
    __shared__ uint4 shared[WARPS][64 * 8];  // 64 rows of 64 values
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int steps = (K + 127) / 128, item = blockIdx.x * WARPS + warp, unit = item / steps, step = item % steps;
    if (unit >= N / 64) return;
    const int pieces = min(4, K / 32 - 4 * step);  // of 32 columns

    Fragment f;
    uint2 indices[4];  // of tile q: rows 8 g + q and 4 below
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f.load_values(i, weight_packed, N, unit, lane, 4 * step + i, i < pieces);
        const u32* const at = meta + u64(4 * step + i) * N + unit * 64 + 32 * (q / 2) + 4 * g + 2 * (q % 2);
        if (i < pieces) indices[i] = *reinterpret_cast<const uint2*>(at);
    }
    f.scales = load16(scales + (GROUPED ? u64(step) * N : 0) + unit * 64 + 8 * g);

    // 16 bytes number v of a row lie at v ^ row / 8: neither writes nor reads meet a bank twice.
    u32* const words = reinterpret_cast<u32*>(shared[warp]) + 8 * g * 32 + q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32* const left = words + (8 * i ^ 4 * g);  // kept values 2 q and 2 q + 1 of 16
        u32* const right = words + (8 * i + 4 ^ 4 * g);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a[4];
            f.tile(i, j, a);
            const float scale = scale_of(f.scales, j, 0), scale4 = scale_of(f.scales, j, 1);
            left[j * 32] = scaled(a[0], scale), left[(j + 4) * 32] = scaled(a[1], scale4);
            right[j * 32] = scaled(a[2], scale), right[(j + 4) * 32] = scaled(a[3], scale4);
        }
    }
    __syncwarp();
    const int v = lane % 8;
    u16* const to = values + u64(unit * 64 + lane / 8) * (K / 2) + step * 64 + v * 8;
#pragma unroll
    for (int r = 0; r < 64; r += 4) {
        if (v < 2 * pieces) *reinterpret_cast<uint4*>(to + u64(r) * (K / 2)) = shared[warp][(r + lane / 8) * 8 + (v ^ r / 8)];
    }
#pragma unroll
    for (int below = 0; below < 2; ++below) {
        u32 masks[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) masks[i] = mask_of(__byte_perm(indices[i].x, indices[i].y, below ? 0x7632 : 0x5410));
        u8* const to = bitmask + u64(unit * 64 + 8 * g + q + 4 * below) * (K / 8) + step * 16;
        if (K % 128 == 0) {
            *reinterpret_cast<uint4*>(to) = make_uint4(masks[0], masks[1], masks[2], masks[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < pieces) reinterpret_cast<u32*>(to)[i] = masks[i];
        }
    }
}

#else

constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROWS = 64 * ROW_WARPS;                     // of W, of a block
constexpr int CHUNK = 128 * STEPS * COLUMN_WARPS;        // columns of x
constexpr int X_PITCH = CHUNK * 2 + 16;                  // bytes
constexpr int X_BYTES = BN * X_PITCH;
constexpr int PITCH = ROWS + 4;                          // of partial sums, in floats
static_assert(STEPS % DEPTH == 0, "");

// Sixteen bytes from memory to shared memory, zeros if not `inside`.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

#if SPLIT > 1
__device__ __forceinline__ float4 load_remote(u32 address, u32 rank) {
    u32 remote;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
    return v;
}
#endif

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ u32 load4(const u32* at) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// weight_packed: (K / 32, BITS / 2 * N) words.  meta: (K / 32, N) words.  scales: (K / 128 or 1, N) float16.
// x: (M, K), aligned to 16 bytes.  bias: (N) or null.  y: (M, N).
extern "C" __global__ void __launch_bounds__(THREADS)
marlin24(const u32* __restrict__ weight_packed, const u32* __restrict__ meta, const u16* __restrict__ scales,
         const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ y, long long m, long long n, long long k) {
    const int M = int(m), N = int(n), K = int(k);
    extern __shared__ __align__(16) u8 shared[];  // two chunks of x, and in their place the partial sums
    float* const partial = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int column_warp = warp % COLUMN_WARPS, row_warp = warp / COLUMN_WARPS;
    const int m0 = blockIdx.y * BN, rows_x = min(BN, M - m0), block = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
    const int unit = min(block * ROW_WARPS + row_warp, N / 64 - 1);
    const int chunks = (K + CHUNK - 1) / CHUNK;

    int next_chunk = rank, next_step = 0;
    Fragment fragments[DEPTH];
    auto load = [&](Fragment& f) {
        const int column = next_chunk * CHUNK + (column_warp * STEPS + next_step) * 128;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int kt = column / 32 + i;
            const bool inside = kt < K / 32;
            const u32* const indices = meta + u64(kt) * N + unit * 64 + 32 * (q / 2) + 4 * g + q % 2;
            f.load_values(i, weight_packed, N, unit, lane, kt, inside);
#pragma unroll
            for (int t = 0; t < 2; ++t) f.indices[i][t] = inside ? load4(indices + 2 * t) : 0x44444444;  // legal; x is 0 there
        }
        if (GROUPED) f.scales = column < K ? load16(scales + u64(column / 128) * N + unit * 64 + 8 * g) : make_uint4(0, 0, 0, 0);
        if (++next_step == STEPS) next_step = 0, next_chunk += SPLIT;
    };

    auto stage = [&](int chunk, int buffer) {
        const u32 to = shared_address(shared) + buffer * X_BYTES;
        for (int i = threadIdx.x; i < rows_x * (CHUNK / 8); i += THREADS) {
            const int row = i / (CHUNK / 8), column = i % (CHUNK / 8) * 8;
            const bool inside = chunk * CHUNK + column < K;
            copy_async(to + row * X_PITCH + column * 2, x + u64(m0 + row) * K + (inside ? chunk * CHUNK + column : 0), inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(fragments[d]);
    start_kernel_after();
    wait_for_kernel_before();

    float sum[BN / 8][4][4] = {};
    if (rank < chunks) stage(rank, 0);
    for (int chunk = rank, buffer = 0; chunk < chunks; chunk += SPLIT, buffer ^= 1) {
        if (chunk + SPLIT < chunks) {
            stage(chunk + SPLIT, buffer ^ 1);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        const u32 x_at = shared_address(shared) + buffer * X_BYTES + column_warp * STEPS * 256 + lane / 8 * 16;
#pragma unroll 1
        for (int step = 0; step < STEPS; step += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const Fragment& f = fragments[d];
                float group[BN / 8][4][4] = {};  // of these 128 columns
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32 a[4][4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) f.tile(i, j, a[j]);
#pragma unroll
                    for (int t = 0; t < BN / 8; ++t) {
                        // ldmatrix: lane l names row l % 8 of matrix l / 8, 8 columns of 8 rows.  Rows not there repeat the last.
                        u32 b[4];
                        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                            : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                            : "r"(x_at + min(8 * t + lane % 8, rows_x - 1) * X_PITCH + (step + d) * 256 + i * 64));
                        float(&to)[4][4] = GROUPED ? group[t] : sum[t];
                        multiply_16x8x32<0>(to[0], a[0][0], a[0][1], a[0][2], a[0][3], b, f.indices[i][0]);
                        multiply_16x8x32<0>(to[1], a[1][0], a[1][1], a[1][2], a[1][3], b, f.indices[i][1]);
                        multiply_16x8x32<1>(to[2], a[2][0], a[2][1], a[2][2], a[2][3], b, f.indices[i][0]);
                        multiply_16x8x32<1>(to[3], a[3][0], a[3][1], a[3][2], a[3][3], b, f.indices[i][1]);
                    }
                }
                if (GROUPED) {
#pragma unroll
                    for (int t = 0; t < BN / 8; ++t)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
#pragma unroll
                            for (int c = 0; c < 4; ++c) sum[t][j][c] += scale_of(f.scales, j, c / 2) * group[t][j][c];
                }
                load(fragments[d]);
            }
        }
        __syncthreads();  // the next chunk but one overwrites this one, and so do the partial sums
    }

    if (!GROUPED) {
        const uint4 of_rows = load16(scales + unit * 64 + 8 * g);
#pragma unroll
        for (int t = 0; t < BN / 8; ++t)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) sum[t][j][c] *= scale_of(of_rows, j, c / 2);
    }
    // Sum over the warps that shared the columns, in their order, and over the blocks, in theirs.
#pragma unroll
    for (int t = 0; t < BN / 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            *reinterpret_cast<float4*>(partial + (column_warp * BN + 8 * t + 2 * q + c % 2) * PITCH + row_warp * 64 + 8 * g + c / 2 * 4) =
                make_float4(sum[t][0][c], sum[t][1][c], sum[t][2][c], sum[t][3][c]);
    __syncthreads();
    const int fours = rows_x * (ROWS / 4);
    auto sum_here = [&](const float* at) {
        float4 all = *reinterpret_cast<const float4*>(at);
#pragma unroll
        for (int c = 1; c < COLUMN_WARPS; ++c) all = plus(all, *reinterpret_cast<const float4*>(at + c * BN * PITCH));
        return all;
    };
#if SPLIT > 1
    for (int i = threadIdx.x; i < fours; i += THREADS) {
        float* const at = partial + i / (ROWS / 4) * PITCH + i % (ROWS / 4) * 4;
        *reinterpret_cast<float4*>(at) = sum_here(at);
    }
    cluster_sync();
#endif
    for (int i = threadIdx.x + rank * THREADS; i < fours; i += SPLIT * THREADS) {
        const int row_x = i / (ROWS / 4), row = i % (ROWS / 4) * 4, out = block * ROWS + row;
        if (out >= N) continue;
        const float* const at = partial + row_x * PITCH + row;
#if SPLIT > 1
        float4 all = load_remote(shared_address(at), 0);
#pragma unroll
        for (int part = 1; part < SPLIT; ++part) all = plus(all, load_remote(shared_address(at), part));
#else
        float4 all = sum_here(at);
#endif
        if (bias) all = plus(all, make_float4(number(bias[out]), number(bias[out + 1]), number(bias[out + 2]), number(bias[out + 3])));
        *reinterpret_cast<ushort4*>(y + u64(m0 + row_x) * N + out) =
            make_ushort4(rounded(all.x), rounded(all.y), rounded(all.z), rounded(all.w));
    }
#if SPLIT > 1
    cluster_sync();  // a block must not end while others read its sums
#endif
}

#endif
