"""Colour, tables and progress: on terminals that want them, and never by what a text contains."""

import io
import re
import threading
import time

import pytest

from tests.tidectl.terminal import on_a_terminal
from tidectl import output, status, waiting
from tidectl.running import Rank, Snapshot
from tidectl.waiting import Item
from tided.errors import UsageError

REPORT = "from tidectl.output import report; from tided.errors import UsageError; report(UsageError('no'))"
NASTY = "[red]x[/red] :smile: \x1b[2J\x07\x9b31m \u202e [/] {task} 100 %"
SHOWN = "[red]x[/red] :smile: [2J31m  [/] {task} 100 %"
STYLE_CODE = re.compile(r"\x1b\[[\d;]*m")


def test_colour_is_for_terminals_that_want_it(capsys: pytest.CaptureFixture[str]) -> None:
    output.report(UsageError("no", where="here", hint="do this"))
    assert capsys.readouterr().err == "error: here: no\n  do this\n"
    assert on_a_terminal(REPORT) == "\x1b[1;31merror\x1b[0m: no\r\n"
    assert on_a_terminal(REPORT, NO_COLOR="1") == "error: no\r\n"
    assert on_a_terminal(REPORT, TERM="dumb") == "error: no\r\n"


def test_an_error_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output.report(UsageError(NASTY, where="p.toml:3:1"))
    assert capsys.readouterr().err == f"error: p.toml:3:1: {SHOWN}\n"
    output.say(f"a\tb {NASTY} {'long ' * 100}", "dim")
    assert capsys.readouterr().err == f"a\tb {SHOWN} {'long ' * 100}\n"


# status


def snapshot(message: str, **changes: object) -> Snapshot:
    health = {"model": message, "lanes": {"total": 2, "busy": 1}, "queue": 4, "decode_tok_s": 31.26}
    ranks = [Rank(0, 71, True, "ready", 940.0, ""), Rank(1, 72, True, "loading", 995.0, f"{message}\nmore")]
    return Snapshot("starting", "/p.toml", "http://h:1", 900.0, ranks, health, [message], None)._replace(**changes)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    def show(now: Snapshot) -> list[str]:
        monkeypatch.setattr(status, "look_everywhere", lambda *_: now)
        monkeypatch.setattr(time, "time", lambda: 1000.0)
        status.show(as_json=False)
        return capsys.readouterr().out.splitlines()

    return show


def test_status_is_one_screen(screen) -> None:
    assert screen(snapshot("m")) == [
        "state      starting",
        "trouble    m",
        "profile    /p.toml",
        "uptime     1 min 40 s",
        "url        http://h:1",
        "model      m",
        "lanes      1 of 2 busy, 4 waiting",
        "speed      31.3 tok/s",
        "",
        "rank  phase    for    process  message",
        "0     ready    1 min  71",
        "1     loading  5 s    72       m",
    ]


def test_status_interprets_nothing_and_cuts_nothing_off_a_terminal(screen) -> None:
    long = NASTY + " word" * 100
    shown = SHOWN + " word" * 100
    lines = screen(snapshot(long))
    assert f"trouble    {shown}" in lines
    assert f"model      {shown}" in lines
    assert lines[-1].endswith(f"  {shown}")


def test_status_leaves_out_what_nobody_knows(screen) -> None:
    idle = {"decode_tok_s": None, "lanes": 3, "residents": "x"}
    assert screen(snapshot("", health=idle, ranks=[], trouble=[], url="")) == [
        "state      starting",
        "profile    /p.toml",
        "uptime     1 min 40 s",
    ]


def test_residents_that_differ_in_size_are_told_by_their_bytes() -> None:
    told = {"residents": 180, "experts": 256, "generation": 2}
    assert (
        status.residents_line(told | {"residents_bytes_share": None}) == "180 of 256 experts (70.3 % of them), plan 2"
    )
    assert (
        status.residents_line(told | {"residents_bytes_share": 0.6719})
        == "180 of 256 experts (67.2 % of their bytes), plan 2"
    )


STATUS = """
import sys, time
from tests.tidectl.test_output import NASTY, snapshot
from tidectl import status
status.look_everywhere = lambda _: snapshot(NASTY)
status.show(as_json=False)
"""


def test_status_on_a_terminal_has_colour_but_none_of_a_texts_own() -> None:
    shown = on_a_terminal(STATUS)
    assert "\x1b[33mstarting" in shown
    assert set(re.findall(r"\x1b.", shown)) == {"\x1b["}
    assert SHOWN.split(" ")[0] in shown
    assert "\x1b[2J" not in shown
    without = on_a_terminal(STATUS, NO_COLOR="1")
    assert "\x1b" not in without
    assert without == STYLE_CODE.sub("", shown)


ANSWER = """
from tidectl.answers import Screen
screen = Screen(quiet=False)
screen.show("Eight?", "")
screen.show("", "Eight")
screen.show("", " legs.")
screen.end()
"""


def test_a_line_parts_thinking_and_answer_on_a_terminal() -> None:
    assert on_a_terminal(ANSWER, NO_COLOR="1") == "Eight?\r\n\r\nEight legs.\r\n"


# waiting

BARS = """
import time
from tests.tidectl.test_output import NASTY
from tidectl.waiting import Item, waiting
with waiting() as show:
    began = time.time() - 1500
    show([Item("starting the ranks")])
    show([
        Item("rank 0", "loading", began, "experts: 6 of 8", 6, 8),
        Item("rank 1", "loading", began, NASTY),
        Item("rank 2", "ready", began, ready=True),
    ])
    # here
print("after")
"""


def test_a_terminal_shows_all_ranks_alive_and_is_left_as_it_was() -> None:
    shown = on_a_terminal(BARS, COLUMNS="120")
    text = STYLE_CODE.sub("", shown)
    assert re.search(r"rank 0  loading  1\d{3} s  [━╺]{24}  experts: 6 of 8", text)
    assert f"\x1b[36m{18 * '━'}\x1b[0m" in shown  # 6 of 8 of 24
    assert f"\x1b[32m{24 * '━'}\x1b[0m" in shown  # ready
    assert re.search(r"rank 2  ready +━{24}", text)
    assert re.search(r"rank 1  loading  1\d{3} s  ━{24}  \[red\]x\[/red\]", text)
    assert "\x1b[2J" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor
    last = shown[shown.rindex("\x1b[?25h") :]
    assert "\x1b[1A\x1b[2K" in last  # the rows are gone
    assert STYLE_CODE.sub("", last).endswith("after\r\n")


def test_off_a_terminal_lines_go_on_while_the_caller_is_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(waiting, "TICK_S", 0.01)
    threads, told, deadline = threading.active_count(), "", time.monotonic() + 10
    with waiting.waiting() as show:
        show([Item("loading the engine")])
        while told.count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert told.count("loading the engine (") >= 3
    assert threading.active_count() == threads  # none behind the end


def test_a_live_view_without_colour() -> None:
    shown = on_a_terminal(BARS, NO_COLOR="1")
    assert "rank 0  loading" in shown
    assert not STYLE_CODE.search(shown)


def test_a_dumb_terminal_gets_lines() -> None:
    assert on_a_terminal(BARS, TERM="dumb").splitlines()[::2] == ["starting the ranks (0 s)", "after"]


@pytest.mark.parametrize("columns", ["20", "40"])
def test_a_narrow_terminal_keeps_a_row_to_a_line(columns: str) -> None:
    code = BARS.replace("experts: 6 of 8", "x" * 200)
    for row in STYLE_CODE.sub("", on_a_terminal(code, COLUMNS=columns)).split("\n"):
        drawn = re.sub(r"\x1b\[\??\d*\w", "", row).strip("\r")
        assert len(drawn.rpartition("\r")[2]) <= int(columns)


def test_an_end_in_between_leaves_the_terminal_as_it_was() -> None:
    code = BARS.replace('print("after")', "").replace("    # here", "    raise SystemExit(0)")
    assert on_a_terminal(code).count("\x1b[?25h") == 1


def test_elsewhere_a_line_at_each_change_of_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting.waiting() as show:
        for name, state, detail in (
            ("a", "", ""),
            ("a", "", "x"),
            ("b", "1 of 2", ""),
            ("b", "2 of 2", ""),
            ("c", "", ""),
        ):
            show([Item(name, state, detail=detail)])
    assert [row.partition(" (")[0] for row in capsys.readouterr().err.splitlines()] == ["a", "b 1 of 2", "c"]


def test_elsewhere_a_line_each_10_s(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with waiting.waiting() as show:
        for at, text in ((0, "a"), (1, "a"), (2, "b"), (9, "b"), (12, NASTY), (13, "b")):
            now[0] = 100.0 + at
            show([Item("rank 0", "loading", detail=text), Item("rank 1", "ready", ready=True)])
    assert capsys.readouterr().err == (
        f"rank 0 loading (a), rank 1 ready (0 s)\nrank 0 loading ({SHOWN}), rank 1 ready (12 s)\n"
    )


def test_a_string_is_no_markup_for_our_console() -> None:
    stream = io.StringIO()
    output.console(stream).print(NASTY.replace("\x1b[2J\x07\x9b31m \u202e", ""))
    assert stream.getvalue() == SHOWN.replace("[2J31m ", "") + "\n"


def test_a_forced_colour_does_not_reach_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    console = output.console(stream)
    console.print(output.plain("x", "bold red"))
    assert stream.getvalue() == "x\n"
    assert not console.is_terminal


INTERRUPTED = """
import os, signal, time
from tidectl import main, waiting
def app():
    with waiting.waiting() as show:
        show([waiting.Item("rank 0", "loading")])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
main.app = app
try:
    main.main()
except KeyboardInterrupt:
    print("the end")
"""


def test_a_terminal_has_its_cursor_again_after_sigterm() -> None:
    shown = on_a_terminal(INTERRUPTED)
    assert "rank 0" in shown
    assert "the end" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
