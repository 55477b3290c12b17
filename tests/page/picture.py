"""Pictures for the documentation, of the mini while it is asked: the page, and its part that shows the tide.

python -m tests.page.picture docs/images
"""

import argparse
import asyncio
import io
import sys
import tempfile
from pathlib import Path

import aiohttp
from PIL import Image

from tests.daemon.helpers import running
from tests.page.browser import browser, chromium
from tests.page.conftest import NO_BROWSER
from tests.page.test_mini_page import complete, texts

MINI = Path(__file__).parents[2] / "minis" / "deepseek"
PROFILE = f"""
[model]
path = "{MINI}"
served_name = "mini-deepseek"
[experts]
resident = 264
[tide]
seed = "{MINI}/demand-seed.json"
hot_ring_slots = 16
look_rows = 4
record = false
[cache]
context_tokens = 2048
pool_tokens = 4096
[engine]
lanes = 2
draft = "acceptance"
"""
WIDTH, SECONDS = 1280, 100.0
COLOURS = 256
CARD = "document.querySelector('.tide')"


async def draw(folder: Path, program: str) -> None:
    with tempfile.TemporaryDirectory() as place, running(PROFILE, Path(place)) as pair:
        async with (
            aiohttp.ClientSession(pair.url, timeout=aiohttp.ClientTimeout(300)) as session,
            browser(program, Path(place) / "browser") as tabs,
        ):
            page = await tabs.page()
            await page.open(f"{pair.url}/", WIDTH)
            await page.until("view.now && view.cells.length")
            await page.ask("[...document.getElementById('spans').children][0].click()")
            loop = asyncio.get_running_loop()
            began_s, asked = loop.time(), 0
            stories, code = texts("story", 40), texts("code", 40)
            while loop.time() - began_s < SECONDS * 0.55:
                await complete(session, stories[asked % len(stories)], 60)
                asked += 1
            while loop.time() - began_s < SECONDS:
                await complete(session, code[asked % len(code)], 60)
                asked += 1
            last = [asyncio.create_task(complete(session, text, 500)) for text in (code[1], stories[1])]
            await page.until("view.now.lanes.filter(lane => lane.phase === 'answer' && lane.tok_s).length === 2")
            await asyncio.sleep(2)
            await page.picture(Path(place) / "page.png")
            box = await page.ask(f"(box => [box.left, box.top, box.right, box.bottom])({CARD}.getBoundingClientRect())")
            taken = Image.open(Path(place) / "page.png").convert("RGB")
            save(taken, folder / "expert-map.png")
            save(taken.crop([round(edge * taken.width / WIDTH) for edge in box]), folder / "tide.png")
            await page.close()
            for task in last:
                task.cancel()


def save(taken: Image.Image, file: Path) -> None:
    """With a palette of its own: a quarter of the bytes."""
    found, small = io.BytesIO(), taken.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(found, "PNG", optimize=True)
    file.write_bytes(found.getvalue())
    print(f"{file}: {len(found.getvalue()) // 1000} kB", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    program = chromium()
    if program is None:
        raise SystemExit(NO_BROWSER)
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(given.folder, program))


if __name__ == "__main__":
    main()
