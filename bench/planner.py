"""Times the planner at the sizes of large models.

    python bench/planner.py [--layers 75] [--experts 256] [--rounds 30]

Half of the experts are resident, and the traffic has changed altogether: the longest plan there is, whole and cut to
512 swaps, for records of one size and of three; and where floors are in its way. Processor time of one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from tided.tide.demand import per_layer
from tided.tide.planner import boot_set, boot_set_of_bytes, swap_plan

FLOOR = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=75)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    shape, rng = (given.layers, given.experts), np.random.default_rng(1)
    before, now = (per_layer(rng.gamma(0.5, size=shape)) for _ in range(2))
    sizes = (rng.choice((2, 3, 4), size=shape) * 1_000_000).astype(np.int64)
    residents = boot_set(before, before.size // 2, FLOOR)
    of_bytes = boot_set_of_bytes(before, sizes, int(sizes.sum()) // 2, FLOOR)
    print(f"{before.size} experts, {len(residents)} resident; median and worst of {given.rounds}, ms")
    show("512 swaps, one size", given.rounds, lambda: swap_plan(now, residents, FLOOR, 512, 0.0))
    show("512 swaps, three sizes", given.rounds, lambda: swap_plan(now, of_bytes, FLOOR, 512, 0.0, sizes))
    show("all swaps, one size", given.rounds, lambda: swap_plan(now, residents, FLOOR, now.size, 0.0))
    show("all swaps, three sizes", given.rounds, lambda: swap_plan(now, of_bytes, FLOOR, now.size, 0.0, sizes))
    even = np.arange(given.layers)[:, None] % 2 == 0  # in every other layer few experts are wanted, then in the others
    before, now = (per_layer(rng.gamma(np.where(narrow, 0.05, 3.0), size=shape)) for narrow in (even, ~even))
    floor = 2 * given.experts // 5
    held = boot_set(before, before.size // 2, floor)
    show("floors, one size", given.rounds, lambda: swap_plan(now, held, floor, now.size, 0.0))
    show("floors, three sizes", given.rounds, lambda: swap_plan(now, held, floor, now.size, 0.0, sizes))


def show(what: str, rounds: int, run: Callable[[], object]) -> None:
    times = []
    for _ in range(rounds):
        began_s = time.thread_time()
        run()
        times.append(1000 * (time.thread_time() - began_s))
    print(f"{what:24} {statistics.median(times):7.2f} {max(times):7.2f}")


if __name__ == "__main__":
    main()
