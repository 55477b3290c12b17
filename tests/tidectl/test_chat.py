"""`tidectl chat` against a server of canned answers."""

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.tidectl.canned import STATS, USAGE, Canned, Tidectl
from tidectl import answers, chat, http, patience
from tidectl.answers import Screen
from tided.errors import UsageError

LINE = (
    "11 prompt tokens, 5 tokens, first after 0.25 s, 31.3 tok/s, 312 of 480 experts resident, "
    "3.2% of the routing weight substituted"
)


def test_an_answer_is_streamed_to_stdout_and_its_cost_to_stderr(tidectl: Tidectl, server: Canned) -> None:
    server.events = server.chunks({"role": "assistant", "content": ""}, {"content": "Eight"}, {"content": " legs."})
    ran = tidectl("chat", "How many?", "--url", server.url)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "Eight legs.\n", LINE + "\n")
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body == {
        "messages": [{"role": "user", "content": "How many?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_reach_the_server(tidectl: Tidectl, server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_API_KEY", "secret")
    server.body = {"choices": [{"message": {"content": "Yes"}, "finish_reason": "stop"}]}
    options = ["--system", "Be short.", "--max-tokens", "7", "--temperature", "0", "--no-thinking", "--no-stream"]
    ran = tidectl("chat", "Is it?", "--url", f"{server.url}/v1/", *options)
    assert (ran.exit_code, ran.stdout) == (0, "Yes\n")
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it?"}],
        "stream": False,
        "max_tokens": 7,
        "temperature": 0,
        "thinking": {"type": "disabled"},
    }


def test_thinking_goes_to_stderr(tidectl: Tidectl, server: Canned) -> None:
    server.events = server.chunks({"reasoning_content": "Spiders"}, {"reasoning_content": "?"}, {"content": "8"})
    ran = tidectl("chat", "How many?", "--thinking", "--url", server.url)
    assert ran.stdout == "8\n"
    assert ran.stderr == f"Spiders?\n{LINE}\n"
    assert server.requests[0][2]["thinking"] == {"type": "enabled"}


@pytest.mark.parametrize("stream", [True, False])
def test_json_is_one_object(tidectl: Tidectl, server: Canned, stream: bool) -> None:
    message = {"content": "8", "reasoning_content": "hm"}
    if stream:
        server.events = server.chunks({"reasoning_content": "hm"}, {"content": "8"}, finish_reason="length")
    else:
        choice = {"message": message, "finish_reason": "length"}
        server.body = {"choices": [choice], "usage": USAGE, "x_engine_stats": STATS}
    ran = tidectl("chat", "?", "--json", "--url", server.url, *([] if stream else ["--no-stream"]))
    assert ran.exit_code == 0
    assert json.loads(ran.stdout) == {
        "schema": "tidectl.chat/1",
        "content": "8",
        "reasoning": "hm",
        "finish_reason": "length",
        "usage": USAGE,
        "stats": STATS,
        "url": server.url,
    }


def test_the_question_may_come_from_standard_input(tidectl: Tidectl, server: Canned) -> None:
    server.events = server.chunks({"content": "8"})
    assert tidectl("chat", "--url", server.url, stdin="How\nmany?\n").exit_code == 0
    assert server.requests[0][2]["messages"][-1]["content"] == "How\nmany?\n"
    assert tidectl("chat", "--url", server.url, stdin="").exit_code == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 1), (401, 77), (404, 1), (429, 69), (500, 1), (503, 69)],
)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_refusal_is_told_in_the_servers_words(
    tidectl: Tidectl, server: Canned, status: int, code: int, stream: str
) -> None:
    server.status, server.body = status, {"error": {"message": "too long", "type": "x", "param": None, "code": None}}
    ran = tidectl("chat", "?", stream, "--url", server.url)
    assert (ran.exit_code, ran.stdout) == (code, "")
    assert f"too long (status {status})" in ran.stderr


NO_COMPLETIONS = ["text", [], {"error": None}, {"choices": 3}, {"choices": [3]}, {"choices": [{"delta": 3}]}]


@pytest.mark.parametrize("body", [*NO_COMPLETIONS, {"choices": [], "usage": 3}])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_reply_that_is_no_completion_is_an_error(tidectl: Tidectl, server: Canned, body: Any, stream: str) -> None:
    server.body, server.events = body, [body] if stream == "--stream" else None
    ran = tidectl("chat", "?", stream, "--url", server.url)
    assert ran.exit_code == 1
    assert "not a chat completion" in ran.stderr


def test_statistics_that_are_none_are_left_out(tidectl: Tidectl, server: Canned) -> None:
    stats = {"experts": 3, "ttft_s": "x", "decode_tok_s": None, "substituted_weight_share": True}
    server.body = {"choices": [{"message": {"content": "8"}}], "x_engine_stats": stats, "usage": {"prompt_tokens": 4}}
    assert tidectl("chat", "?", "--no-stream", "--url", server.url).stderr == "4 prompt tokens\n"


def test_an_error_in_the_stream_ends_it(tidectl: Tidectl, server: Canned) -> None:
    server.events = [*server.chunks({"content": "Ei"})[:1], {"error": {"message": "rank 1 died"}}]
    ran = tidectl("chat", "?", "--url", server.url)
    assert (ran.exit_code, ran.stdout) == (70, "Ei\n")
    assert "rank 1 died" in ran.stderr


def test_a_stream_that_ends_early_is_an_error(tidectl: Tidectl, server: Canned) -> None:
    server.events, server.cut = server.chunks({"content": "Ei"})[:1], True
    ran = tidectl("chat", "?", "--url", server.url)
    assert ran.exit_code == 70
    assert "ended before it was complete" in ran.stderr


def test_waiting_for_a_lane_is_told_until_the_answer_begins(
    tidectl: Tidectl, server: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "EVERY_S", 0.01)
    enough, queues = threading.Event(), iter([3, 3, 4, 1, 0])

    def waiting(url: str) -> int:
        assert url == server.url
        queue = next(queues, None)
        if queue is None:
            enough.set()
        return queue or 0

    monkeypatch.setattr(patience, "_waiting", waiting)
    server.answers_when, server.events = lambda: enough.wait(20), server.chunks({"content": "8"})
    ran = tidectl("chat", "?", "--url", server.url)
    assert ran.stdout == "8\n"
    assert ran.stderr == f"waiting for a lane (2 before you)\nwaiting for a lane (0 before you)\n{LINE}\n"


def test_how_many_wait_is_asked_of_the_server(server: Canned) -> None:
    server.health = (200, {"queue": 3})
    assert patience._waiting(server.url) == 3
    server.health = (200, {"queue": "x"})
    assert patience._waiting(server.url) == 0
    assert patience._waiting("http://127.0.0.1:1") == 0


def test_no_server_is_not_running(tidectl: Tidectl, server: Canned) -> None:
    ran = tidectl("chat", "?", "--url", "http://127.0.0.1:1")
    assert ran.exit_code == 3
    assert "tidectl start" in ran.stderr


def test_a_silent_server_is_given_up(tidectl: Tidectl, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(http, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ran = tidectl("chat", "?", "--url", f"127.0.0.1:{silent.getsockname()[1]}")
    assert ran.exit_code == 69
    assert "has sent nothing for 0.05 s" in ran.stderr


@pytest.mark.parametrize("status", [400, 429])
def test_a_conversation_remembers_and_outlives_a_refusal(
    server: Canned, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    questions = iter(["One?", "", "Two?", "Three?"])
    answers: Any = iter(
        [(200, server.chunks({"content": "1"})), (status, None), (200, server.chunks({"content": "3"}))]
    )

    def ask(_prompt: str) -> str:
        question = next(questions, None)
        if question is None:
            raise EOFError
        if question:
            server.status, server.events = next(answers)
        return question

    monkeypatch.setattr("builtins.input", ask)
    chat.converse(chat.Server(server.url, ""), chat.Options())
    assert [message["content"] for message in server.requests[-1][2]["messages"]] == ["One?", "1", "Three?"]


def test_an_interrupted_answer_leaves_the_conversation_as_it_was(
    server: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = iter(["One?", "Two?"])
    monkeypatch.setattr("builtins.input", lambda _: next(questions))
    server.events = server.chunks({"content": "1"})
    shown = iter([KeyboardInterrupt, None, StopIteration])

    def show(_text: str) -> None:
        if action := next(shown, None):
            raise action

    monkeypatch.setattr(Screen, "show", lambda _screen, _thought, text: show(text))
    with pytest.raises(StopIteration):
        chat.converse(chat.Server(server.url, ""), chat.Options())
    assert [message["content"] for message in server.requests[-1][2]["messages"]] == ["Two?"]


def test_an_answer_cannot_steer_the_terminal(server: Canned, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(answers, "is_terminal", lambda _: True)
    server.events = server.chunks({"content": "a\x1b[2Jb\tc\nd\x07\u202e\ud800\xa0\u200d\u00e9"})
    chat.ask(chat.Server(server.url, ""), "?", chat.Options(), as_json=False)
    assert capsys.readouterr().out == "a[2Jb\tc\nd\xa0\u200d\u00e9\n"


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/tide/v1/", "https://h/tide"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_addresses(given: str, base: str) -> None:
    assert http.base_url(given) == base


@pytest.mark.parametrize("given", ["ftp://h", "http://", "http://h:99999", "http://[::1", ""])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError):
        http.base_url(given)


def test_the_local_url_of_a_server() -> None:
    assert http.local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert http.local_url("::", 1) == "http://[::1]:1"
    assert http.local_url("10.0.0.1", 1) == "http://10.0.0.1:1"


def test_half_a_character_does_not_end_an_answer(server: Canned) -> None:
    server.events = server.chunks({"content": "a\ud800b"})
    command = [sys.executable, "-m", "tidectl.main", "chat", "?", "--url", server.url]
    ran = subprocess.run(command, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, b"a?b\n")


def test_a_question_that_is_no_text(server: Canned) -> None:
    command = [sys.executable, "-m", "tidectl.main", "chat", "--url", server.url]
    ran = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=60)
    assert ran.returncode == 2
    assert b"is no UTF-8 text" in ran.stderr
    assert server.requests == []
