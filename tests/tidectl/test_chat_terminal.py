"""`tidectl chat` on a terminal: markdown as it comes, thinking folded, images, commands; and servers that are none of
ours."""

import base64
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tidectl.canned import STATS, Canned, Tidectl
from tests.tidectl.terminal import Terminal
from tidectl import chat
from tidectl.answers import Answer, Pace, statistics_line
from tidectl.attach import MOST_BYTES, image_part
from tidectl.live.markdown import MarkdownScreen, split
from tided.errors import UsageError

COMMAND = (sys.executable, "-m", "tidectl.main", "chat")
PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
ANSWER = """# Tides

A tide **rises**, and it `falls`.

1. first
2. second

   still second

- a point

```python
def ebb(tide):

    return tide - 1
```

See [the moon](https://moon.example/phase) for more."""


# Blocks


def blocks(text: str, pieces: list[str]) -> list[str]:
    growing, done = "", []
    for piece in pieces:
        growing += piece
        finished, growing = split(growing)
        done += [finished] if finished else []
    return [*done, growing]


@pytest.mark.parametrize("seed", range(20))
def test_however_it_comes_it_is_the_same_text_and_no_block_is_cut(seed: int) -> None:
    dice, pieces, rest = random.Random(seed), [], ANSWER
    while rest:
        cut = dice.randint(1, 12)
        pieces.append(rest[:cut])
        rest = rest[cut:]
    found = blocks(ANSWER, pieces)
    plain = [line for block in found for line in block.split("\n") if line]
    assert plain == [line for line in ANSWER.split("\n") if line]
    for block in found:
        assert block.count("```") % 2 == 0, "a fence is cut"
        assert ("1. first" in block) == ("   still second" in block), "a list is cut"


def test_what_may_go_on_waits() -> None:
    assert split("One.\n\nTw") == ("One.\n", "Tw")
    assert split("- a\n\n") == ("", "- a\n\n")
    assert split("- a\n\n- b\n\n") == ("", "- a\n\n- b\n\n")
    assert split("- a\n\nThen.\n")[0] == "- a\n"
    assert split("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert split("````\n```\n\n````\nx") == ("````\n```\n\n````", "x")
    assert split("One.") == ("", "One.")


# On a terminal


@pytest.fixture
def asked(server: Canned) -> Any:
    made: list[Terminal] = []

    def start(*arguments: str, **variables: str) -> Terminal:
        made.append(Terminal(*COMMAND, *arguments, "--url", server.url, rows=60, **variables))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


Asked = Callable[..., Terminal]


def test_markdown_is_drawn_and_thinking_folded(asked: Asked, server: Canned) -> None:
    pieces = [ANSWER[at : at + 7] for at in range(0, len(ANSWER), 7)]
    thought = [{"reasoning_content": "The moon pulls. "}, {"reasoning_content": "So does the sun."}]
    server.events = server.chunks(*thought, *({"content": piece} for piece in pieces))
    terminal = asked("Why?")
    assert terminal.end() == 0
    shown = "\n".join(terminal.screen())
    assert "thought for 0.0 s, 7 words" in shown
    assert "The moon pulls" not in shown
    assert "**" not in shown
    assert "`falls`" not in shown
    assert " 1 first" in shown
    assert " • a point" in shown
    assert "def ebb(tide):" in shown
    assert "(https://moon.example/phase)" in shown
    for once in ("Tides", "A tide rises", "a point", "def ebb", "for more"):
        assert shown.count(once) == 1, once
    assert "31.3 tok/s" in shown
    assert b"\x1b[1m" in terminal.sent


def test_markdown_may_be_left_alone(asked: Asked, server: Canned) -> None:
    server.events = server.chunks({"reasoning_content": "hm"}, {"content": "a **b**"})
    terminal = asked("Why?", "--no-markdown")
    assert terminal.end() == 0
    assert "a **b**" in "\n".join(terminal.screen())
    assert "hm" in "\n".join(terminal.screen())


def test_an_answer_cannot_steer_the_terminal(asked: Asked, server: Canned) -> None:
    server.events = server.chunks(
        {"content": "a\x1b[2J\x1b]0;t\x07b \u202e[x](http://e\x1b[31m)\n\n```\n\x1b[2J\n```\n"}
    )
    terminal = asked("Why?")
    assert terminal.end() == 0
    for bad in (b"\x1b[2J", b"\x1b]", b"\x07", "\u202e".encode()):
        assert bad not in terminal.sent


def wanted_in(terminal: Terminal, wanted: re.Pattern[bytes], before: int) -> bool:
    return bool(wanted.search(terminal.sent, before))


def test_a_conversation_has_commands(asked: Asked, server: Canned, tmp_path: Path) -> None:
    (picture := tmp_path / "a cat.png").write_bytes(PNG)
    server.events = server.chunks({"reasoning_content": "Whiskers."}, {"content": "A cat."})
    terminal = asked()
    for line, answer in [
        (f"/image {picture}", "1 with the next question"),
        ("What is this?", "A cat."),
        ("/thoughts", "Whiskers."),
        ("/nothing", "there is no /nothing"),
        ("/image /no/such.png", "cannot be read"),
        ("/etc/hosts is a file?", "A cat."),
        ("/new", "a new conversation"),
        ("Again?", "A cat."),
    ]:
        terminal.until(lambda: bool(re.search(rb"> (\x1b\[[?\d;]*[a-zA-Z])*$", terminal.sent)))
        done = rb".*tok/s" if not line.startswith("/") or " is " in line else b""
        wanted, before = re.compile(re.escape(answer.encode()) + done, re.DOTALL), len(terminal.sent)
        terminal.type(line.encode() + b"\n")
        terminal.until(partial(wanted_in, terminal, wanted, before))
    terminal.type(b"/quit\n")
    assert terminal.end() == 0
    first, second, third = (request[2]["messages"] for request in server.requests)
    assert first[0]["content"] == [image_part(picture), {"type": "text", "text": "What is this?"}]
    assert [message["content"] for message in second[1:]] == ["A cat.", "/etc/hosts is a file?"]
    assert [message["content"] for message in third] == ["Again?"]


def test_ctrl_c_stops_an_answer_and_leaves_a_clean_line(asked: Asked, server: Canned) -> None:
    go = threading.Event()
    server.events, server.answers_when = server.chunks({"content": "8"}), lambda: go.wait(20)
    terminal = asked("Why?")
    terminal.until(lambda: bool(server.requests))
    terminal.type(b"\x03")
    assert terminal.end() == 130
    go.set()
    assert b"Traceback" not in terminal.sent
    assert terminal.left_modes == terminal.modes


def test_a_long_block_stays_within_the_screen(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("tidectl.output.is_terminal", lambda _: True)
    screen = MarkdownScreen()
    for line in range(60):
        screen.show("", f"{'```' if line == 0 else f'line {line}'}\n")
        assert screen._live is not None
        height = len(screen._console.render_lines(screen._live.renderable))
        assert height <= 12
    screen.count(5)
    screen.end()
    assert capsys.readouterr().out.count("line 59") >= 1


# What goes, and to whom


def test_options_that_only_ours_knows(tidectl: Tidectl, server: Canned, tmp_path: Path) -> None:
    (picture := tmp_path / "x.jpg").write_bytes(b"\xff\xd8\xff!")
    server.body = {"choices": [{"message": {"content": "Yes"}}], "x_engine_stats": STATS | {"fidelity": "exact"}}
    options = ["--no-stream", "--fidelity", "exact", "--model", "m", "--image", str(picture)]
    ran = tidectl("chat", "Is it?", "--url", server.url, *options)
    assert ran.exit_code == 0
    assert ran.stderr.endswith("fidelity exact\n")
    [(_, _, body)] = server.requests
    assert (body["fidelity"], body["model"]) == ("exact", "m")
    data = body["messages"][0]["content"][0]["image_url"]["url"]
    assert data == "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8\xff!").decode()


@pytest.mark.parametrize("data", [b"", b"text", b"RIFF1234WAVE", PNG + bytes(MOST_BYTES)])
def test_what_is_no_image_is_not_sent(tidectl: Tidectl, server: Canned, tmp_path: Path, data: bytes) -> None:
    (file := tmp_path / "x").write_bytes(data)
    ran = tidectl("chat", "?", "--url", server.url, "--image", str(file))
    assert (ran.exit_code, server.requests) == (2, [])
    assert str(file) in ran.stderr
    with pytest.raises(UsageError):
        image_part(tmp_path / "none")


def test_drafts_and_fidelity_are_told() -> None:
    stats = STATS | {"spec": {"drafted": 40, "accepted": 30}, "fidelity": "balanced"}
    line = statistics_line(Answer("", "", "stop", {"completion_tokens": 5}, stats))
    assert "31.3 tok/s, 30 of 40 drafts taken" in line
    assert line.endswith("fidelity balanced")


def test_the_speed_of_another_server_is_measured_here() -> None:
    pace = Pace()
    pace.first_s, pace.last_s = 10.0, 12.0
    answer = Answer("", "", "stop", {"prompt_tokens": 3, "completion_tokens": 41}, {})
    assert statistics_line(answer, pace) == "3 prompt tokens, 41 tokens, 20.0 tok/s as measured here"
    assert statistics_line(Answer("", "", "stop", {}, {}), pace) == ""
    assert statistics_line(answer, Pace()) == "3 prompt tokens, 41 tokens"


def test_another_servers_answer(tidectl: Tidectl, server: Canned) -> None:
    """No statistics, no usage, thinking under another name, an object more."""
    delta = [{"role": "assistant", "content": None}, {"reasoning": "Hm."}, {"content": "8", "annotations": []}]
    server.events = [{"id": "x", "choices": [{"index": 0, "delta": one}]} for one in delta]
    ran = tidectl("chat", "?", "--url", server.url)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "8\n", "Hm.\n")


@pytest.mark.parametrize("engine", ["tidelm", "another"])
def test_another_server_wants_a_models_name(tidectl: Tidectl, server: Canned, engine: str) -> None:
    server.status, server.body = 400, {"error": {"message": "model is required"}}
    server.health = (200, {"engine": engine, "data": [{"id": "llama"}, {"id": "qwen"}]})
    ran = tidectl("chat", "?", "--no-stream", "--url", server.url)
    assert (ran.exit_code, "model is required" in ran.stderr) == (1, True)
    assert ("this is no TideLM; name its model: --model llama (also: qwen)" in ran.stderr) == (engine == "another")


def test_the_count_of_tokens_is_asked_of_ours_alone(asked: Asked, server: Canned) -> None:
    for engine in ("tidelm", "another"):
        server.health = (200, {"engine": engine, "status": "ok"})
        server.events = server.chunks({"content": "8"})
        assert asked("Why?").end() == 0
    ours, theirs = (request[2]["stream_options"] for request in server.requests)
    assert ours == {"include_usage": True, "continuous_usage_stats": True}
    assert theirs == {"include_usage": True}


def test_how_fast_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.0, 20.0])
    monkeypatch.setattr("tidectl.live.markdown.time.monotonic", lambda: next(clock))
    screen = MarkdownScreen()
    told = []
    for tokens in (1, 11, 21, 23):
        screen.count(tokens)
        told.append(screen.status())
    assert told == ["", "11 tokens, 20.0 tok/s", "21 tokens, 20.0 tok/s", "23 tokens, 0.2 tok/s"]


def test_commands_are_known_by_their_form() -> None:
    talk = chat.Conversation([])
    options = chat.Options()
    for line in ("hello", "/etc/hosts", "/image is a word", "1/2", "/Image x"):
        if line.startswith("/image "):
            with pytest.raises(UsageError):
                talk.command(line, options)
        else:
            assert not talk.command(line, options), line
    for line in ("/help", "/new", "/thoughts", "/image", "/what"):
        assert talk.command(line, options), line
    assert json.dumps(talk.messages) == "[]"
