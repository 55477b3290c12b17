"""The page in a browser: what it shows is what the server says, on screens wide and narrow, by mouse and key."""

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import Page
from tests.page.sea import HOT, LOADING, MISSING, RESIDENT, Sea, served

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.browser]

READY = "view.now && document.getElementById('lanes').children.length > 1"


async def same_map(page: Page, sea: Sea, seconds: float = 20) -> None:
    """The page has every cell as the engine has it."""
    wanted = base64.b64encode(sea.cells() or b"").decode()
    parts = "btoa(Array.from(view.cells, cell => String.fromCharCode(cell)).join(''))"
    await page.until(f"{parts} === {json.dumps(wanted)}", seconds)


async def pixel(page: Page, layer: int, expert: int, up: float = 0.75, along: float = 0.5) -> list[int]:
    """The colour of a cell in the map; `up`: how high in it, 1 is its top."""
    index = f"{layer} * view.experts + {expert}"
    x = f"placeOf({index})[0] + Math.floor((view.box.w - view.box.gw) * {along})"
    y = f"placeOf({index})[1] + Math.floor((view.box.h - view.box.gh - 1) * {1 - up})"
    found: list[int] = await page.ask(
        f"Array.from(document.getElementById('map').getContext('2d').getImageData({x}, {y}, 1, 1).data).slice(0, 3)"
    )
    return found


async def colour(page: Page, name: str) -> list[int]:
    shown = await page.ask(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    full = shown if len(shown) == 7 else "#" + "".join(digit * 2 for digit in shown[1:])
    return [int(full[at : at + 2], 16) for at in (1, 3, 5)]


def opened(page: Page) -> list[dict[str, Any]]:
    """The streams that the page has asked for."""
    return [request for request in page.requests if request["url"].endswith("/v1/expert-map/events")]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def text(of: str) -> str:
    return f"document.getElementById('{of}').textContent"


@pytest.mark.parametrize("shape", [(40, 384), (75, 256), (10, 48), (3, 8)], ids=str)
@pytest.mark.parametrize("width", [1280, 390])
async def test_every_shape_fits_every_screen(page: Page, shape: tuple[int, int], width: int) -> None:
    sea = Sea(*shape)
    sea.lanes = [sea.lane(0), sea.lane(1, phase="prompt", computed_tokens=300, answer_tokens=0)]
    async with served(sea) as url:
        await page.open(url, width)
        await page.until(READY)
        await same_map(page, sea)
        assert await page.ask("document.documentElement.scrollWidth") == width
        left, right, high = await page.ask(
            "(() => { const at = document.getElementById('map').getBoundingClientRect(), sea = "
            "document.getElementById('sea').getBoundingClientRect(); return [at.left - sea.left, sea.right - at.right,"
            " at.height] })()"
        )
        assert left >= 0
        assert right >= 0
        assert 20 <= high <= 900
        for layer in (0, shape[0] - 1):  # every cell has room: first and last of each
            expert = sea.first(layer, RESIDENT)
            ramp = await page.ask(f"colours.resident[{sea.heat[layer, expert]}]")
            assert f"rgb({','.join(map(str, await pixel(page, layer, expert)))})" == ramp
        shown = await page.ask("Array.from(document.querySelectorAll('#legend b'), one => one.textContent)")
        counted = [(sea.states == state).sum() for state in (RESIDENT, HOT, LOADING, MISSING)]
        assert [int(count.replace(",", "")) for count in shown] == counted
        assert page.complaints == []
        loaded = {request["url"] for request in page.requests if not request["url"].startswith("data:")}
        assert loaded == {f"{url}/", f"{url}/v1/expert-map/events"}


async def test_experts_that_move_are_seen_moving(page: Page) -> None:
    sea = Sea(10, 48)
    async with served(sea) as url:
        await page.open(f"{url}/expert-map", 1280)
        await page.until(READY)
        out, come = sea.first(4, RESIDENT), sea.first(4, MISSING)
        sea.place(4, come, LOADING)
        await page.until(f"view.cells[4 * 48 + {come}] >> 4 === 3")
        await page.until("!view.flashing.size")
        assert await pixel(page, 4, come, up=0.2) == await colour(page, "loading")
        assert await pixel(page, 4, come, up=0.8) == await colour(page, "missing")
        sea.place(4, come, RESIDENT)
        sea.place(4, out, MISSING)
        sea.counters["swaps"] += 1
        await page.until(f"{text('moves')}.includes('layer 4, expert {come} came')")
        assert f"layer 4, expert {out} left" in await page.ask(text("moves"))
        sea.place(2, sea.first(2, MISSING), HOT)
        await page.until(f"{text('moves')}.includes('hot read')")
        await same_map(page, sea)
        await page.until(f"{text('disk')}.includes('5 experts')")
        assert page.complaints == []


async def test_lanes_grow_and_end(page: Page) -> None:
    sea = Sea(3, 8)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        assert "at rest" in await page.ask(text("state"))
        for tokens in range(1, 60):
            sea.lanes = [sea.lane(1, answer_tokens=tokens)]
            await asyncio.sleep(0.01)
        await page.until(f"/Lane 1[0-9.]+ tok.s/.test({text('lanes')})")
        await page.until(f"{text('lanes')}.includes('59 tokens, 75 % of 8 drafts taken, fast')")
        assert "a free lane" in await page.ask(text("lanes"))
        assert await page.ask(text("state")) == "serving"
        sea.lanes = []
        await page.until(f"{text('state')} === 'at rest'")
        assert page.complaints == []


async def test_coverage_is_of_what_was_routed_lately(page: Page) -> None:
    sea = Sea(3, 8)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(f"{text('coverage')} === '97.0'")  # since the start: nothing is routed
        assert "since the start" in await page.ask(text("coverage-about"))
        assert "90.0 %" in await page.ask(text("missed"))
        sea.counters |= {"weight": 200.0, "missed_weight": 28.0, "substituted_weight": 12.0}
        await page.until(f"{text('coverage')} === '75.0'")
        shown = await page.ask(text("missed"))
        assert "10.00 %" in shown
        assert "15.00 %" in shown
        label = await page.until("document.getElementById('tide').getAttribute('aria-label').includes('75.0')")
        assert label


async def test_the_map_by_keys(page: Page) -> None:
    sea = Sea(10, 48)
    sea.place(3, 0, RESIDENT)
    sea.heat[3, 0] = 9
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        await page.ask("document.getElementById('sea').focus()")
        for key in ["ArrowDown"] * 3:
            await page.press(key)
        assert await page.ask(text("detail")) == "Layer 3, expert 0: resident, among the tenth that is wanted most"
        for key, place in [("ArrowRight", (3, 1)), ("End", (3, 47)), ("PageDown", (9, 47)), ("Home", (9, 0)),
                           ("ArrowLeft", (9, 0)), ("ArrowUp", (8, 0))]:  # fmt: skip
            await page.press(key)
            assert await page.ask("view.at") == place[0] * 48 + place[1], key
        sea.place(6, 13, HOT)
        await page.until("view.moves.length")
        await page.press("m")
        await page.until(f"{text('detail')}.startsWith('Layer 6, expert 13: hot read')")
        await page.press("o")  # by heat: the cursor stays on its expert, whose place is another
        assert await page.ask("[view.order, view.at]") == ["heat", 6 * 48 + 13]
        places = await page.ask("Array.from(view.places.slice(6 * 48, 7 * 48))")
        assert sorted(places) == list(range(48))
        by_place = sorted(range(48), key=places.__getitem__)
        heats = [int(sea.heat[6, expert]) for expert in by_place]
        assert heats == sorted(heats, reverse=True)
        await page.press("Home")
        assert await page.ask("view.places[view.at]") == 0
        assert page.complaints == []


async def test_the_map_by_mouse(page: Page) -> None:
    sea = Sea(10, 48)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        x, y = await page.ask(
            "(() => { const at = document.getElementById('map').getBoundingClientRect(), [x, y] = placeOf(5 * 48 + 20);"
            " return [at.left + x + 3, at.top + y + 3] })()"
        )
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.until(f"{text('detail')}.startsWith('Layer 5, expert 20:')")


async def test_a_key_is_asked_for_kept_in_the_tab_and_sent_as_a_header(page: Page, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("the-right-key\n")
    sea = Sea(3, 8)
    async with served(sea, key_file=str(keys)) as url:
        await page.open(url, 390)
        for key, opens in [("wrong", False), ("the-right-key", True)]:
            await page.until("document.getElementById('ask').open && document.activeElement.id === 'ask-key'")
            await page.send("Input.insertText", text=key)
            await page.ask("document.querySelector('#ask button').click()")
            if opens:
                await page.until(READY)
        await page.ask("location.reload()")
        await until(lambda: len(opened(page)) >= 4)  # what is asked before may still be the old page
        await page.until(READY)
        assert [request["headers"].get("Authorization") for request in opened(page)] == [
            None, "Bearer wrong", "Bearer the-right-key", "Bearer the-right-key",
        ]  # fmt: skip
        assert not any("the-right-key" in request["url"] for request in page.requests)
        assert await page.ask("document.cookie + JSON.stringify(localStorage)") == "{}"
        # A browser itself tells its console of a 401; the page says nothing.
        assert all("401" in complaint for complaint in page.complaints)


async def test_another_key_on_a_live_page_opens_one_stream_for_the_other(page: Page) -> None:
    sea = Sea(3, 8)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        await page.ask("{ window.timers = []; window.setTimeout = work => timers.push(work); }")
        for streams in (2, 3):
            await page.press("k")
            await page.send("Input.insertText", text=f"key-{streams}")
            await page.ask("document.querySelector('#ask button').click()")
            await until(lambda: len(opened(page)) == streams and sea.viewers.count == 1)  # noqa: B023
            assert await page.ask("timers.length") == 0  # nothing is to be tried again: the first was let go
        sea.place(1, sea.first(1, MISSING), HOT)
        await same_map(page, sea)
        await until(lambda: sea.viewers.count == 1)
        assert len(opened(page)) == 3


async def test_a_new_key_takes_the_place_of_a_try_that_waits(page: Page) -> None:
    sea = Sea(3, 8)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        await page.ask("pause = 1e6")
    await page.until(f"{text('state')}.includes('again in')")
    async with served(sea, port=int(url.rpartition(":")[2])):
        waits = await page.ask("retry")
        await page.ask("{ window.cleared = []; window.clearTimeout = timer => cleared.push(timer); again(); }")
        await page.until(f"{text('state')} === 'at rest'")
        assert waits
        assert await page.ask("cleared") == [waits]


async def test_a_server_that_comes_back_is_found_again(page: Page) -> None:
    sea = Sea(3, 8)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        sea.state = "draining"
        await page.until(f"{text('state')} === 'ending'")
    await page.until(f"{text('state')}.includes('again in')")
    sea.state = "ready"
    sea.place(1, sea.first(1, MISSING), HOT)
    async with served(sea, port=int(url.rpartition(":")[2])):
        await page.until(f"{text('state')} === 'at rest'")
        await same_map(page, sea)


async def test_light_dark_and_as_the_system_is(page: Page) -> None:
    async with served(Sea(3, 8)) as url:
        await page.open(url, 1280, dark=True)
        await page.until(READY)
        seen = [await colour(page, "card")]
        await page.dark(False)
        await page.until("document.documentElement.dataset.theme === 'light'")
        seen.append(await colour(page, "card"))
        for theme in ("light", "dark", "system"):
            await page.press("t")
            assert await page.ask(text("theme")) == f"Theme: {theme}"
            seen.append(await colour(page, "card"))
        dark, light = seen[0], seen[1]
        assert seen == [dark, light, light, dark, light]
        assert sum(dark) < 200 < 600 < sum(light)
        for theme in ("light", "dark"):
            await page.ask(f"theme = '{theme}', dress()")
            card = await colour(page, "card")
            for name in ("ink", "dim", "bad", "accent"):
                assert contrast(await colour(page, name), card) >= (3 if name == "accent" else 4.5), (theme, name)


def contrast(one: list[int], other: list[int]) -> float:
    """As WCAG has it."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(rgb: list[int]) -> float:
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_states_are_told_apart_by_shape(page: Page) -> None:
    """In one colour, as somebody may see them who sees no hues: which parts of a cell are filled differs."""
    sea = Sea(4, 8)
    sea.heat[:] = 9
    for expert, state in enumerate((MISSING, RESIDENT, HOT, LOADING)):
        sea.place(1, expert, state)
    async with served(sea) as url:
        await page.open(url, 1280)
        await page.until(READY)
        ground = await colour(page, "missing")
        shapes: list[Any] = []
        for expert in range(4):
            spots = [(up, along) for up in (0.05, 0.5, 0.95) for along in (0.1, 0.5, 0.9)]
            shapes.append(tuple([await pixel(page, 1, expert, *spot) != ground for spot in spots]))
        assert len(set(shapes)) == 4, shapes
