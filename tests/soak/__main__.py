"""make soak: 500 requests a seed against each bundled mini on two ranks (`tests.soak.soak`), then as many of the first
seed with moving residents.

    python -m tests.soak [--mini all|deepseek|glm] [--requests N] [--seeds 1,2] [--set both|whole|moving] [--clients N]

Exit code 0 when nothing was wrong; the last lines say what happened, one a run.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bundled import MINIS, Mini, named
from tests.soak.soak import Set, Size, Verdict, soak

FEW = 40  # of which some hang up, some experts move, and drafts and caches serve


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", choices=["all", *map(str, MINIS)], default="all", help="the model that is served")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seeds", default="1,2", help="one run each")
    parser.add_argument("--set", choices=["both", "whole", "moving"], default="both", help="which experts are resident")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.requests < FEW:
        print(f"fewer than {FEW} requests: something may not happen, and count as wrong", file=sys.stderr, flush=True)
    size = Size(requests=options.requests, clients=options.clients)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    minis = MINIS if options.mini == "all" else (named(options.mini),)
    verdicts = [run(mini, seed, which, size) for mini in minis for seed, which in runs(seeds, options.set)]
    for verdict in verdicts:
        for fault in verdict.faults:
            print(f"{verdict.mini}, seed {verdict.seed}: {fault[:500]}")
    print("\n".join(verdict.line for verdict in verdicts))
    return int(any(verdict.faults for verdict in verdicts))


def runs(seeds: Sequence[int], which: str) -> list[tuple[int, Set]]:
    """Of both sets: every seed with all experts resident, the first with moving ones too."""
    whole: list[tuple[int, Set]] = [(seed, "whole") for seed in seeds if which != "moving"]
    moving: list[tuple[int, Set]] = [(seed, "moving") for seed in (seeds[:1] if which == "both" else seeds)]
    return whole + (moving if which != "whole" else [])


def run(mini: Mini, seed: int, which: Set, size: Size) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return soak(mini, seed, which, size, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
