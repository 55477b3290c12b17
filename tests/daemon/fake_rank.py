"""Stands for `tided`: same arguments, same state file, and a behaviour told by the file `behaviour-N` beside it.

ready            serves until SIGTERM
deaf             serves, hears no SIGTERM
gone             has stopped in order before SIGTERM comes, and dies of it
fail CODE WORDS  ends by itself with a message
die              kills itself
loud LINES       writes so many lines first"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tided.control.state import StateFile


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--state-dir", type=Path)
    options = parser.parse_args()
    state = StateFile(options.state_dir, options.rank)
    file = options.state_dir / f"behaviour-{options.rank}"
    verb, *words = (file.read_text() if file.exists() else "ready").split(maxsplit=2)
    print(f"INFO rank {options.rank} starts", file=sys.stderr, flush=True)
    if verb == "fail":
        state.enter("failed", words[1], exit_code=int(words[0]))
        sys.exit(int(words[0]))
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "loud":
        for line in range(int(words[0])):
            print(f"line {line:07} {'x' * 80}", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if verb == "deaf" else lambda *_: sys.exit(0))
    if verb == "gone":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    state.enter("ready", port=8000 if options.rank == 0 else 0)
    if verb == "gone":
        state.enter("stopped", exit_code=0)
    time.sleep(120)


main()
