"""A prompt that begins like an earlier one, over HTTP, on two ranks of every bundled model, before and after a kill."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

from tests.bundled import Mini
from tests.daemon.helpers import Running, running
from tests.e2e.conftest import answer, ask, mini, post

LINES = "".join(f"Line {i}: the river carries {i * 7} barrels past the mill.\n" for i in range(17))
CACHE = "park_tokens = 0\nprefix_disk_bytes = 50_000_000\nprefix_ram_bytes = {ram}\n[engine]"


def profile(model: Mini, ram: int = 10_000_000) -> str:
    return mini(model, resident=model.experts).replace("[engine]", CACHE.format(ram=ram))


def said(served: Running, end: str) -> tuple[str, dict[str, Any]]:
    reply = asyncio.run(post(served.url, ask(LINES + end, max_tokens=24)))
    return answer(reply), reply[1]["usage"]


def cached(usage: dict[str, Any]) -> float:
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


def written(state: Path, files: int) -> bool:
    """Whether both ranks have so many files, whole."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        folders = [state / "cache" / f"rank-{rank}" / "prefix" for rank in (0, 1)]
        if all(len(list(f.glob("*.state"))) >= files and not list(f.glob(".*")) for f in folders):
            return True
        time.sleep(0.05)
    return False


def test_a_prefix_is_reused_and_outlives_a_kill(model, tmp_path):
    with running(profile(model), tmp_path) as served:
        first, cold = said(served, "What is this about?")
        again, whole = said(served, "What is this about?")
        other, part = said(served, "How many barrels in line 9?")
        assert cached(cold) == 0
        assert cached(whole) == 1
        assert cached(part) >= 0.8
        assert again == first
        state = served.state_dir
        assert written(state, 4)
        assert (state / "cache").stat().st_mode & 0o777 == 0o700
        assert "barrels" not in served.log(0) + served.log(1)
        served.kill(0, signal.SIGKILL)
        served.ended(30)
    with running(profile(model, ram=0), tmp_path) as served:
        after, usage = said(served, "How many barrels in line 9?")
        assert cached(usage) >= 0.8
        assert after == other
