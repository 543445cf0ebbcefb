"""How long a kernel takes, in microseconds: a model whose constants are fitted to measurements on an H200.

benchmarks/results/tune-h200.json holds the measurements, benchmarks/fit_cost.py fits.  Leaving one weight shape out of the fit at a
time, the configuration that the model then picks for it takes 2 % longer than the best one (geometric mean over 22 shapes and 11
numbers of rows).
"""

import math

from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp

CLOCK = 1459.0  # clocks a microsecond, under load
# Blocks of one to a multiprocessor for which clusters find room, of 132.
ROOM = {1: 132, 2: 132, 4: 120, 8: 112}
SHARED_BYTES = 227 * 1024  # of a multiprocessor
REGISTERS = 65536


def time_us(config: MmaSp | WgmmaSp, n: int, k: int, m: int) -> float:
    """Microseconds to multiply m rows by an (n, k) weight."""
    return _mma_sp(config, n, k, m) if isinstance(config, MmaSp) else _wgmma_sp(config, n, k, m)


def cusparselt_us(n: int, k: int, m: int) -> float:
    """Microseconds of cuSPARSELt: 0.94 us for 128 columns of a tile of 128 x 256 (benchmarks/results/cusparselt-h200.json)."""
    return 2 + math.ceil(-(-n // 128) * -(-m // 256) / ROOM[1]) * k / 128 * 0.94


def _wgmma_sp(c: WgmmaSp, n: int, k: int, m: int) -> float:
    size = c.split * c.multicast
    occupancy = max(c.min_blocks, min(SHARED_BYTES // (c.shared_bytes + 1024), REGISTERS // ((c.bn // 2 + 80) * c.threads)))
    room = ROOM[size] * occupancy // size  # clusters at a time
    clusters = -(-n // (c.bm * c.multicast)) * -(-m // c.bn)
    columns = k / c.split
    dram_bytes = (n * k * 1.125 + m * k * 2 + m * n * 2) / clusters  # a cluster's share

    def wave(count: int) -> float:
        """So many clusters at once."""
        blocks = count * size
        blocks_per_sm = max(1, min(math.ceil(blocks / ROOM[1]), occupancy))
        limits = (
            blocks_per_sm * c.bm / 64 * (16.79 + 0.528 * c.bn) / 32 * columns / CLOCK,  # tensor cores and shared memory
            blocks_per_sm * (c.bm * 1.125 + c.bn * 2) * columns / 291600,  # into a multiprocessor
            blocks * (c.bm * 1.125 + c.bn * 2 / c.multicast) * columns / 14.36e6,  # out of the L2
            count * dram_bytes / 4.701e6,
            columns / (c.stages * c.bk) * (1.168 + 0.1013 * math.log2(c.multicast)),  # rounds of the stages
            columns / (c.ahead * c.bk) * 0.4194,  # bitmask words that are waited for
        )
        return _norm(limits, 3.009) + columns / c.bk * 0.009624

    full, rest = divmod(clusters, room)
    waves = full + (rest > 0)
    total = full * wave(room)
    if rest:
        total += wave(rest) if not full else 0.216 * wave(room) + 0.784 * wave(rest)
    outputs = c.bm * min(c.bn, m)
    write = 0.3344 + (outputs * 2 / 62000 if c.split == 1 else 0.7492 + outputs * 4 / 36290)
    return 0.8091 + 0.6635 + 0.3233 * (size > 1) + total + waves * write + (waves - 1) * 0.275


def _mma_sp(c: MmaSp, n: int, k: int, m: int) -> float:
    groups = -(-n // c.rows)
    turns = -(-groups // (ROOM[1] * c.min_blocks))
    blocks, tiles_m, rows_x = -(-groups // turns), -(-m // c.bn), min(m, c.bn)
    blocks_per_sm = math.ceil(blocks * tiles_m / ROOM[1])
    chunks = -(-k // c.chunk)
    x_bytes = (1 if c.buffers == 1 else turns) * rows_x * k * 2
    warps = c.row_warps * c.column_warps
    stage_x = blocks_per_sm * x_bytes / 64630
    limits = [
        (n * k * 1.125 + m * k * 2 + m * n * 2) / 5.709e6,
        (tiles_m * n * k * 1.125 + blocks * tiles_m * x_bytes) / 6.259e6,
        turns * chunks * c.steps / c.depth * 1.239,
        turns * chunks * c.steps * blocks_per_sm * warps * (c.bn / 8 * c.tiles) * 0.02002 / 4,
    ]
    start, wait = 1.574, 0.0
    if c.buffers == 1:
        start += stage_x
    else:
        limits.append(stage_x)
        wait = turns * chunks * 0.1556
    return start + _norm(limits, 3.147) + turns * 0.2749 + wait + turns * blocks_per_sm * c.column_warps * rows_x * c.rows / 20230


def _norm(limits: "tuple[float, ...] | list[float]", power: float) -> float:
    """What limits most counts most, the others a little."""
    return sum(limit**power for limit in limits) ** (1 / power)
