"""What viewers of the expert map cost a running answer.

    python bench/viewers.py [BLOCKS] [--json]

First on the mini, one rank on a CPU, with a hot ring, so that experts and heat move with nearly every step: one long
answer, in blocks of 40 tokens by turns without a viewer and with VIEWERS that read all they are sent (another process).
What counts is each block against the mean of the two around it, which had no viewers: its median step, and the
processor's time for a token, which other programs change less. Then the publisher alone at the largest model's shape,
40 layers of 480, 200 experts moving and all heat new ten times a second: its share of a core.
Exits with 1 where a step of the answer is slower by more than LIMIT percent and twice its standard error, where twice
the error is more than LIMIT itself, so that nothing is known, and where the publisher takes more than PUBLISHER percent
of a core. To be run at rest.
"""

import argparse
import asyncio
import http.client
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tided.engine.board import ExpertBoard
from tided.engine.local_ranks import free_port

ROOT = Path(__file__).parents[1]
VIEWERS, BLOCK_TOKENS, LIMIT_PERCENT, PUBLISHER_PERCENT = 4, 40, 1.0, 1.0
PROFILE = """
[model]
path = "{root}/minis/deepseek"
served_name = "mini"
[experts]
resident = 240
[tide]
seed = "{root}/minis/deepseek/demand-seed.json"
hot_ring_slots = 24
record = false
[cache]
context_tokens = 4096
pool_tokens = 4096
[engine]
lanes = 1
draft = "off"
[parallel]
ranks = 1
control_port = {control}
data_port = {data}
[server]
port = {port}
"""
READER = """
import socket, sys, threading
def read():
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as one:
        one.sendall(b"GET /v1/expert-map/events HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        total = 0
        while data := one.recv(65536):
            total += len(data)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=read, daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[int, int]]:
    """Its port and its process, once it serves."""
    port = free_port()
    profile = folder / "profile.toml"
    profile.write_text(PROFILE.format(root=ROOT, control=free_port(), data=free_port(), port=port))
    command = [
        sys.executable,
        "-m",
        "tided.daemon",
        "--profile",
        str(profile),
        "--rank",
        "0",
        "--state-dir",
        str(folder),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline_s = time.monotonic() + 120
        while not serves(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the daemon does not serve:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def serves(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=2)) as one:
            one.request("GET", "/health")
            return one.getresponse().status == 200
    except OSError:
        return False


@contextmanager
def viewers(port: int, count: int) -> Iterator[None]:
    """None of them for a count of 0."""
    command = [sys.executable, "-c", READER, str(port), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        time.sleep(0.5)
        yield
    finally:
        process.communicate(timeout=20)


def arrivals(port: int, tokens: int) -> Iterator[float]:
    """When each token of one long answer arrives."""
    body = {"messages": [{"role": "user", "content": "Tell me a story about a fox and the sea."}], "stream": True}
    body |= {"max_tokens": tokens, "temperature": 1.0, "seed": 1, "ignore_eos": True, "loop_break": 0, "thinking": None}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as one:
        one.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = one.getresponse()
        for line in reply:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


class Block(NamedTuple):
    step_s: float
    cpu_s: float


def cpu_s(process: int) -> float:
    """Of all its threads so far."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{process}/task").glob("*/schedstat")) / 1e9


def blocks(port: int, process: int, count: int) -> tuple[list[Block], list[Block]]:
    """Without viewers, and with."""
    found: tuple[list[Block], list[Block]] = [], []
    tokens = arrivals(port, 4000)
    for block in range(count):
        with viewers(port, VIEWERS if block % 2 else 0):
            for _ in range(15):  # what came while the viewers did
                next(tokens)
            before = cpu_s(process)
            times = [next(tokens) for _ in range(BLOCK_TOKENS + 1)]
            spent = cpu_s(process) - before
        steps = [later - earlier for earlier, later in pairwise(times)]
        found[block % 2].append(Block(statistics.median(steps), spent / BLOCK_TOKENS))
        print(f"block {block + 1} of {count}: {1e3 * found[block % 2][-1].step_s:.2f} ms", file=sys.stderr)
    return found


def compared(without: list[Block], watched: list[Block], what: str) -> tuple[float, float]:
    """Percent more with viewers: the median over blocks, and its standard error."""
    more = [
        100 * (getattr(one, what) / ((getattr(a, what) + getattr(b, what)) / 2) - 1)
        for one, (a, b) in zip(watched, pairwise(without), strict=True)
    ]
    return round(statistics.median(more), 2), round(1.253 * statistics.stdev(more) / math.sqrt(len(more)), 2)


def publisher_share(seconds: float) -> float:
    """Of a core, at 40 layers of 480 and four viewers who take everything, ten times a second."""
    return asyncio.run(_publisher_share(seconds))


async def _publisher_share(seconds: float) -> float:
    sys.path[:0] = [str(ROOT)]
    from tests.page.sea import Sea
    from tided.api.viewers import CELLS_EVERY_S, Viewers
    from tided.engine.board import HeatLevels, cells

    dice = np.random.default_rng(1)
    pairs = [(layer, expert) for layer in range(40) for expert in range(480) if expert < 300]
    board, levels, sea = ExpertBoard(40, 480, pairs), HeatLevels(), Sea(40, 480)
    heat = dice.random(19_200)
    clock = [0.0]
    sea.cells = lambda: cells(board, levels.of(heat, clock[0]))  # type: ignore[method-assign]
    watched = Viewers(sea, "the largest")  # type: ignore[arg-type]
    streams = [watched.follow(60) for _ in range(VIEWERS)]
    for stream in streams:
        await anext(stream)
    spent = 0.0
    for _ in range(round(seconds / CELLS_EVERY_S)):
        clock[0] += CELLS_EVERY_S
        heat = heat * 0.98 + dice.random(19_200) * 0.02
        for place in dice.integers(0, 19_200, 200):
            board.states[place] = ord("0") + int(dice.integers(0, 4))
        began = time.process_time()
        watched.publish(clock[0], clock[0])
        for stream in streams:
            await anext(stream)
        spent += time.process_time() - began
    return spent / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="?", type=int, default=41, help="an odd number")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder)) as (port, process):
        without, watched = blocks(port, process, max(5, given.blocks | 1))
    slower, error = compared(without, watched, "step_s")
    cpu_more, cpu_error = compared(without, watched, "cpu_s")
    found: dict[str, Any] = {
        "viewers": VIEWERS,
        "blocks": len(watched),
        "step_ms_without": round(1e3 * statistics.median(block.step_s for block in without), 2),
        "step_ms_with": round(1e3 * statistics.median(block.step_s for block in watched), 2),
        "slower_percent": slower,
        "slower_standard_error": error,
        "cpu_ms_a_token_without": round(1e3 * statistics.median(block.cpu_s for block in without), 2),
        "cpu_more_percent": cpu_more,
        "cpu_more_standard_error": cpu_error,
        "publisher_core_percent": round(100 * publisher_share(10), 2),
    }
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    complaints = missed(found)
    print("\n".join(complaints), file=sys.stderr)
    return int(bool(complaints))


def missed(found: dict[str, Any]) -> list[str]:
    """What is over its limit, in words."""
    slower, error, publisher = (
        found[name] for name in ("slower_percent", "slower_standard_error", "publisher_core_percent")
    )
    complaints = []
    if not slower <= LIMIT_PERCENT + 2 * error:
        complaints.append(f"a step is slower by {slower} %, to be at most {LIMIT_PERCENT}")
    if not 2 * error <= LIMIT_PERCENT:
        complaints.append(f"too noisy: run at rest (twice the standard error is {2 * error:.2f} %)")
    if not publisher <= PUBLISHER_PERCENT:
        complaints.append(f"the publisher takes {publisher} % of a core, to be at most {PUBLISHER_PERCENT}")
    return complaints


if __name__ == "__main__":
    sys.exit(main())
