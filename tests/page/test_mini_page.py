"""The page on the mini while it is asked: a change of topic is seen as it happens, on screens wide and narrow."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.daemon.helpers import running
from tests.e2e.conftest import mini
from tests.page.browser import Browser, Page
from tests.page.conftest import NO_BROWSER, chromium

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason=NO_BROWSER),
]

HELD_OUT = Path(__file__).parents[2] / "tidectl" / "evals" / "heldout.jsonl"
CELLS = "Array.from(view.cells, cell => cell >> 4)"
AT_REST = "document.getElementById('state').textContent === 'at rest'"


def texts(domain: str, count: int) -> list[str]:
    lines = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    found = [line for line in lines if line["domain"] == domain][:count]
    return [line.get("text") or "\n".join(said["content"] for said in line["messages"]) for line in found]


async def complete(session: aiohttp.ClientSession, prompt: str, tokens: int = 24) -> dict[str, Any]:
    body = {"prompt": prompt[:1200], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "loop_break": 0}
    async with session.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        found: dict[str, Any] = await reply.json()
        return found


async def states(session: aiohttp.ClientSession) -> list[int]:
    async with session.get("/v1/expert-map") as reply:
        return [int(digit) for row in (await reply.json())["states"] for digit in row]


async def test_a_change_of_topic_is_seen_as_it_happens(tabs: Browser, tmp_path: Path) -> None:
    with running(mini(resident=240), tmp_path) as pair:
        async with aiohttp.ClientSession(pair.url, timeout=aiohttp.ClientTimeout(120)) as session:
            pages = [await tabs.page() for _ in range(2)]
            for page, width in zip(pages, (1280, 390), strict=True):
                await page.open(f"{pair.url}/", width)
                await page.until("view.now && view.cells.length === 480")
            for text in texts("story", 3):
                await complete(session, text)
            await moves_end(session, pages)
            before = await states(session)
            began = [await page.ask("view.moves.length ? performance.now() : 0") for page in pages]

            asked = asyncio.create_task(complete(session, texts("code", 1)[0], 300))
            for page, since in zip(pages, began, strict=True):
                # Experts come and go while the answer grows, on a map that shows its lane and its speed.
                came = f"view.moves.some(move => move.now > {since} && move.state === 1)"
                lane = "view.now.lanes.some(lane => lane.phase === 'answer' && lane.tok_s > 0)"
                await page.until(f"{came} && {lane}")
                shown = await page.ask("document.getElementById('lanes').textContent")
                assert "tok/s" in shown
            assert not asked.done()
            stats = (await asked)["x_engine_stats"]
            assert stats["swaps"] > 0

            for text in texts("code", 3):
                await complete(session, text)
            await moves_end(session, pages)
            after = await states(session)
            assert sum(one != other for one, other in zip(before, after, strict=True)) > 20
            for page in pages:
                await page.until(f"JSON.stringify({CELLS}) === '{json.dumps(after, separators=(',', ':'))}'")
                assert await page.ask("document.documentElement.scrollWidth") in (1280, 390)
                assert await page.ask("view.tide.swaps.at(-1)") > await page.ask("view.tide.swaps[0]")
                await coverage_agrees(session, page)
                assert page.complaints == []
                await page.close()


async def moves_end(session: aiohttp.ClientSession, pages: list[Page]) -> None:
    """Nothing is asked, and nothing moves for a while."""
    async with asyncio.timeout(60):
        while True:
            first = await states(session)
            await asyncio.sleep(1.5)
            if first == await states(session) and 3 not in first:
                break
    for page in pages:
        await page.until(AT_REST)


async def coverage_agrees(session: aiohttp.ClientSession, page: Page) -> None:
    """Over all that was asked, with what the answers say of themselves."""
    async with session.get("/v1/stats?n=100") as reply:
        parts = [stats["prune_miss_request"] for stats in (await reply.json())["data"]]
    weight, missed = (sum(part[name] for part in parts) for name in ("total_score", "missed_score"))
    await page.until(f"Math.abs(view.tide.weight.at(-1) - {weight}) < 0.1")
    assert abs(await page.ask("view.tide.missed.at(-1)") - missed) < 0.1
    assert 0 < missed < weight
