"""`tidectl bench` against a server of canned answers: what is asked, what is measured, what a receipt is worth."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from tests.tidectl.canned import Canned, Tidectl
from tidectl.answers import read_part
from tidectl.bench import measure, receipt, run, table, verify
from tidectl.bench.cases import BY_NAME, CASES, Ask, Sizes, long_text
from tidectl.bench.receipt import CaseResult, Group, Measured, Spread
from tided.errors import DataError, TideError

WORDS = ("Hello", " there", ", you")
SMALL = ("--tokens", "8", "--prompt-tokens", "100", "--repeat", "2")


def request(**changes: object) -> Measured:
    plain = Measured(20, 0, 5, True, ttft_s=0.5, decode_s=2.0, tok_s=2.0, finish_reason="length", sha256="ab")
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def answering(server: Canned) -> Canned:
    server.events = Canned.chunks(*({"content": word} for word in WORDS))
    return server


def test_a_stream_is_timed_from_its_first_token_to_its_last() -> None:
    heard = measure._Heard()
    heard.take(read_part({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, "x"), 10.0)
    for at_s, text in ((12.0, "a"), (12.5, "b"), (14.0, "c")):
        heard.take(read_part({"choices": [{"index": 0, "delta": {"content": text}}]}, "x"), at_s)
    heard.take(read_part({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}, "x"), 15.0)
    found = measure._measured(heard, 9.0)
    assert (found.ttft_s, found.decode_s, found.tokens, found.tok_s) == (3.0, 2.0, 9, 4.0)
    assert (found.prompt_tokens, found.cached_tokens, found.counted) == (7, 0, True)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thought_counts_from_its_first_token_by_whatever_name_it_comes(name: str) -> None:
    heard = measure._Heard()
    for at_s in range(1, 100):
        heard.take(read_part({"choices": [{"index": 0, "delta": {name: "x"}}]}, "x"), float(at_s))
    heard.take(read_part({"choices": [{"index": 0, "delta": {"content": "y"}}]}, "x"), 100.0)
    heard.take(read_part({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 100}}, "x"), 100.0)
    found = measure._measured(heard, 0.0)
    assert (found.ttft_s, found.decode_s, found.tok_s) == (1.0, 99.0, 1.0)


def test_without_a_count_of_the_server_its_chunks_are_counted_and_that_is_said() -> None:
    heard = measure._Heard()
    for at_s in (1.0, 2.0, 3.0):
        heard.take(read_part({"choices": [{"index": 0, "delta": {"reasoning_content": "x"}}]}, "x"), at_s)
    found = measure._measured(heard, 0.0)
    assert (found.tokens, found.counted, found.tok_s) == (3, False, 1.0)


def test_it_asks_as_the_protocol_says(tidectl: Tidectl, answering: Canned, tmp_path: Path) -> None:
    ran = tidectl("bench", "--url", answering.url, "--receipt", str(tmp_path / "r.json"), *SMALL, "--seed", "40")
    assert ran.exit_code == 0, ran.stderr
    bodies = [body for path, _, body in answering.requests if path == "/v1/chat/completions"]
    assert len(bodies) == 2 + 3 * 2  # two to warm up, three cases twice
    assert {(body["temperature"], body["ignore_eos"], body["stream"]) for body in bodies} == {(0.6, True, True)}
    assert [body["seed"] for body in bodies[2:]] == [40, 41] * 3
    assert [body["max_tokens"] for body in bodies[2:]] == [8, 8, 8, 8, 16, 16]
    assert [line.split()[0] for line in ran.stdout.splitlines()[3:] if line.strip()] == ["prose", "code", "long-prompt"]


def test_a_receipt_has_no_text_and_adds_up(tidectl: Tidectl, answering: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert tidectl("bench", "--url", answering.url, "--receipt", str(path), *SMALL).exit_code == 0
    found = receipt.read(path)
    assert found.settings.repetitions == 2
    assert found.build["code"]
    assert [len(groups) for case in found.cases for groups in case.repetitions] == [1] * 6
    assert not any(word.strip(", ") in path.read_text() for word in ("lighthouse", "there", *WORDS))
    assert tidectl("bench", "verify", "--no-replay", str(path)).exit_code == 0
    markdown = tidectl("bench", "table", str(path)).stdout.splitlines()
    assert markdown[0].startswith("| receipt | case | tok/s")
    assert [line.split(" | ")[1] for line in markdown[2:]] == ["prose", "code", "long-prompt"]


def test_a_changed_receipt_is_refused(tidectl: Tidectl, answering: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    tidectl("bench", "--url", answering.url, "--receipt", str(path), *SMALL)
    body = json.loads(path.read_text())
    body["cases"][0]["repetitions"][0][0]["requests"][0]["tok_s"] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match="digest is another"):
        receipt.read(path)
    receipt.write(path, msgspec.convert(body, receipt.Receipt).sealed())
    with pytest.raises(DataError, match="figures of prose do not follow"):
        receipt.read(path)


def test_an_interrupt_waits_for_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()

        def interrupt() -> None:
            for _ in range(2):
                open_.append(silent.accept()[0])
            os.kill(os.getpid(), signal.SIGINT)

        open_: list[socket.socket] = []
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            measure.group(measure.Target(f"http://{address}:{port}", ""), [Ask("a", 1, 8), Ask("b", 1, 8)])
        thread.join()
        for one in open_:
            one.setblocking(False)
            assert one.recv(1 << 16)
            with pytest.raises(BlockingIOError):  # who asked still waits, and nobody for that
                one.recv(1)
            one.close()


@pytest.mark.parametrize("odd", ["no request", "no time"])
def test_figures_that_follow_from_nothing_are_refused(
    tidectl: Tidectl, answering: Canned, tmp_path: Path, odd: str
) -> None:
    path = tmp_path / "r.json"
    tidectl("bench", "--url", answering.url, "--receipt", str(path), *SMALL)
    body = json.loads(path.read_text())
    group = body["cases"][0]["repetitions"][0][0]
    if odd == "no request":
        group["requests"] = []
    else:
        group["wall_s"] = 0.0
    receipt.write(path, msgspec.convert(body, receipt.Receipt).sealed())
    with pytest.raises(DataError, match="figures of prose do not follow"):
        receipt.read(path)


def test_verify_makes_the_same_requests_again(tidectl: Tidectl, answering: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    tidectl("bench", "--url", answering.url, "--receipt", str(path), *SMALL, "--case", "prose", "--case", "prefix")
    before = [body for _, _, body in answering.requests if body]
    ran = tidectl("bench", "verify", str(path), "--url", answering.url, "--tolerance", "1000", "--json")
    assert [body for _, _, body in answering.requests if body] == before * 2
    assert [(row["case"], row["same"], row["answers"]) for row in json.loads(ran.stdout)["verdicts"]] == [
        ("prose", 2, 2),
        ("prefix", 4, 4),
    ]


@pytest.mark.parametrize(("figure", "case", "better"), [("tok_s", "prose", 4.0), ("ttft_s", "long-prompt", 0.25)])
def test_what_became_slower_is_found(figure: str, case: str, better: float) -> None:
    old = CaseResult(case, [[Group([request(**{figure: better})], 3.0)]], {figure: Spread.of([better])})
    new = CaseResult(case, [[Group([request()], 3.0)]], {figure: Spread.of([getattr(request(), figure)])})
    assert verify.judge(old, new).slower == 1.0
    assert verify.judge(new, old).slower == -0.5


def test_a_long_prompt_is_another_for_each_repetition_and_the_same_for_a_seed() -> None:
    [[one]], [[two]] = (BY_NAME["long-prompt"].turns(Sizes(), 300, repetition) for repetition in (0, 1))
    assert one.prompt.split()[:6] != two.prompt.split()[:6]
    assert one == BY_NAME["long-prompt"].turns(Sizes(), 300, 0)[0][0]
    assert len(long_text(1, 300).split()) == 300


def test_a_prefix_comes_again_with_another_last_line() -> None:
    [[one], [two]] = BY_NAME["prefix"].turns(Sizes(), 100, 0)
    assert one.prompt.splitlines()[0] == two.prompt.splitlines()[0]
    assert one.prompt != two.prompt


def test_each_case_has_its_headline_among_its_figures() -> None:
    groups = [[Group([request(), request()], 3.0)] * 3] * 2
    assert all(case.headline in receipt.summarise(groups) for case in CASES)
    assert receipt.summarise(groups)["total_tok_s_3"] == Spread.of([10 / 3])


def test_our_words_are_scaled_to_the_servers_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(_: measure.Target, ask: Ask) -> tuple[Measured, float, float]:
        return request(prompt_tokens=30 + 2 * len(ask.prompt.split())), 0.0, 1.0

    monkeypatch.setattr(run.measure, "one", one)
    assert run._warm(measure.Target("", ""), Sizes(prompt_tokens=8192)) == (8192 - run.ROOM_TOKENS) // 2


def test_what_does_not_fit_is_refused_before_anything_is_asked(tidectl: Tidectl, answering: Canned) -> None:
    answering.health = (200, {"data": [{"id": "m", "max_model_len": 4096}]})
    ran = tidectl("bench", "--url", answering.url, "--prompt-tokens", "8192")
    assert ran.exit_code == 2
    assert "prompts of 8,192 tokens do not fit the server's context of 4,096" in ran.stderr
    assert not [body for _, _, body in answering.requests if body]


def test_an_answer_without_text_is_an_error(answering: Canned) -> None:
    answering.events = Canned.chunks()
    with pytest.raises(TideError, match="had no text"):
        measure.one(measure.Target(answering.url, ""), Ask("x", 8, 1))


def test_sizes_that_nobody_chose_fit_the_server(tidectl: Tidectl, answering: Canned) -> None:
    answering.health = (200, {"data": [{"id": "m", "max_model_len": 4096}]})
    ran = tidectl("bench", "--url", answering.url, "--repeat", "1", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert "a context of 4,096 tokens: answers of 1,024, long prompts of 3,840" in ran.stderr
    assert json.loads(ran.stdout)["settings"]["prompt_tokens"] == 3840


@pytest.mark.parametrize("place", ["absent/r.json", ".", "there.json"])
def test_a_receipt_that_cannot_be_written_is_refused_before_anything_is_asked(
    tidectl: Tidectl, answering: Canned, tmp_path: Path, place: str
) -> None:
    (tmp_path / "there.json").write_text("{}")
    ran = tidectl("bench", "--url", answering.url, "--receipt", str(tmp_path / place), *SMALL)
    assert ran.exit_code == 2
    assert not [body for _, _, body in answering.requests if body]
    assert (tmp_path / "there.json").read_text() == "{}"


def test_a_replay_that_is_slower_says_by_how_much(tidectl: Tidectl, answering: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    tidectl("bench", "--url", answering.url, "--receipt", str(path), *SMALL, "--case", "long-prompt")
    found = receipt.read(path)
    for groups in found.cases[0].repetitions:
        groups[0].requests[0].ttft_s = 1e-5
    found.cases[0].summary = receipt.summarise(found.cases[0].repetitions)
    receipt.write(path, found.sealed())
    ran = tidectl("bench", "verify", str(path), "--url", answering.url)
    assert ran.exit_code == 1
    assert "longer than the receipt says, 15% is no failure; load now" in ran.stderr


def told(before: dict[str, object], load: float = 0.5) -> receipt.Receipt:
    settings = receipt.Settings(["prose"], 1, 8, 100, 4, 1, 9, 0.6, "", "", None)
    machine, server = receipt.Machine("Linux", "x86_64", "", 2, load, "3.11"), receipt.Server("", before, {})
    return receipt.Receipt("now", {"code": "client"}, machine, settings, server, [])


BEFORE = {
    "build": {"code": "a"}, "machine": {"device": "GB10"}, "model": "m", "checkpoint": {"identity": "c"},
    "overlay": None, "engine_policy": {"tide": {"record": False}},
    "engine_config": {"experts": {"resident": 4}, "expert_reads": {"curve": [1.0]}, "data_plane": {"sum_us": 3.0}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"uptime_s": 5.0}, []),
        ({"engine_config": BEFORE["engine_config"] | {"expert_reads": {}, "data_plane": {}}}, []),  # measured anew
        ({"build": {"code": "b"}}, ["build"]),
        ({"machine": {"device": "H200"}}, ["machine"]),
        ({"model": "n"}, ["model"]),
        ({"checkpoint": {"identity": "d"}}, ["checkpoint"]),
        ({"overlay": {"sha256": "ab"}}, ["checkpoint"]),
        ({"engine_config": {"experts": {"resident": 5}}}, ["settings"]),
        ({"engine_policy": {"tide": {"record": True}}}, ["policy"]),
    ],
)
def test_what_was_different_about_the_server_is_named(changed: dict[str, object], named: list[str]) -> None:
    assert verify.differences(told(BEFORE), told(BEFORE | changed, load=9.0)) == named


def test_of_a_server_that_tells_nothing_the_client_is_compared() -> None:
    one, other = told({}), told({})
    other.build["code"] = "another"
    assert verify.differences(one, other) == ["build", "client"]
    other.machine.cores = 4
    assert verify.differences(one, other) == ["build", "machine", "client"]


def test_the_address_is_kept_and_not_what_may_be_secret_in_it() -> None:
    assert run._shown("https://me:word@host:8000/api?key=1#x") == "https://host:8000/api"
    assert run._shown("http://[::1]:8000") == "http://[::1]:8000"


def test_a_prompt_that_was_cached_has_no_speed() -> None:
    found = [
        next(table.rows(CaseResult("prefix", [[group]], receipt.summarise([[group]]))))[4]
        for group in (Group([request(prompt_tokens=90, cached_tokens=n)], 3.0) for n in (0, 80))
    ]
    assert found == ["180 (180 to 180)", "cached"]
