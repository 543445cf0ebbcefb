"""How long a kernel takes, in microseconds: a model whose constants are fitted to measurements on an H200.

benchmarks/results/tune-h200.json holds the measurements, benchmarks/tuning/fit_cost.py fits and validates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp

NUM_SMS = 132
# Blocks of one to a multiprocessor for which clusters of a size find room.
ROOM = {1: 132, 2: 132, 4: 120, 8: 112}
SHARED_BYTES = 227 * 1024  # of a multiprocessor
REGISTERS = 65536


@dataclass(frozen=True)
class WgmmaCosts:
    """Constants of `wgmma_sp`.  Times in microseconds, rates in bytes a microsecond."""

    launch: float = 1.418  # start, first bytes and end
    cluster: float = 0.3427  # for a cluster to start
    clock: float = 1589.0  # clocks a microsecond, under load
    product: float = 17.8  # clocks of a product of 64 rows and 32 columns of W, and those that each row of x adds
    product_row: float = 0.4219
    into_sm: float = 358100.0  # into a multiprocessor
    l2: float = 15.94e6  # out of the L2, to all
    dram: float = 4.769e6
    round: float = 1.235  # of all stages: latency
    round_multicast: float = 0.1012  # more of it, with each doubling of MULTICAST
    mask: float = 0.5803  # until bitmask words arrive
    stage: float = 0.008726  # barriers of a stage
    write: float = 0.3243  # of a tile
    output: float = 62530.0  # bytes of results, a block
    split: float = 0.7812  # sum over a cluster
    partial: float = 34300.0  # bytes of partial sums, a block
    tile: float = 0.2701  # for a block to begin its next tile
    tail: float = 0.1685  # of a full wave, in a last wave that is not full
    power: float = 2.452  # of the norm that joins limits


@dataclass(frozen=True)
class MmaCosts:
    """Constants of `mma_sp`, in the same units."""

    launch: float = 1.429
    dram: float = 5.783e6
    l2: float = 6.454e6
    x: float = 87660.0  # bytes of x that a multiprocessor stages
    round: float = 1.367  # of DEPTH steps: latency
    step: float = 0.02  # of a warp
    step_8bit: float = 2.5  # times that: twice the columns, and values to convert
    turn: float = 0.2703  # of a block, a group of rows of W
    chunk: float = 0.1749  # of x
    partial: float = 20520.0  # partial sums a microsecond and multiprocessor
    power: float = 3.121


WGMMA, MMA = WgmmaCosts(), MmaCosts()


def time_us(config: MmaSp | WgmmaSp, n: int, k: int, m: int, wgmma: WgmmaCosts = WGMMA, mma: MmaCosts = MMA) -> float:
    """Microseconds to multiply m rows by an (n, k) weight."""
    return _mma_sp(config, n, k, m, mma) if isinstance(config, MmaSp) else _wgmma_sp(config, n, k, m, wgmma)


def cusparselt_us(n: int, k: int, m: int) -> float:
    """Microseconds of cuSPARSELt: 0.94 us for 128 columns of a tile of 128 x 256 (benchmarks/results/cusparselt-h200.json)."""
    return 2 + math.ceil(-(-n // 128) * -(-m // 256) / NUM_SMS) * k / 128 * 0.94


def quantize_us(k: int, m: int) -> float:
    """Microseconds that rounding (m, k) of x to 8 bits adds to a product that is started early."""
    return 0.9 + m * k * 3 / 3.9e6


def _wgmma_sp(c: WgmmaSp, n: int, k: int, m: int, cost: WgmmaCosts) -> float:
    size = c.split * c.multicast
    occupancy = max(c.min_blocks, min(SHARED_BYTES // (c.shared_bytes + 1024), REGISTERS // ((c.bn // 2 + 80) * c.threads)))
    room = ROOM[size] * occupancy // size  # clusters at a time
    clusters = -(-n // (c.bm * c.multicast)) * -(-m // c.bn)
    columns = k / c.split
    x_bytes, weight_bytes = c.value_bytes, c.value_bytes / 2 + 1 / 8  # an element
    dram_bytes = (n * k * weight_bytes + m * k * x_bytes + m * n * 2) / clusters  # a cluster's share

    def wave(count: int) -> float:
        """So many clusters at once."""
        blocks = count * size
        blocks_per_sm = max(1, min(math.ceil(blocks / NUM_SMS), occupancy))
        limits = (
            blocks_per_sm * c.bm / 64 * (cost.product + cost.product_row * c.bn) * x_bytes / 64 * columns / cost.clock,
            blocks_per_sm * (c.bm * weight_bytes + c.bn * x_bytes) * columns / cost.into_sm,
            blocks * (c.bm * weight_bytes + c.bn * x_bytes / c.multicast) * columns / cost.l2,
            count * dram_bytes / cost.dram,
            columns / (c.stages * c.bk) * (cost.round + cost.round_multicast * math.log2(c.multicast)),
            columns / (c.ahead * max(c.bk, c.window)) * cost.mask,
        )
        return _norm(limits, cost.power) + columns / c.bk * cost.stage

    full, rest = divmod(clusters, room)
    waves = full + (rest > 0)
    total = full * wave(room)
    if rest:
        total += wave(rest) if not full else cost.tail * wave(room) + (1 - cost.tail) * wave(rest)
    outputs = c.bm * min(c.bn, m)
    write = cost.write + (outputs * 2 / cost.output if c.split == 1 else cost.split + outputs * 4 / cost.partial)
    return cost.launch + cost.cluster * (size > 1) + total + waves * write + (waves - 1) * cost.tile


def _mma_sp(c: MmaSp, n: int, k: int, m: int, cost: MmaCosts) -> float:
    groups = -(-n // c.rows)
    turns = -(-groups // (NUM_SMS * c.min_blocks))
    blocks, tiles_m, rows_x = -(-groups // turns), -(-m // c.bn), min(m, c.bn)
    blocks_per_sm = math.ceil(blocks * tiles_m / NUM_SMS)
    chunks = -(-k // c.chunk)
    x_bytes = (1 if c.buffers == 1 else turns) * rows_x * k * 2
    weight_bytes = c.value_bytes / 2 + 1 / 8  # an element
    steps = turns * chunks * c.steps
    step = cost.step * (1 if c.value_bytes == 2 else cost.step_8bit)
    stage_x = blocks_per_sm * x_bytes / cost.x
    limits = [
        (n * k * weight_bytes + m * k * 2 + m * n * 2) / cost.dram,
        (tiles_m * n * k * weight_bytes + blocks * tiles_m * x_bytes) / cost.l2,
        steps / c.depth * cost.round,
        steps * blocks_per_sm * c.row_warps * c.column_warps * (c.bn / 8 * c.tiles) * step / 4,
    ]
    start, wait = cost.launch, 0.0
    if c.buffers == 1:
        start += stage_x
    else:
        limits.append(stage_x)
        wait = turns * chunks * cost.chunk
    partial = turns * blocks_per_sm * c.column_warps * rows_x * c.rows / cost.partial
    return start + _norm(limits, cost.power) + turns * cost.turn + wait + partial


def _norm(limits: Sequence[float], power: float) -> float:
    """What limits most counts most, the others a little."""
    return sum(limit**power for limit in limits) ** (1 / power)
