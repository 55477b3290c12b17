"""`tidectl top`: what it shows as text, and how it behaves on a terminal."""

import asyncio
import base64
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.page.sea import HOT, LOADING, MISSING, RESIDENT, served
from tests.page.sea import Sea as Engine
from tests.tidectl.canned import Canned, Tidectl
from tests.tidectl.terminal import Terminal
from tidectl.live.look import ASCII, WIDE, Look
from tidectl.live.sea import Sea
from tidectl.live.top import glyphs
from tidectl.live.view import lines, small_map
from tided.api.viewers import Viewers
from tided.errors import TideError

SHOTS = Path(__file__).parent / "top"
COMMAND = (sys.executable, "-m", "tidectl.main", "top")
LEFT = b"\x1b[?25h\x1b[?1049l"
END_S = 1_700_000_000.0


def engine(layers: int, experts: int) -> Engine:
    """With a past: a change of topic, a rest, hot reads."""
    found = Engine(layers, experts)
    found.lanes = [
        found.lane(0, answer_tokens=312),
        found.lane(1, phase="prompt", computed_tokens=4096, prompt_tokens=8192, answer_tokens=0, drafted=0, accepted=0),
    ]
    found.place(0, found.first(0, MISSING), HOT)
    found.place(layers - 1, found.first(layers - 1, MISSING), LOADING)
    return found


def past(viewers: Viewers, shown: Engine) -> None:
    counters = shown.counters
    for at in range(290):
        if not 100 < at < 120:
            covered = 0.86 if 150 < at < 170 else 0.985
            counters["weight"] += 30
            counters["missed_weight"] += 30 * (1 - covered)
            counters["substituted_weight"] += 0.2
            counters["swaps"] += at % 7 if 150 < at < 175 else 0
        viewers._tides.take(END_S - 290 + at)


def sea(layers: int, experts: int) -> Sea:
    shown = engine(layers, experts)
    viewers = Viewers(shown, "a-model")  # type: ignore[arg-type]
    past(viewers, shown)
    return told(viewers.whole())


def told(text: str, known: Sea | None = None) -> Sea:
    found = known or Sea()
    for event in filter(None, text.split("\n\n")):
        name, data = event.split("\n")
        found.take(name.removeprefix("event: "), json.loads(data.removeprefix("data: ")), 0.0)
    return found


@pytest.mark.parametrize(
    ("name", "shape", "look"),
    [
        ("mini-80x24", (10, 48), Look(80, 24, url="http://127.0.0.1:8000")),
        ("ds41-80x24", (40, 384), Look(80, 24, url="http://127.0.0.1:8000")),
        ("ds41-80x24-ascii", (40, 384), Look(80, 24, ASCII, url="http://127.0.0.1:8000")),
        ("glm53-120x50-number", (75, 256), Look(120, 50, order="number", span_s=120)),
        ("mini-40x12", (10, 48), Look(40, 12, ASCII)),
    ],
)
def test_what_is_shown(name: str, shape: tuple[int, int], look: Look) -> None:
    """To be looked at when it changes: TIDE_SHOTS=1 writes it anew."""
    found = lines(sea(*shape), look, 100.0)
    assert len(found) == look.height
    assert max(line.cell_len for line in found) <= look.width
    text = "\n".join(line.plain.rstrip() for line in found) + "\n"
    file = SHOTS / f"{name}.txt"
    if os.environ.get("TIDE_SHOTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (10, 48), (40, 384), (75, 256), (40, 480)], ids=str)
def test_it_fits_every_terminal(shape: tuple[int, int]) -> None:
    found = sea(*shape)
    for width in (39, 40, 57, 80, 133, 250):
        for height in (5, 12, 13, 24, 60):
            shown = lines(found, Look(width, height, url="http://a-host:8000"), 1.0)
            assert len(shown) == height
            assert all(line.cell_len <= width for line in shown)


def test_coverage_says_when_it_is_of_all_since_the_start() -> None:
    shown = engine(3, 8)
    viewers = Viewers(shown, "a-model")  # type: ignore[arg-type]
    for at, (weight, missed, words) in enumerate(((0, 0, " -"), (40, 10, " 75.0 %"), (80, 30, " 50.0 %"))):
        shown.counters["weight"], shown.counters["missed_weight"] = weight, missed
        viewers._tides.take(END_S + at)
        if at == 1:  # a viewer of a server whose only sample is of what was
            viewers._tides.samples.popleft()
        line = lines(told(viewers.whole()), Look(80, 24), 6.0)[1].plain
        assert line.startswith(f"coverage{words}" + (" since the start" if at == 1 else "   ")), line


def test_every_expert_has_its_sign_where_there_is_room() -> None:
    found = sea(10, 48)
    rows = [line.plain for line in lines(found, Look(80, 24), 100.0)[5:15]]
    for layer, row in enumerate(rows):
        signs = row[9:57]
        for expert, sign in enumerate(signs):
            cell = found.cells[layer * 48 + expert]
            wanted = "○" if cell >> 4 == MISSING and cell & 15 >= 7 else "·█◆▄"[cell >> 4]
            assert sign == wanted
        assert row.endswith(f"{100 * signs.count('█') / 48:3.0f} %")


def test_moves_are_told_the_newest_first() -> None:
    found = sea(3, 8)
    cells = np.frombuffer(bytes(found.cells), dtype=np.uint8)
    here = int(np.flatnonzero(cells >> 4 == RESIDENT)[0])
    away = int(np.flatnonzero(cells >> 4 == MISSING)[-1])
    for index, state in ((here, MISSING), (away, HOT)):
        code = index << 6 | state << 4 | int(cells[index] & 15)
        found.take("cells", {"cells": base64.b64encode(code.to_bytes(3)).decode()}, 5.0)
    shown = "\n".join(line.plain for line in lines(found, Look(80, 24), 6.0))
    assert f"latest   ◆ {away // 8}/{away % 8}  ▽ {here // 8}/{here % 8}" in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("map", {"model": "m", "layers": 2, "experts": 2, "cells": "AAAA"}),
        ("map", {"model": "m", "layers": 1 << 20, "experts": 1 << 20, "cells": ""}),
        ("map", {"model": "m"}),
        ("map", None),
        ("cells", {"cells": base64.b64encode(b"\xff\xff\xff").decode()}),
        ("cells", {"cells": "%"}),
        ("tide", {"at": [1.0]}),
        ("now", {"state": 3}),
    ],
)
def test_what_is_no_map_is_an_error(name: str, value: Any) -> None:
    found = sea(3, 8)
    with pytest.raises(TideError):
        found.take(name, value, 0.0)


def test_what_a_server_calls_itself_cannot_steer_the_terminal() -> None:
    found = sea(3, 8)
    found.model = "x\x1b[2Jy"
    assert "x[2Jy" in lines(found, Look(80, 24), 0.0)[0].plain


# On a terminal


@pytest.fixture
def live() -> Iterator[tuple[Engine, str]]:
    """An engine and its server, on a loop of their own."""
    shown, loop = engine(10, 48), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    opened = served(shown)
    url = asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result(30)
    yield shown, url
    asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def top(live: tuple[Engine, str]) -> Iterator[Terminal]:
    terminal = Terminal(*COMMAND, "--url", live[1], "--every", "0.1")
    yield terminal
    terminal.close()


def test_it_follows_resizes_and_quits(top: Terminal, live: tuple[Engine, str]) -> None:
    shown, _ = live
    top.until(lambda: "TideLM the sea   serving" in top.screen()[0])
    top.until(lambda: "q quit  o by number  s 5 min" in top.screen()[23])
    come = shown.first(4, MISSING)
    shown.place(4, come, RESIDENT)
    top.until(lambda: f"▲ 4/{come}" in "\n".join(top.screen()))
    shown.lanes = []
    top.until(lambda: "at rest" in top.screen()[0])
    top.type(b"o")
    top.until(lambda: "o by heat" in top.screen()[23])
    top.type(b"s")
    top.until(lambda: top.screen()[2].startswith("15 min"))
    top.resize(120, 40)
    top.until(lambda: "q quit" in top.screen()[39])
    top.type(b"q")
    assert top.end() == 0
    assert top.left_modes == top.modes
    assert top.sent.endswith(LEFT)


def test_nothing_is_sent_where_nothing_changes(top: Terminal, live: tuple[Engine, str]) -> None:
    live[0].lanes = []
    top.until(lambda: "at rest" in top.screen()[0] and "q quit" in top.screen()[23])
    before = len(top.sent)
    for _ in range(12):
        top.read(0.1)
    # Each second of the tide moves its line, and no other.
    assert len(top.sent) - before < 3 * 600


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_whatever_ends_it_the_terminal_is_as_it_was(top: Terminal, number: signal.Signals, code: int) -> None:
    top.until(lambda: "TideLM the sea" in top.screen()[0])
    if number is signal.SIGINT:
        top.type(b"\x03")
    else:
        top.process.send_signal(number)
    assert top.end() == code
    assert top.left_modes == top.modes
    assert LEFT in top.sent
    assert b"Traceback" not in top.sent


def test_a_stopped_program_gives_the_terminal_back(live: tuple[Engine, str]) -> None:
    shell = '"$@"; echo stopped $?; read -r _; fg > /dev/null; echo ended'
    terminal = Terminal("bash", "-mc", shell, "top", *COMMAND, "--url", live[1], "--every", "0.1")
    try:
        terminal.until(lambda: "q quit" in terminal.screen()[23])
        terminal.type(b"\x1a")
        terminal.until(lambda: b"stopped 148" in terminal.sent)
        assert terminal.sent.index(LEFT) < terminal.sent.index(b"stopped 148")
        terminal.type(b"\n")
        terminal.until(lambda: b"TideLM" in terminal.sent.partition(b"stopped 148")[2])
        terminal.type(b"q")
        terminal.until(lambda: b"ended" in terminal.sent)
        assert terminal.sent.count(LEFT) == 2
    finally:
        terminal.close()


def test_one_colour(live: tuple[Engine, str]) -> None:
    terminal = Terminal(*COMMAND, "--url", live[1], NO_COLOR="1")
    try:
        terminal.until(lambda: "resident" in terminal.screen()[4])
        terminal.type(b"q")
        assert terminal.end() == 0
        assert not re.findall(rb"\x1b\[[1-9][\d;]*m", terminal.sent)
    finally:
        terminal.close()


def test_where_nobody_answers_it_is_told_and_tried_again() -> None:
    terminal = Terminal(*COMMAND, "--url", "http://127.0.0.1:9", "--every", "0.1")
    try:
        terminal.until(lambda: "no server answers" in terminal.screen()[0])
        terminal.type(b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()


# Off a terminal


def test_off_a_terminal_it_is_told_once(tidectl: Tidectl, live: tuple[Engine, str]) -> None:
    ran = tidectl("top", "--url", live[1])
    assert (ran.exit_code, ran.stderr) == (0, "")
    shown = ran.stdout.splitlines()
    assert shown[0].startswith("TideLM the sea   serving")
    assert sum("█" in line for line in shown) >= 10
    assert "\x1b" not in ran.stdout


def test_where_blocks_cannot_be_written_there_are_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, wanted in (("utf-8", WIDE), ("ascii", ASCII), ("latin-1", ASCII)):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert glyphs() is wanted


def test_json_is_one_object(tidectl: Tidectl, live: tuple[Engine, str]) -> None:
    found = json.loads(tidectl("top", "--json", "--url", live[1]).stdout)
    assert found.items() >= {"schema": "tidectl.top/1", "model": "the sea", "layers": 10, "experts": 48}.items()
    assert found["now"]["counts"]["loading"] == 1
    assert found["now"]["lanes"][0]["answer_tokens"] == 312


def test_a_server_without_a_map(tidectl: Tidectl, server: Canned) -> None:
    server.health = (404, {"error": {"message": "no such path"}})
    ran = tidectl("top", "--once", "--url", server.url)
    assert (ran.exit_code, "it is no TideLM" in ran.stderr) == (1, True)
    server.health = (401, {"error": {"message": "a key is wanted"}})
    ran = tidectl("top", "--once", "--url", server.url)
    assert (ran.exit_code, "TIDE_API_KEY" in ran.stderr) == (77, True)


def test_the_small_map_is_short() -> None:
    shown = small_map(sea(40, 384), Look(80, 40, WIDE), 0.0)
    assert len(shown) <= 24
    assert not any("q quit" in line.plain for line in shown)
