"""make faults: a pair of a bundled mini is struck once for each seed, in every stage of its life, by everything that
`tests.faults.grid` knows; a cell of the table for each, in as many seeds as there are cells.

    python -m tests.faults [--mini deepseek|glm] [--seeds 1-104] [--keep FILE] [--table docs/results.md] [--within 10]
                           [--peer-timeout 4]

A failed run is printed with its seed, which strikes alike. `--keep`: a line of JSON for each run; what is there already
and was right is not run again. `--table` writes all of it. Exit code 0 when nothing was wrong.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bundled import DEEPSEEK, MINIS, Mini, named
from tests.faults import link
from tests.faults.clients import EXACT, asked
from tests.faults.grid import CELLS, Case, Layout, case, numbers
from tests.faults.pair import Host, Nodes, Pair, make_packs
from tests.faults.run import LIMIT_S, Outcome, Trial, kept, read_kept, serve, stop
from tests.faults.table import write_table
from tests.soak.clients import Answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", choices=list(map(str, MINIS)), default=str(DEEPSEEK), help="the model that is served")
    parser.add_argument("--seeds", default=f"1-{len(CELLS)}", help="A, or A-B, or several with commas")
    parser.add_argument("--keep", type=Path, help="the file that outcomes are added to")
    parser.add_argument("--table", type=Path, help="the file whose part between the marks is written anew")
    parser.add_argument("--within", type=float, default=LIMIT_S, help="seconds in which both ranks end, or go on")
    parser.add_argument("--peer-timeout", type=float, default=4.0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was begun is ended
    before = read_kept(options.keep) if options.keep else []
    right = {outcome.case.seed for outcome in before if not outcome.faults}
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if options.keep:
            with options.keep.open("ab") as file:
                file.write(kept(outcome))

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder), named(options.mini), options.within, options.peer_timeout)
        bench.run([case(seed) for seed in numbers(options.seeds) if seed not in right], tell)
    outcomes = read_kept(options.keep) if options.keep else outcomes
    for outcome in outcomes:
        if outcome.faults:
            print(outcome.line)
    print(summary(outcomes, bench.skipped))
    if options.table:
        write_table(options.table, outcomes, bench.skipped)
    return int(any(outcome.faults for outcome in outcomes))


def summary(outcomes: list[Outcome], skipped: dict[Layout, str]) -> str:
    compared = sum(outcome.compared for outcome in outcomes)
    wrong = sum(bool(outcome.faults) for outcome in outcomes)
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    left = "".join(f"; left out: {why}" for why in skipped.values())
    return f"{len(outcomes)} runs, {compared} answers compared, slowest {slowest:.1f} s, {wrong} wrong{left}"


class Bench:
    """The pairs, one of each layout, and the answers of a clean one. `skipped`: layouts that cannot be made here."""

    def __init__(self, folder: Path, mini: Mini, limit_s: float, peer_timeout_s: float) -> None:
        self._folder, self._mini, self._limit_s, self._peer_timeout_s = folder, mini, limit_s, peer_timeout_s
        self._packs = make_packs(folder / "packs", mini)
        self.skipped: dict[Layout, str] = {}
        self._lives = 0

    def run(self, cases: list[Case], tell: Callable[[Outcome], None]) -> None:
        with self._pair(Host, resident=self._mini.experts) as plain:
            expected = clean(plain)
        for layout in dict.fromkeys(one.fault.layout for one in cases):
            kind: type[Pair] = Host if layout == "host" else Nodes
            mine = [one for one in cases if one.fault.layout == layout]
            if mine and kind is Nodes and (why := link.why_not()):
                self.skipped["nodes"] = why
            elif mine:
                with self._pair(kind) as pair:
                    for one in mine:
                        tell(self._try(one, pair, expected))
                    serve(pair)
                    stop(pair)

    def _try(self, one: Case, pair: Pair, expected: dict[str, Answer]) -> Outcome:
        began_s = time.monotonic()
        outcome = Trial(one, pair, expected, self._limit_s).run()
        if outcome.faults:
            print(pair.words(), file=sys.stderr)
        print(f"{outcome.line} ({time.monotonic() - began_s:.0f} s)", file=sys.stderr, flush=True)
        if outcome.faults:
            pair.kill_all()
        return outcome

    @contextmanager
    def _pair(self, kind: type[Pair], **profile: object) -> Iterator[Pair]:
        self._lives += 1
        pair = kind(self._folder / str(self._lives), self._packs, self._peer_timeout_s, self._mini, **profile)
        try:
            yield pair
        finally:
            pair.close()


def clean(pair: Pair) -> dict[str, Answer]:
    """Of a pair that holds every expert, one request after the other."""
    serve(pair)
    found = {name: asked(pair.url, [name])[0] for name in EXACT}
    for name, one in found.items():
        assert one.finished, f"a clean run: {name}: {one.answer.error}"
    stop(pair)
    return {name: one.answer for name, one in found.items()}


if __name__ == "__main__":
    sys.exit(main())
