"""How `mma_sp.cu` and `wgmma_sp.cu` are compiled: the configurations in use, and what was measured of them on an H200.

Five or so for each number of rows lose less than 2 % against trying all (benchmarks/tuning/tune.py, and
benchmarks/results/tune-h200.json).
"""

from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp

# How a kernel is compiled -> how its times compare with those that `cost` gives.
CONFIGS: dict[MmaSp | WgmmaSp, float] = {
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=1): 1.0,
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=2): 1.007,
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=8, steps=8, buffers=1, min_blocks=2): 0.97,
    WgmmaSp(64, 8, 256, stages=5, ahead=2, split=4, min_blocks=2): 1.0,
    WgmmaSp(128, 8, 256, stages=6, ahead=2): 0.996,
    WgmmaSp(128, 8, 128, stages=6, ahead=2, split=4, min_blocks=2, window=256): 0.997,
    WgmmaSp(64, 16, 256, stages=4, ahead=2, min_blocks=2): 0.922,
    WgmmaSp(64, 16, 128, stages=8, ahead=4, split=2, min_blocks=2): 0.925,
    WgmmaSp(64, 16, 128, stages=8, ahead=4, split=4, min_blocks=2): 0.911,
    WgmmaSp(64, 32, 128, stages=8, ahead=4): 0.855,
    WgmmaSp(64, 32, 256, stages=6, ahead=2, multicast=2): 0.902,
    WgmmaSp(64, 32, 128, stages=8, ahead=4, split=2): 0.892,
    WgmmaSp(64, 32, 128, stages=6, ahead=4, split=4, min_blocks=2): 0.898,
    WgmmaSp(128, 32, 256, stages=4, ahead=2): 0.922,
    WgmmaSp(128, 32, 256, stages=4, ahead=2, multicast=4): 0.898,
    WgmmaSp(64, 64, 128, stages=8, ahead=4): 0.875,
    WgmmaSp(64, 64, 128, stages=8, ahead=4, split=2): 0.916,
    WgmmaSp(64, 64, 128, stages=8, ahead=4, split=4): 0.894,
    WgmmaSp(128, 64, 256, stages=3, ahead=2): 0.903,
    WgmmaSp(128, 64, 128, stages=6, ahead=4, split=4): 0.939,
    WgmmaSp(64, 128, 128, stages=5, ahead=2, window=256): 0.936,
    WgmmaSp(64, 128, 128, stages=5, ahead=2, split=4, window=256): 0.976,
    WgmmaSp(64, 128, 128, stages=5, ahead=2, split=2, window=256): 0.976,
    WgmmaSp(128, 128, 128, stages=4, ahead=2, window=256): 0.936,
    WgmmaSp(128, 128, 128, stages=4, ahead=2, split=2, window=256): 0.966,
    WgmmaSp(128, 128, 128, stages=4, ahead=2, split=4, window=256): 0.995,
    WgmmaSp(192, 128, 64, stages=7, ahead=2, window=256): 0.994,
    WgmmaSp(128, 192, 64, stages=6, ahead=2, multicast=4, window=256): 0.948,
    WgmmaSp(128, 256, 64, stages=5, ahead=2, window=256): 0.908,
    WgmmaSp(128, 256, 64, stages=5, ahead=2, multicast=4, window=256): 0.974,
}
# The same of values of 8 bits (benchmarks/results/tune-8bit-h200.json).
CONFIGS_8BIT: dict[MmaSp | WgmmaSp, float] = {
    MmaSp(bn=8, tiles=1, depth=2, row_warps=1, column_warps=8, steps=2, buffers=2, min_blocks=2, value_bytes=1): 1.047,
    MmaSp(bn=8, tiles=1, depth=2, row_warps=2, column_warps=8, steps=2, buffers=1, value_bytes=1): 0.949,
    MmaSp(bn=8, tiles=1, depth=2, row_warps=2, column_warps=8, steps=2, buffers=2, value_bytes=1): 1.132,
    MmaSp(bn=8, tiles=1, depth=2, row_warps=2, column_warps=8, steps=4, buffers=1, value_bytes=1): 1.04,
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=8, steps=4, buffers=1, min_blocks=2, value_bytes=1): 1.299,
    MmaSp(bn=16, tiles=1, depth=2, row_warps=2, column_warps=8, steps=2, buffers=1, value_bytes=1): 0.991,
    MmaSp(bn=16, tiles=1, depth=2, row_warps=2, column_warps=8, steps=2, buffers=2, value_bytes=1): 1.257,
    MmaSp(bn=16, tiles=1, depth=2, row_warps=2, column_warps=8, steps=4, buffers=1, value_bytes=1): 1.062,
    WgmmaSp(64, 8, 512, stages=5, ahead=2, min_blocks=2, value_bytes=1): 1.244,
    WgmmaSp(128, 8, 512, stages=3, ahead=2, min_blocks=2, value_bytes=1, window=256): 1.163,
    WgmmaSp(128, 8, 512, stages=3, ahead=2, split=4, min_blocks=2, value_bytes=1): 1.093,
    WgmmaSp(128, 8, 512, stages=3, ahead=2, split=4, min_blocks=2, value_bytes=1, window=256): 1.196,
    WgmmaSp(128, 8, 512, stages=6, ahead=2, split=4, value_bytes=1): 0.95,
    WgmmaSp(64, 16, 512, stages=4, ahead=2, min_blocks=2, value_bytes=1): 1.189,
    WgmmaSp(128, 16, 256, stages=5, ahead=4, min_blocks=2, value_bytes=1): 1.187,
    WgmmaSp(128, 16, 256, stages=5, ahead=4, split=4, min_blocks=2, value_bytes=1): 1.088,
    WgmmaSp(128, 16, 512, stages=5, ahead=2, split=4, value_bytes=1): 0.916,
    WgmmaSp(64, 32, 512, stages=3, ahead=2, min_blocks=2, value_bytes=1): 1.103,
    WgmmaSp(64, 32, 512, stages=6, ahead=2, split=4, value_bytes=1): 0.895,
    WgmmaSp(128, 32, 256, stages=4, ahead=4, min_blocks=2, value_bytes=1): 1.156,
    WgmmaSp(128, 32, 256, stages=4, ahead=4, split=4, min_blocks=2, value_bytes=1): 1.041,
    WgmmaSp(64, 64, 512, stages=4, ahead=2, value_bytes=1): 1.208,
    WgmmaSp(64, 64, 512, stages=4, ahead=2, multicast=4, value_bytes=1, window=256): 1.206,
    WgmmaSp(64, 64, 512, stages=4, ahead=2, split=2, value_bytes=1): 1.208,
    WgmmaSp(64, 64, 256, stages=4, ahead=4, split=4, min_blocks=2, value_bytes=1): 0.99,
    WgmmaSp(128, 64, 512, stages=3, ahead=2, value_bytes=1, window=256): 1.166,
    WgmmaSp(128, 64, 512, stages=3, ahead=2, multicast=4, value_bytes=1, window=256): 1.148,
    WgmmaSp(128, 64, 512, stages=3, ahead=2, split=2, value_bytes=1, window=256): 1.219,
    WgmmaSp(128, 128, 256, stages=4, ahead=2, value_bytes=1, window=256): 1.142,
    WgmmaSp(128, 128, 256, stages=4, ahead=2, multicast=2, value_bytes=1, window=256): 1.144,
    WgmmaSp(128, 128, 256, stages=4, ahead=2, multicast=4, value_bytes=1, window=256): 1.13,
    WgmmaSp(128, 128, 128, stages=8, ahead=2, split=2, value_bytes=1, window=256): 1.193,
    WgmmaSp(192, 128, 256, stages=3, ahead=2, value_bytes=1, window=256): 1.117,
    WgmmaSp(128, 256, 128, stages=5, ahead=2, value_bytes=1, window=256): 1.058,
    WgmmaSp(128, 256, 128, stages=5, ahead=2, multicast=2, value_bytes=1, window=256): 1.126,
    WgmmaSp(128, 256, 128, stages=5, ahead=2, multicast=4, value_bytes=1, window=256): 1.112,
}
# (n, k, up to so many rows of x, more than half of them): where another is at least 3 % faster than what the model picks.
MEASURED: dict[tuple[int, int, int], MmaSp | WgmmaSp] = {
    (1536, 1536, 8): WgmmaSp(64, 8, 256, stages=5, ahead=2, split=4, min_blocks=2),
    (1536, 1536, 128): WgmmaSp(128, 64, 128, stages=6, ahead=4, split=4),
    (1536, 1536, 256): WgmmaSp(64, 64, 128, stages=8, ahead=4),
    (1536, 1536, 512): WgmmaSp(64, 128, 128, stages=5, ahead=2, window=256),
    (2560, 4096, 256): WgmmaSp(128, 128, 128, stages=4, ahead=2, split=2, window=256),
    (3584, 3584, 256): WgmmaSp(64, 128, 128, stages=5, ahead=2, window=256),
    (4096, 4096, 8): MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=16, steps=4, buffers=1),
    (4096, 4096, 256): WgmmaSp(128, 128, 128, stages=4, ahead=2, split=2, window=256),
    (6144, 4096, 1): WgmmaSp(128, 8, 128, stages=6, ahead=2, split=4, min_blocks=2, window=256),
}
MEASURED_8BIT: dict[tuple[int, int, int], MmaSp | WgmmaSp] = {
    (1024, 4096, 8): WgmmaSp(64, 8, 512, stages=8, ahead=2, split=4, value_bytes=1),
    (1024, 4096, 64): WgmmaSp(64, 64, 512, stages=4, ahead=2, split=4, multicast=2, value_bytes=1),
    (2048, 2048, 32): WgmmaSp(64, 32, 256, stages=6, ahead=4, split=4, min_blocks=2, value_bytes=1),
    (4096, 4096, 1): MmaSp(bn=8, tiles=1, depth=2, row_warps=1, column_warps=8, steps=4, buffers=1, min_blocks=2, value_bytes=1),
    (4096, 14336, 1): MmaSp(bn=8, tiles=1, depth=2, row_warps=1, column_warps=8, steps=2, buffers=2, min_blocks=2, value_bytes=1),
    (4096, 14336, 8): WgmmaSp(128, 8, 512, stages=3, ahead=2, split=4, min_blocks=2, value_bytes=1, window=256),
    (4096, 14336, 32): WgmmaSp(128, 32, 256, stages=4, ahead=2, split=4, multicast=2, min_blocks=2, value_bytes=1, window=256),
    (14336, 4096, 1): WgmmaSp(64, 8, 512, stages=5, ahead=2, min_blocks=2, value_bytes=1),
    (14336, 4096, 8): WgmmaSp(64, 8, 512, stages=5, ahead=2, min_blocks=2, value_bytes=1),
}
# Further ones where few of those can be.
OTHERS: tuple[MmaSp | WgmmaSp, ...] = (
    # K is an odd multiple of 64.
    WgmmaSp(64, 8, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 16, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 32, 64, stages=8, ahead=4, min_blocks=2),
    WgmmaSp(64, 64, 64, stages=8, ahead=4),
    WgmmaSp(64, 128, 64, stages=8, ahead=4),
    # There is no wgmma, or K is another multiple of 16; in 99 KiB of shared memory.
    MmaSp(bn=8, tiles=1, depth=4, row_warps=1, column_warps=8, steps=4, buffers=2),
    MmaSp(bn=16, tiles=1, depth=2, row_warps=1, column_warps=8, steps=2, buffers=2),
    MmaSp(bn=32, tiles=2, depth=2, row_warps=2, column_warps=4, steps=2, buffers=2),
    MmaSp(bn=64, tiles=2, depth=1, row_warps=4, column_warps=2, steps=2, buffers=2),
)
OTHERS_8BIT: tuple[MmaSp | WgmmaSp, ...] = (
    WgmmaSp(64, 128, 256, stages=5, ahead=4, value_bytes=1),
    MmaSp(bn=16, tiles=1, depth=1, row_warps=1, column_warps=8, steps=1, buffers=2, value_bytes=1),
    MmaSp(bn=32, tiles=2, depth=1, row_warps=2, column_warps=4, steps=1, buffers=2, value_bytes=1),
    MmaSp(bn=64, tiles=2, depth=1, row_warps=4, column_warps=2, steps=1, buffers=2, value_bytes=1),
)
