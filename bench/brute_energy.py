"""Plans for energy of random sites against the least counted out, and bounds with nothing counted out.

python -m bench.brute_energy --sites 300
"""

from __future__ import annotations

import argparse
from math import inf
from unittest import mock

import numpy as np

from edgeshard.planning.search import rate_search, request_search
from edgeshard.planning.search.plan import plan
from tests.planning.oracles.energies import least_energy, random_problem

SAME = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=300)
    options = parser.parse_args()
    wrong, unproven, broken, none, gaps, losses = 0, 0, 0, 0, list[float](), list[float]()
    for seed in range(options.sites):
        problem = random_problem(seed)
        least = least_energy(problem).joules_per_token
        found = plan(problem, alternatives=0)
        with mock.patch.object(request_search, "MOST_CUTS", 0), mock.patch.object(rate_search, "MOST_COUNTED", 0):
            searched = plan(problem, alternatives=0)
        if least == inf:
            none += 1
            wrong += found.prediction is not None
            continue
        own = inf if found.prediction is None else found.prediction.joules_per_token or 0.0
        if abs(own - least) > SAME * least:
            wrong += 1
            print(f"seed {seed}: {own} is planned, {least} is least (gap {found.gap})", flush=True)
        unproven += bool(found.gap)
        own = inf if searched.prediction is None else searched.prediction.joules_per_token or 0.0
        gap = 0.0 if searched.gap is None else searched.gap
        if own * (1 - gap) > least * (1 + SAME) or own < least * (1 - SAME):
            broken += 1
            print(f"seed {seed}: {own} with a gap of {gap} is searched, {least} is least", flush=True)
        gaps.append(gap)
        losses.append(own / least - 1 if least else 0.0)
    print(f"{options.sites} sites, {none} without any plan: {wrong} plans are not the best, {unproven} have a gap")
    print(f"nothing counted out: {broken} bounds are broken; {sum(loss < SAME for loss in losses)} plans are the best")
    for part in (50, 75, 90, 100):
        loss, gap = 100 * np.percentile(losses, part), 100 * np.percentile(gaps, part)
        print(f"{part} % of the plans take at most {loss:.2f} % more than the best, of the gaps {gap:.1f} %")


if __name__ == "__main__":
    main()
