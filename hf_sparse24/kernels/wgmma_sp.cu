// y = x W^T + bias on Hopper's sparse tensor cores (wgmma.sp, sm_90a), W as it is stored: values (N, K / 2), bitmask (N, K / 8).
// If values are of 8 bits, x is of the same type, and both have scales: one for each row, or one for all rows of W.
//
// W is the sparse operand A, so a block computes a transposed tile: BM rows of W (out features) by BN rows of x.
// A producer thread fills stages of BK dense columns by TMA.  Each consumer warpgroup multiplies 64 rows of W; it reads the
// bitmask of its rows by itself, since TMA is slow with rows as short as these: AHEAD turns ahead, where a turn is a stage or a
// window, whichever is longer.  Each row of a load costs the multiprocessor's memory pipe a clock, so wide windows are better.
// A cluster has SPLIT x MULTICAST blocks.  MULTICAST blocks lie below each other in W and share the loads of x.  SPLIT blocks
// share the columns of one tile and sum in rank order through distributed shared memory; without SPLIT a block walks over tiles,
// and the loads of the next tile begin while this one is written.
//
// Sparse activations take the place of W, and a dense weight that of x: then y lies the other way, see SPARSE_ROWS.
//
// Compile with -D for all of:
//   BF16       1: bfloat16, 0: float16
//   SPARSE_ROWS  0: y (M, N), bias (N); 1: y (N, M), bias (M): a row of y for each row of the sparse operand
//   FP8, INT8  1: values and x are float8_e4m3fn or int8, both 0: they are of the type of y
//   BM         64, 128 or 192 rows of W          BN      8, 16, 32, 64, 128, 192 or 256 rows of x
//   BK         64, 128 or 256 columns a stage, of 8 bits 128, 256 or 512   STAGES  at least 2
//   WINDOW     64, 128 or 256 columns of the bitmask that a lane's loads are for, of 8 bits 64 or 256
//   AHEAD      2 to 8                            SPLIT, MULTICAST  1 to 8
//   MIN_BLOCKS blocks that must fit on a multiprocessor
// K must be a multiple of BK, of 8 bits of 64; N and M are free.

#include "common.cuh"

// Indices must not change while a product reads them; that of the stage before may.
static_assert(AHEAD >= 2, "");

static_assert(!SPARSE_ROWS || (SPLIT == 1 && BN >= 64), "");

constexpr int CLUSTER = SPLIT * MULTICAST;
constexpr int CONSUMER_WARPS = BM / 16;
// Wide tiles need more registers than an equal share: the producer is a whole warpgroup, which gives most of its own to the others.
constexpr bool WIDE = BN >= 192;
static_assert(!WIDE || (BM == 128 && SPLIT == 1), "");
constexpr int THREADS = 32 * CONSUMER_WARPS + (WIDE ? 128 : 32);
constexpr int ELEMENT = FP8 || INT8 ? 1 : 2;  // bytes
constexpr int VALUES_BYTES = BM * (BK / 2 * ELEMENT);
constexpr int X_BYTES = BN * BK * ELEMENT;
constexpr int STAGE_BYTES = VALUES_BYTES + X_BYTES;
// A row of a box of values is 128 bytes, or all that a stage has of it.  The swizzle works on eight such rows.
constexpr int VALUES_ROW = BK / 2 * ELEMENT < 128 ? 64 : 128;
constexpr int PRODUCTS = BK * ELEMENT / 64;  // of a stage: 32 bytes of values and 64 of x
constexpr int TURN = BK > WINDOW ? BK : WINDOW, STAGES_OF_TURN = TURN / BK;
// Of a window and row, that a lane holds: of 16 bits for half of the products, of 8 bits for all.
constexpr int WORDS = WINDOW / 64, PRODUCTS_OF_WINDOW = WORDS * ELEMENT;
// With SPLIT the sums take the place of the stages: (BN, PITCH) floats, whose writes meet no bank twice.  Without, each warpgroup
// has (OUT_ROWS, OUT_PITCH) elements beside them.
constexpr int PITCH = BM + 4;
constexpr int OUT_ROWS = BN < 64 ? BN : 64, OUT_PITCH = 64 + 8;  // of rows of x

struct alignas(64) TensorMap { u64 opaque[16]; };

// ---- barriers and copies ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        "  mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A box at (column, row) of a matrix; what lies outside the matrix is filled with zeros.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void load_box_for_all(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ranks) : "memory");
}

// ---- sparse matrix instructions -----------------------------------------------------------------------------------------------

// Of a tile whose swizzled rows of 64 or 128 bytes follow each other.
template <int ROW>
__device__ __forceinline__ u64 descriptor(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | u64(1) << 16 | u64(8 * ROW >> 4) << 32 | u64(ROW == 128 ? 1 : 2) << 62;
}

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#if INT8
typedef int Sum;
#define D(i) "+r"(d[i])
#else
typedef float Sum;
#define D(i) "+f"(d[i])
#endif
#define F4(i) D(i), D(i + 1), D(i + 2), D(i + 3)
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
// The last operand: whether to add to d, signs, and the order of x's columns.
#if FP8
#define TYPES "k64.f32.e4m3.e4m3"
#define OPTIONS ", 1, 1, 1;"
#elif INT8
#define TYPES "k64.s32.s8.s8"
#define OPTIONS ", 1;"
#elif BF16
#define TYPES "k32.f32.bf16.bf16"
#define OPTIONS ", 1, 1, 1, 0, 0;"
#else
#define TYPES "k32.f32.f16.f16"
#define OPTIONS ", 1, 1, 1, 0, 0;"
#endif
#define WGMMA(n, registers, a, b, meta, sel, ...)                                                                         \
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #n TYPES " {" registers "}, %" #a ", %" #b ", %" #meta ", %" #sel \
                 OPTIONS : __VA_ARGS__ : "l"(values), "l"(x), "r"(indices), "n"(SELECTOR))

// d (64, BN) += 64 rows of W times 32 columns of x, of 8 bits 64.  SELECTOR: which pair of lanes of each quad holds the indices,
// of 8 bits it is all of them.
template <int SELECTOR>
__device__ __forceinline__ void multiply(Sum (&d)[BN / 2], u64 values, u64 x, u32 indices) {
#if BN == 8
    WGMMA(8, "%0, %1, %2, %3", 4, 5, 6, 7, F4(0));
#elif BN == 16
    WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10, 11, F4(0), F4(4));
#elif BN == 32
    WGMMA(32, R0, 16, 17, 18, 19, F16(0));
#elif BN == 64
    WGMMA(64, R0 ", " R1, 32, 33, 34, 35, F16(0), F16(16));
#elif BN == 128
    WGMMA(128, R0 ", " R1 ", " R2 ", " R3, 64, 65, 66, 67, F16(0), F16(16), F16(32), F16(48));
#elif BN == 192
    WGMMA(192, R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5, 96, 97, 98, 99, F16(0), F16(16), F16(32), F16(48), F16(64), F16(80));
#elif BN == 256
    WGMMA(256, R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5 ", " R6 ", " R7, 128, 129, 130, 131,
          F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112));
#endif
}

__device__ __forceinline__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int RUNNING>
__device__ __forceinline__ void multiply_wait(Sum (&d)[BN / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(RUNNING) : "memory");
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) asm volatile("" : D(i)::"memory");
}

// ---- output -------------------------------------------------------------------------------------------------------------------

// Mask words of a lane for a turn.  Of 16 bits: of rows g and g + 8, the columns of each window of which lane pair 0 holds the
// first half, pair 1 the second.  Of 8 bits: of row g in even lanes, g + 8 in odd ones; if a window is 64 columns, the first 32 in
// pair 0 and the others in pair 1, else again its halves.
struct Mask { u32 words[TURN / 64], words8[ELEMENT == 1 ? 1 : TURN / 64]; };

template <int COUNT>
__device__ __forceinline__ void load_words(u32* words, const u8* at) {
    if constexpr (COUNT == 1) {
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(words[0]) : "l"(at));
    } else if constexpr (COUNT == 2) {
        asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(at));
    } else {
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(at));
    }
}

// Of rows of W that are `last` + 4 WORDS bytes long.  Behind the end of a row the mask is another one: values are zeros there.
__device__ __forceinline__ void load_mask(Mask& mask, const u8* row, const u8* row8, int at, int last) {
#pragma unroll
    for (int w = 0; w < TURN / WINDOW; ++w) {
        const int from = ELEMENT == 1 || WINDOW > BK ? min(at + w * (WINDOW / 8), last) : at + w * (WINDOW / 8);
        load_words<WORDS>(mask.words + w * WORDS, row + from);
        if (ELEMENT == 2) load_words<WORDS>(mask.words8 + w * WORDS, row8 + from);
    }
}

// Indices for the products of a turn, as the multiplication takes them from its lanes.
__device__ __forceinline__ void find_indices(u32 (&indices)[TURN / 64], const Mask& mask, int lane) {
#pragma unroll
    for (int i = 0; i < TURN / 64; ++i)
        indices[i] = indices_of(ELEMENT == 1 ? mask.words[i] : __byte_perm(mask.words[i], mask.words8[i % (ELEMENT == 1 ? 1 : TURN / 64)], lane & 1 ? 0x7632 : 0x5410));
#if (FP8 || INT8) && WINDOW == 256
    // Pair 0 has words 0 to 3 of eight and needs the even ones, pair 1 has 4 to 7 and needs the odd ones.
#pragma unroll
    for (int w = 0; w < TURN / 64; w += 4) {
        const bool odd = lane & 2;
        const u32 first = __shfl_xor_sync(0xFFFFFFFF, odd ? indices[w] : indices[w + 1], 2);
        const u32 second = __shfl_xor_sync(0xFFFFFFFF, odd ? indices[w + 2] : indices[w + 3], 2);
        const u32 own = odd ? indices[w + 1] : indices[w], own2 = odd ? indices[w + 3] : indices[w + 2];
        indices[w] = odd ? first : own, indices[w + 1] = odd ? second : own2;
        indices[w + 2] = odd ? own : first, indices[w + 3] = odd ? own2 : second;
    }
#endif
}

// The two 8 x 8 fragments, transposed, of 16 rows of W and two times 8 rows of x.
__device__ __forceinline__ void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_fragments(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Which tiles: first down the rows of W, `group` tiles of them, then along x, then on to the next group.
struct Tiles {
    int tiles_n, tiles_m, group;
    __device__ Tiles(int N, int M, int group) : tiles_n((N + BM * MULTICAST - 1) / (BM * MULTICAST)), tiles_m((M + BN - 1) / BN), group(group) {}
    __device__ int count() const { return tiles_n * tiles_m; }
    __device__ void find(int tile, u32 below, int& n0, int& m0) const {
        const int first = tile / (group * tiles_m) * group, width = min(group, tiles_n - first), within = tile - first * tiles_m;
        m0 = within / width * BN;
        n0 = ((first + within % width) * MULTICAST + int(below)) * BM;
    }
};

// values: (N, K / 2), boxes (BM, 64 or 128 bytes), swizzled by the bytes of their rows; columns count units of two bytes.
// x: (M, K), boxes (BN / MULTICAST, 128 bytes), swizzled by 128 bytes, in the same units.
// bitmask: (N, K / 8).  y: (M, N).  bias: (N) or null.  group: see Tiles.
// scales: of values of 8 bits, (N) or one, as `scale_type` and `scale_stride` (1 or 0) say; x_scales: (M).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
wgmma_sp(const __grid_constant__ TensorMap values_map, const __grid_constant__ TensorMap x_map, const u8* __restrict__ bitmask,
         u16* __restrict__ y, const u16* __restrict__ bias, long long m_rows, long long n_rows, long long columns, long long group,
         const void* __restrict__ scales, long long scale_type, long long scale_stride, const float* __restrict__ x_scales) {
    const int M = int(m_rows), N = int(n_rows), K = int(columns);
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 stages = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0, part = rank / MULTICAST, below = rank % MULTICAST;
    const Tiles tiles(N, M, int(group));
    const int step = gridDim.x / CLUSTER, chunks = (K + BK - 1) / BK;
    const int turns = (K + TURN - 1) / TURN, first_turn = turns * int(part) / SPLIT, last_turn = turns * int(part + 1) / SPLIT;
    const int begin = first_turn * STAGES_OF_TURN, end = min(last_turn * STAGES_OF_TURN, chunks);

    start_kernel_after();
    if (SPARSE_ROWS) wait_for_kernel_before();  // which has written the sparse operand
    if (threadIdx.x == 32 * CONSUMER_WARPS) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMER_WARPS * MULTICAST);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    if (MULTICAST > 1) cluster_sync(); else __syncthreads();

    if (warp >= CONSUMER_WARPS) {
        if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == CONSUMER_WARPS && lane == 0) {
            u64 once, often;  // weights that are read by one block pass through the cache
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
            asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
            if (tiles.tiles_m > 1) once = often;
            auto load_values = [&](int s, int chunk, int n0) {
                barrier_expect(full + 8 * s, STAGE_BYTES);
                for (int a = 0; a < VALUES_BYTES / (BM * VALUES_ROW); ++a)
                    load_box(stages + s * STAGE_BYTES + a * BM * VALUES_ROW, values_map, chunk * (BK / 4 * ELEMENT) + a * 64, n0, full + 8 * s, once);
            };
            int n0, m0, early = min(STAGES, end - begin);
            tiles.find(blockIdx.x / CLUSTER, below, n0, m0);
            for (int s = 0; s < early; ++s) load_values(s, begin + s, n0);
            wait_for_kernel_before();
            int s = 0, phase = 1;
            for (int tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += step) {
                tiles.find(tile, below, n0, m0);
                for (int chunk = begin; chunk < end; ++chunk) {
                    const u32 stage = stages + s * STAGE_BYTES, barrier = full + 8 * s;
                    if (--early < 0) {
                        barrier_wait(empty + 8 * s, phase);
                        load_values(s, chunk, n0);
                    }
                    for (int b = 0; b < BK * ELEMENT / 128; ++b) {
                        const u32 to = stage + VALUES_BYTES + b * BN * 128;
                        if (MULTICAST == 1)
                            load_box(to, x_map, chunk * (BK / 2 * ELEMENT) + b * 64, m0, barrier, often);
                        else
                            load_box_for_all(to + below * (BN / MULTICAST * 128), x_map, chunk * (BK / 2 * ELEMENT) + b * 64, m0 + below * (BN / MULTICAST),
                                             barrier, ((1 << MULTICAST) - 1) << part * MULTICAST);
                    }
                    if (++s == STAGES) s = 0, phase ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        const int warpgroup = warp / 4, row = warp * 16 + lane / 4;  // of the tile, and row + 8
        int s = 0, phase = 0;
        auto release = [&](int stage) {
            if (MULTICAST == 1) {
                if (lane == 0) barrier_arrive(empty + 8 * stage);
            } else if (lane < MULTICAST) {
                barrier_arrive(empty + 8 * stage, part * MULTICAST + lane);
            }
        };
        for (int tile = blockIdx.x / CLUSTER; tile < tiles.count(); tile += step) {
            int n0, m0;
            tiles.find(tile, below, n0, m0);
            const int mask_row = ELEMENT == 1 ? row + 8 * (lane & 1) : row, mask_column = (lane & 2) * (WORDS * 2);
            const u8* mask_at = bitmask + u64(min(n0 + mask_row, N - 1)) * (K / 8);
            const u8* mask8_at = bitmask + u64(min(n0 + row + 8, N - 1)) * (K / 8);
            Mask ahead[AHEAD];
            auto load_ahead = [&](int p, int turn) {
                if (turn < last_turn) load_mask(ahead[p], mask_at, mask8_at, turn * (TURN / 8) + mask_column, K / 8 - 4 * WORDS);
            };
#pragma unroll
            for (int p = 0; p < AHEAD; ++p) load_ahead(p, first_turn + p);
            wait_for_kernel_before();
            Sum d[BN / 2];
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) d[i] = 0;
            int last = -1;
            for (int turn0 = first_turn; turn0 < last_turn; turn0 += AHEAD) {
#pragma unroll
                for (int p = 0; p < AHEAD; ++p) {
                    const int turn = turn0 + p;
#if FP8 || INT8
                    if (turn >= last_turn) continue;  // with break, ptxas 13.0 waits for each product before it begins the next
#else
                    if (turn >= last_turn) break;
#endif
                    u32 indices[TURN / 64];
                    find_indices(indices, ahead[p], lane);
                    load_ahead(p, turn + AHEAD);
#pragma unroll
                    for (int j = 0; j < STAGES_OF_TURN; ++j) {
                        if (STAGES_OF_TURN > 1 && turn * STAGES_OF_TURN + j >= end) continue;
                        const u32 stage = stages + s * STAGE_BYTES;
                        barrier_wait(full + 8 * s, phase);
                        const u64 values = descriptor<VALUES_ROW>(stage + warpgroup * 64 * VALUES_ROW);
                        const u64 x = descriptor<128>(stage + VALUES_BYTES);
                        multiply_begin();
                        // Descriptors count in units of 16 bytes.
#pragma unroll
                        for (int t = 0; t < PRODUCTS; ++t) {
                            const u64 v = values + t * 32 / VALUES_ROW * (BM * VALUES_ROW / 16) + t * 32 % VALUES_ROW / 16;
                            const u64 b = x + t / 2 * (BN * 128 / 16) + t % 2 * 4;
                            const int product = j * PRODUCTS + t, window = product / PRODUCTS_OF_WINDOW, within = product % PRODUCTS_OF_WINDOW;
                            if (within < WORDS)
                                multiply<0>(d, v, b, indices[window * WORDS + within % WORDS]);
                            else
                                multiply<1>(d, v, b, indices[window * WORDS + within % WORDS]);
                        }
                        multiply_end();
                        multiply_wait<1>(d);  // the products of the stage before are done
                        if (last >= 0) release(last);
                        last = s;
                        if (++s == STAGES) s = 0, phase ^= 1;
                    }
                }
            }
            multiply_wait<0>(d);
            if (last >= 0) release(last);

            if (SPLIT == 1) {
                const int at = min(n0 + row, N - 1), at8 = min(n0 + row + 8, N - 1);
#if FP8 || INT8
                const float scale = scale_at(scales, scale_type, at * int(scale_stride)), scale8 = scale_at(scales, scale_type, at8 * int(scale_stride));
#endif
                float add[2] = {};
                if (bias && !SPARSE_ROWS) add[0] = number(bias[at]), add[1] = number(bias[at8]);
                u16* const out = reinterpret_cast<u16*>(shared + STAGES * STAGE_BYTES) + warpgroup * OUT_ROWS * OUT_PITCH;
                const int thread = threadIdx.x % 128, fragment = lane / 8;
                // Where a lane's row of the fragments is: those of 16 rows of W and 16 of x, transposed or not.
                const u32 to = shared_address(out) + (SPARSE_ROWS ? (warp % 4 * 16 + fragment % 2 * 8 + lane % 8) * OUT_PITCH + fragment / 2 * 8
                                                                  : (fragment / 2 * 8 + lane % 8) * OUT_PITCH + warp % 4 * 16 + fragment % 2 * 8) * 2;
#pragma unroll
                for (int r = 0; r < BN; r += OUT_ROWS) {
                    if (m0 + r >= M) break;
                    warpgroup_sync(warpgroup);  // what was there is written
#pragma unroll
                    for (int j = 0; j < OUT_ROWS; j += 16) {
                        float f[8];
#pragma unroll
                        for (int i = 0; i < (BN == 8 ? 4 : 8); ++i) {
                            const int m = min(m0 + r + j + i / 4 * 8 + lane % 4 * 2 + i % 2, M - 1);
                            f[i] = float(d[(r + j) / 2 + i]);
#if FP8 || INT8
                            f[i] *= (i & 2 ? scale8 : scale) * x_scales[m];
#endif
                            if (!SPARSE_ROWS) f[i] += add[i / 2 % 2];
                            else if (bias) f[i] += number(bias[m]);
                        }
                        const u32 a = pair(f[0], f[1]), b = pair(f[2], f[3]), c = pair(f[4], f[5]), e = pair(f[6], f[7]);
                        if (BN == 8)
                            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
                        else if (SPARSE_ROWS)
                            store_fragments(to + j * 2, a, b, c, e);
                        else
                            store_transposed(to + j * OUT_PITCH * 2, a, b, c, e);
                    }
                    warpgroup_sync(warpgroup);
                    // Eight elements a thread, along a row of y.
                    const int column = thread % 8 * 8, width = SPARSE_ROWS ? M : N, rows = SPARSE_ROWS ? N : M;
                    const int first = SPARSE_ROWS ? n0 + warpgroup * 64 : m0 + r, from = column + (SPARSE_ROWS ? m0 + r : n0 + warpgroup * 64);
                    for (int i = thread / 8; i < OUT_ROWS && first + i < rows; i += 16) {
                        const uint4 eight = *reinterpret_cast<const uint4*>(out + i * OUT_PITCH + column);
                        u16* const at = y + u64(first + i) * width + from;
                        if (width % 8 == 0 && from < width) {
                            *reinterpret_cast<uint4*>(at) = eight;
                        } else {
                            for (int e = 0; e < 8 && from + e < width; ++e) at[e] = out[i * OUT_PITCH + column + e];
                        }
                    }
                }
            } else {
                asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_WARPS * 32) : "memory");  // the stages are free
                float* to = reinterpret_cast<float*>(shared) + lane % 4 * 2 * PITCH + row;
#pragma unroll
                for (int j = 0; j < BN / 8; ++j, to += 8 * PITCH) {
                    to[0] = float(d[4 * j]), to[PITCH] = float(d[4 * j + 1]);
                    to[8] = float(d[4 * j + 2]), to[PITCH + 8] = float(d[4 * j + 3]);
                }
            }
        }
    }

    if (SPLIT > 1) {
        wait_for_kernel_before();  // all threads write
        cluster_sync();
        int n0, m0;
        tiles.find(blockIdx.x / CLUSTER, below, n0, m0);
        const int rows = min(BN, M - m0);
        constexpr int TURNS = SPLIT > 2 ? 2 : 4;  // the loads of so many sums are under way at a time
        for (int first = threadIdx.x + part * THREADS; first < rows * (BM / 4); first += TURNS * SPLIT * THREADS) {
            float sum[TURNS][4] = {};
#pragma unroll
            for (int t = 0; t < TURNS; ++t) {
                const int i = first + t * SPLIT * THREADS, m = i / (BM / 4), n = i % (BM / 4) * 4;
                if (i < rows * (BM / 4)) {
#pragma unroll
                    for (int p = 0; p < SPLIT; ++p) add_remote(sum[t], stages + (m * PITCH + n) * 4, p * MULTICAST + below);
                }
            }
#pragma unroll
            for (int t = 0; t < TURNS; ++t) {
                const int i = first + t * SPLIT * THREADS, m = i / (BM / 4), n = i % (BM / 4) * 4, out = n0 + n;
                if (i >= rows * (BM / 4) || out >= N) continue;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
#if FP8 || INT8
                    sum[t][e] *= scale_at(scales, scale_type, min(out + e, N - 1) * int(scale_stride)) * x_scales[m0 + m];
#endif
                    if (bias && out + e < N) sum[t][e] += number(bias[out + e]);
                }
                const u32 low = pair(sum[t][0], sum[t][1]), high = pair(sum[t][2], sum[t][3]);
                u16* const to = y + u64(m0 + m) * N + out;
                if (N % 4 == 0) {
                    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
                } else {
                    to[0] = u16(low);
                    if (out + 1 < N) to[1] = u16(low >> 16);
                    if (out + 2 < N) to[2] = u16(high);
                    if (out + 3 < N) to[3] = u16(high >> 16);
                }
            }
        }
    }
    // A block's memory must outlive the others' reading it, and its barriers their arrivals.
    if (CLUSTER > 1) cluster_sync();
}
