// y = x W^T + bias for few rows of x, on the sparse tensor cores of compute capability 8.0 and up (mma.sp), W as it is stored:
// values (N, K / 2), bitmask (N, K / 8).
//
// Weights go from memory straight to the registers of the multiplication, DEPTH steps ahead; x is staged in shared memory.
// A step is 64 dense columns: lane q of a quad reads 16 bytes of its row, the groups of four 4 q to 4 q + 3, and the two
// multiplications of the step take groups {0, 1} and {2, 3} of every lane.  The order of the columns of a product is free, so x
// is staged in the order that this gives.
// COLUMN_WARPS warps share the columns, ROW_WARPS the rows of W; a block walks over groups of rows.
//
// Compile with -D for all of:
//   BF16       1: bfloat16, 0: float16                BN           8 to 64 rows of x
//   TILES      tiles of 16 rows of W a warp           DEPTH        steps that are loaded ahead
//   ROW_WARPS, COLUMN_WARPS                           STEPS        of a warp in a chunk of x, a multiple of DEPTH
//   BUFFERS    1: all columns of x fit one chunk, 2: chunks take turns
//   MIN_BLOCKS blocks that must fit on a multiprocessor
// K must be a multiple of 16.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROWS = 16 * TILES * ROW_WARPS;             // of W, a block at a time
constexpr int CHUNK = 64 * STEPS * COLUMN_WARPS;         // columns of x
constexpr int X_PITCH = CHUNK * 2 + 16;                  // bytes
constexpr int X_BYTES = BN * X_PITCH;
constexpr int PITCH = ROWS + 4;                          // of partial sums, in floats: their writes meet no bank twice
static_assert(STEPS % DEPTH == 0, "");

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Eight bytes from memory to shared memory, zeros if not `inside`.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(inside ? 8 : 0) : "memory");
}

// Mask nibbles with two bits set, each to its two column indices: 2 bits each, ascending, the first in the low bits.
__device__ __forceinline__ u32 indices_of(u32 mask) {
    u32 first, second, indices;
    asm("lop3.b32 %0, %1, %2, 0x11111111, 0x4D;" : "=r"(first) : "r"(mask), "r"(mask >> 1));
    asm("lop3.b32 %0, %1, %2, 0x22222222, 0x56;" : "=r"(second) : "r"(mask), "r"(mask << 1));
    asm("lop3.b32 %0, %1, %2, 0x55555555, 0xE4;" : "=r"(indices) : "r"(first), "r"(second));
    return indices;
}

#if BF16
#define TYPES "f32.bf16.bf16.f32"
#else
#define TYPES "f32.f16.f16.f32"
#endif

// sum (16, 8) += 16 rows of W times 32 columns of x.  SELECTOR: which pair of lanes of each quad holds the indices.
template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&b)[4], u32 indices) {
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col." TYPES
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(indices), "n"(SELECTOR));
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

__device__ __forceinline__ float number(u16 bits) {
    float value;
#if BF16
    value = __uint_as_float(u32(bits) << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#endif
    return value;
}

// What a lane needs of 16 rows and 64 columns: of rows g and g + 8 its 16 bytes of values, and the mask of all 64 columns.
struct Fragment {
    uint4 values, values8;
    uint2 mask, mask8;
};

__device__ __forceinline__ uint4 load_values(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// `columns` are left of the row; masks are aligned like its length.
__device__ __forceinline__ uint2 load_mask(const u8* at, int columns, bool aligned) {
    uint2 mask;
    if (aligned) {
        asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(mask.x), "=r"(mask.y) : "l"(at));
    } else {
        const u16* half = reinterpret_cast<const u16*>(at);
        mask.x = half[0] | (columns > 16 ? half[1] << 16 : 0);
        mask.y = (columns > 32 ? half[2] : 0) | (columns > 48 ? half[3] << 16 : 0);
    }
    return mask;
}

// values: (N, K / 2).  bitmask: (N, K / 8).  x: (M, K), row m at x + m * x_pitch elements, rows aligned to 8 bytes.
// bias: (N) or null.  y: (M, N).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
mma_sp(const u8* __restrict__ values, const u8* __restrict__ bitmask, const u16* __restrict__ x, const u16* __restrict__ bias,
       u16* __restrict__ y, long long m, long long n, long long k, long long x_pitch) {
    const int M = int(m), N = int(n), K = int(k);
    extern __shared__ __align__(16) u8 shared[];  // chunks of x, and the partial sums (in their place if they take turns)
    float* const partial = reinterpret_cast<float*>(shared + (BUFFERS == 1 ? X_BYTES : 0));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int column_warp = warp % COLUMN_WARPS, row_warp = warp / COLUMN_WARPS;
    const int m0 = blockIdx.y * BN, rows_x = min(BN, M - m0);
    const int groups = (N + ROWS - 1) / ROWS, chunks = (K + CHUNK - 1) / CHUNK;
    const bool aligned = K % 64 == 0;

    const uint2 NOTHING = make_uint2(0x33333333, 0x33333333);  // a legal mask, of zeros

    // Loads run ahead of products: where the next one is.
    int next_group = blockIdx.x, next_chunk = 0, next_step = 0;
    Fragment fragments[DEPTH][TILES];
    auto load = [&](Fragment (&fragment)[TILES]) {
        const int column = next_chunk * CHUNK + (column_warp * STEPS + next_step) * 64;
        const bool any = next_group < groups && column < K, mine = any && column + 16 * q < K;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = next_group * ROWS + (row_warp * TILES + t) * 16 + g;
            const u64 at = u64(min(row, N - 1)), at8 = u64(min(row + 8, N - 1));
            fragment[t].values = mine ? load_values(values + at * K + column + 16 * q) : make_uint4(0, 0, 0, 0);
            fragment[t].values8 = mine ? load_values(values + at8 * K + column + 16 * q) : make_uint4(0, 0, 0, 0);
            fragment[t].mask = any ? load_mask(bitmask + at * (K / 8) + column / 8, K - column, aligned) : NOTHING;
            fragment[t].mask8 = any ? load_mask(bitmask + at8 * (K / 8) + column / 8, K - column, aligned) : NOTHING;
        }
        if (++next_step == STEPS) {
            next_step = 0;
            if (++next_chunk == chunks) next_chunk = 0, next_group += gridDim.x;
        }
    };

    auto stage = [&](int chunk, int buffer) {
        const u32 to = shared_address(shared) + buffer * X_BYTES;
        for (int i = threadIdx.x; i < rows_x * (CHUNK / 4); i += THREADS) {
            const int m = i / (CHUNK / 4), group = i % (CHUNK / 4), column = chunk * CHUNK + group * 4;
            // Group p of the 16 of a step becomes number 4 (p % 4) + p / 4.
            const int place = group / 16 * 16 + group % 4 * 4 + group % 16 / 4;
            const bool inside = column < K;
            copy_async(to + m * X_PITCH + place * 8, x + (m0 + m) * x_pitch + (inside ? column : 0), inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(fragments[d]);
#if __CUDA_ARCH__ >= 900
    // With programmatic launch the kernel before may still run: it must not be touched what that one writes, or reads.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (BUFFERS == 1) stage(0, 0);

    float sum[TILES][BN / 8][4] = {};
    const int mask_bytes = q / 2 ? 0x7531 : 0x6420, mask_shift = q % 2 * 4;
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
            const u32 x_at = shared_address(shared) + (BUFFERS > 1 ? chunk % BUFFERS * X_BYTES : 0) + column_warp * STEPS * 128 + lane / 8 * 16;
            u32 x_rows[BN / 8];
#pragma unroll
            for (int t = 0; t < BN / 8; ++t) x_rows[t] = x_at + min(8 * t + lane % 8, rows_x - 1) * X_PITCH;
#pragma unroll 1
            for (int step = 0; step < STEPS; step += DEPTH) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    u32 indices[TILES];
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        // Product j of the step has its indices in lanes 2 j and 2 j + 1: the even one of groups 0 to 3, which are
                        // nibble j + q % 2 of ... of every lane's 16 bits, the odd one of groups 4 to 7.
                        const Fragment& f = fragments[d][t];
                        const u32 low = __byte_perm(f.mask.x, f.mask.y, mask_bytes) >> mask_shift & 0x0F0F0F0F;
                        const u32 low8 = __byte_perm(f.mask8.x, f.mask8.y, mask_bytes) >> mask_shift & 0x0F0F0F0F;
                        indices[t] = indices_of(__byte_perm(low | low >> 4, low8 | low8 >> 4, 0x6420));
                    }
#pragma unroll
                    for (int n = 0; n < BN / 8; ++n) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            u32 b[4];
                            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                                : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(x_rows[n] + (step + d) * 128 + j * 64));
#pragma unroll
                            for (int t = 0; t < TILES; ++t) {
                                const Fragment& f = fragments[d][t];
                                if (j == 0)
                                    multiply<0>(sum[t][n], f.values.x, f.values8.x, f.values.y, f.values8.y, b, indices[t]);
                                else
                                    multiply<1>(sum[t][n], f.values.z, f.values8.z, f.values.w, f.values8.w, b, indices[t]);
                            }
                        }
                    }
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
            float total = bias ? number(bias[out]) : 0.f;
            float all = 0;
#pragma unroll
            for (int c = 0; c < COLUMN_WARPS; ++c) all += partial[(c * BN + m) * PITCH + row];
            y[u64(m0 + m) * N + out] = rounded(all + total);
        }
        __syncthreads();
    }
}
