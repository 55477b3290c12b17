"""Times what rank 0 does at rest at the sizes of a large model, piece by piece: who comes meanwhile waits for one.

    python bench/rest.py [--layers 75] [--experts 256] [--resident 12968] [--rounds 15]

The books of experts and of demand, then the plan for nobody's tokens, beside a ring of 64, after 40 requests on eight
topics. Records are small: nothing here depends on their size. Processor time of one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kernels.record import ExpertRecord
from tided.engine.moments import Moments
from tided.engine.motion import Motion
from tided.experts.arena import Arena
from tided.experts.io import Depths, IoScheduler
from tided.experts.residents import Residents
from tided.experts.tables import DemandTap, RoutingTables
from tided.settings import Tide
from tided.tide.demand import Demand, Grid, RouterShape, per_layer
from tided.tide.history import History
from tided.tide.hot import HotReads
from tided.tide.pilot import Pilot
from tided.tide.seed import Seed

TOP_K, RING, SPARE, LANES, REQUESTS, TOPICS = 8, 64, 64, 4, 40, 8
CPU = torch.device("cpu")


class Nothing:
    def read(self, layer: int, expert: int, out: memoryview) -> None:
        """Leaves zeros."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 75), ("experts", 256), ("resident", 12968), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape, rng = RouterShape(given.layers, given.experts, TOP_K), np.random.default_rng(1)
    topics = [per_layer(rng.gamma(0.3, size=(shape.layers, shape.experts))) for _ in range(TOPICS)]
    pilot = learned(shape, topics, given.resident, rng)
    residents, tap = books(shape, pilot, given.resident)
    hot = HotReads(shape, pilot.residents, RING, pilot.floor, pilot.scores())
    print(f"{shape.layers} x {shape.experts} experts, {given.resident} resident; median and worst, ms")
    show("books of experts", given.rounds, residents.check_integrity)
    show("books of demand", given.rounds, lambda: tap.check([]))
    show("books of hot reads", given.rounds, lambda: hot.check(residents.pairs, residents.ring))
    motion, plan = Motion(hot, 1, SPARE), ([], [])  # type: tuple[list[float], list[float]]
    for _ in range(given.rounds):
        pilot._requests_since_plan = 1
        pieces = Moments(motion, pilot).rest()
        for piece in plan:
            began_s = time.thread_time()
            next(pieces, None)
            piece.append(1000 * (time.thread_time() - began_s))
    for what, piece in zip(("what may be wanted", "the plan"), plan, strict=True):
        print(f"{what:24} {statistics.median(piece):7.2f} {max(piece):7.2f}")


def learned(shape: RouterShape, topics: list[Grid], budget: int, rng: np.random.Generator) -> Pilot:
    """A pilot that has served requests, each mostly of one topic."""
    seed = Seed(per_layer(sum(topics, np.zeros_like(topics[0]))), "bench", ("all",), (), {"all": topics[0]})
    pilot = Pilot(History(Path("bench"), Demand.none(shape), None, ""), seed, Tide(), shape, budget)
    for number in range(REQUESTS):
        mass = topics[number % TOPICS] * rng.gamma(0.5, size=topics[0].shape)
        totals = [1000.0, 100.0, 1000.0, 100.0]
        pilot.prompt_done(mass, mass, totals, 500, lane=0)
        pilot.request_done(mass, mass, totals, 500, lane=0)
    return pilot


def books(shape: RouterShape, pilot: Pilot, budget: int) -> tuple[Residents, DemandTap]:
    tables = RoutingTables(shape.layers, shape.experts, CPU)
    arena = Arena(ExpertRecord(hidden=32, intermediate=32, ranks=1), budget, SPARE, CPU, RING)
    io = IoScheduler(Nothing(), Depths(1, 1))
    residents = Residents(arena, tables, io, shape.layers, shape.experts, TOP_K)
    residents.fill(pilot.residents, lambda done, total: None)
    io.close()
    return residents, DemandTap(LANES, shape.layers, shape.experts, CPU)


def show(what: str, rounds: int, run: Callable[[], object]) -> None:
    times = []
    for _ in range(rounds):
        began_s = time.thread_time()
        run()
        times.append(1000 * (time.thread_time() - began_s))
    print(f"{what:24} {statistics.median(times):7.2f} {max(times):7.2f}")


if __name__ == "__main__":
    main()
