"""How long `tidectl start` takes from the shell until a profile serves, each time out of a state directory of its own:
keys are made, the first set of experts is read.

    python bench/ready.py [mini-deepseek] [--repeats 5]

Fails where the median is over its limit of 6 s.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT_S, PATIENCE_S = 6.0, 180.0
TIDECTL = (sys.executable, "-m", "tidectl.main")


def start_s(profile: str) -> float:
    with tempfile.TemporaryDirectory(prefix="ready-") as state:
        environment = os.environ | {"TIDE_STATE_DIR": state}

        def run(*words: str) -> None:
            ran = subprocess.run(
                [*TIDECTL, *words], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
            if ran.returncode:
                raise SystemExit(ran.stderr)

        began_s = time.perf_counter()
        run("start", profile)
        took_s = time.perf_counter() - began_s
        run("stop")
    return took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="mini-deepseek")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    took = [start_s(options.profile) for _ in range(options.repeats)]
    median = statistics.median(took)
    print(f"{options.profile}: {', '.join(f'{one:.2f}' for one in took)} s")
    print(f"median {median:.2f} s ({min(took):.2f} to {max(took):.2f}); limit {LIMIT_S:g} s")
    return int(median > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
