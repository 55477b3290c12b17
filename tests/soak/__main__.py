"""make soak: 500 requests a seed against the mini on two ranks (`tests.soak.soak`), then a run with moving residents.

    python -m tests.soak [--requests N] [--seeds 1,2] [--set whole|moving] [--clients N]

Exit code 0 when nothing was wrong; the last line says what happened.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Set, Size, Verdict, soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seeds", default="1,2", help="one run each")
    parser.add_argument("--set", choices=["whole", "moving"], default="whole", help="which experts are resident")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    size = Size(requests=options.requests, clients=options.clients)
    verdicts = [run(int(seed), options.set, size) for seed in options.seeds.split(",")]
    for verdict in verdicts:
        for fault in verdict.faults:
            print(f"seed {verdict.seed}: {fault[:500]}")
    print("\n".join(verdict.line for verdict in verdicts))
    return int(any(verdict.faults for verdict in verdicts))


def run(seed: int, which: Set, size: Size) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return soak(seed, which, size, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
