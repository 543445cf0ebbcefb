"""Fits the constants of kernels/cost.py, and the corrections of kernels/configurations.py, to what tune.py has measured.

Needs scipy, not a GPU.

    python benchmarks/tuning/fit_cost.py [RESULT.json] [--validate]

Least squares on the logarithm of the time.  A configuration counts the less the slower it is than the best of its problem, and of
what all configurations of a problem have in common only a part counts: it does not change which is chosen.  `--validate` leaves one
shape after the other out, and reports how much longer the choice takes than the best configuration that was measured.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from hf_sparse24.kernels.configurations import CONFIGS
from hf_sparse24.kernels.cost import MmaCosts, WgmmaCosts, time_us
from hf_sparse24.kernels.sparse_mma import MmaSp, WgmmaSp

RESULT = Path(__file__).parents[1] / "results" / "tune-h200.json"
IN_COMMON = 0.3  # what counts of the part that the configurations of a problem have in common
UNIMPORTANT = 0.15  # logarithm of the slowness at which a configuration counts 0.7
PULL = 0.5  # of the constants towards where they start, per e-fold
PULL_CORRECTION = 4.5
Problem = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--validate", action="store_true")
    arguments = parser.parse_args()
    times: dict[Problem, dict[MmaSp | WgmmaSp, float]] = defaultdict(dict)
    for record in json.loads(arguments.result.read_text())["records"]:
        config = eval(record["config"], {"MmaSp": MmaSp, "WgmmaSp": WgmmaSp})
        times[record["n"], record["k"], record["m"]][config] = record["us"]
    constants, corrections = fit(times)
    for costs in constants:
        print(costs)
    for config, correction in corrections.items():
        print(f"{correction:.3f}  {config}")
    report("fitted to all", times, {problem: (constants, corrections) for problem in times})
    if arguments.validate:
        shapes = sorted({problem[:2] for problem in times})
        models = {shape: fit({p: found for p, found in times.items() if p[:2] != shape}) for shape in shapes}
        report("each shape left out", times, {problem: models[problem[:2]] for problem in times})


def fit(times):
    """Constants of both kernels, and a correction of each configuration in use."""
    start = np.log(np.array([*asdict(WgmmaCosts()).values(), *asdict(MmaCosts()).values()]))
    num_wgmma = len(fields(WgmmaCosts))
    configs = list(CONFIGS)
    records = [(problem, config, us) for problem, found in times.items() for config, us in found.items()]
    numbers = {problem: number for number, problem in enumerate(times)}
    of_problem = np.array([numbers[problem] for problem, _, _ in records])
    measured = np.log([us for _, _, us in records])
    best = np.log([min(times[problem].values()) for problem, _, _ in records])
    used = np.array([1.0 if config in CONFIGS else 0.4 for _, config, _ in records])
    weight = used / np.sqrt(1 + ((measured - best) / UNIMPORTANT) ** 2)
    column = {config: i for i, config in enumerate(configs)}
    correction_of = np.array([column.get(config, len(configs)) for _, config, _ in records])

    def costs_of(values):
        numbers = np.exp(values)
        return WgmmaCosts(*map(float, numbers[:num_wgmma])), MmaCosts(*map(float, numbers[num_wgmma:]))

    def residuals(values):
        wgmma, mma = costs_of(values[: len(start)])
        modelled = np.log([time_us(config, *problem, wgmma, mma) for problem, config, _ in records])
        corrections = np.append(values[len(start) :], 0.0)
        error = modelled + corrections[correction_of] - measured
        total, count = np.zeros(len(times)), np.zeros(len(times))
        np.add.at(total, of_problem, error * weight**2)
        np.add.at(count, of_problem, weight**2)
        error = weight * (error - (1 - IN_COMMON) * (total / count)[of_problem])
        return np.concatenate([error, PULL * (values[: len(start)] - start), PULL_CORRECTION * values[len(start) :]])

    # Corrections are linear, and many: found together with the constants, but without their derivatives by differences.
    def jacobian(values):
        at = residuals(values)
        columns = []
        for i in range(len(values)):
            step = np.zeros(len(values))
            step[i] = 1e-4
            columns.append((residuals(values + step) - at) / 1e-4)
        return np.stack(columns, 1)

    found = least_squares(residuals, np.concatenate([start, np.zeros(len(configs))]), jacobian, loss="soft_l1", f_scale=0.08, max_nfev=12)
    corrections = dict(zip(configs, np.exp(found.x[len(start) :]).tolist(), strict=True))
    return costs_of(found.x[: len(start)]), corrections


def report(name, times, models) -> None:
    """Geometric mean and worst of (time of the choice / best time), per number of rows."""
    losses = defaultdict(list)
    for problem, found in times.items():
        (wgmma, mma), corrections = models[problem]
        known = {config: us for config, us in found.items() if config in corrections}
        choice = min(known, key=lambda config: time_us(config, *problem, wgmma, mma) * corrections[config])
        losses[problem[2]].append(known[choice] / min(found.values()))
    for m, found in sorted(losses.items()):
        print(f"{name}: M={m:<5} {math.exp(sum(map(math.log, found)) / len(found)):.3f}, at most {max(found):.3f}")
    everything = [loss for found in losses.values() for loss in found]
    print(f"{name}: all {math.exp(sum(map(math.log, everything)) / len(everything)):.3f}, at most {max(everything):.3f}")


if __name__ == "__main__":
    main()
