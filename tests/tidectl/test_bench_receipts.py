"""What makes a receipt worth anything: each part of it is there, is the server's own, and is missed when it differs."""

import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from tests.tidectl.canned import Canned, Tidectl
from tidectl import bench_command
from tidectl.bench import receipt, table, verify
from tidectl.bench.receipt import CaseResult, Group, Measured, Server
from tided.errors import DataError
from tided.guard import code_digest, machine

WORDS = ("Hello", " there", ", you")
STATS = {
    "fidelity": "fast", "substituted_weight_share": 0.0321, "nvme_gb": 1.5, "spec": {"accept_len_mean": 2.5},
    "experts": {"resident": 312, "total": 480}, "prefix": {"from": "none"}, "ttft_s": 0.25, "decode_tok_s": 31.26,
}  # fmt: skip
HEALTH = {
    "engine": "tidelm", "model": "mini", "profile": "pair", "generation": 3, "overlay": None,
    "build": {"tidelm": "1", "code": "ab", "torch": "2.13"}, "machine": {"device": "GB10", "cores": 20},
    "checkpoint": {"identity": "cd"}, "engine_config": {"experts": {"resident": 312}},
    "engine_policy": {"tide": {"sensitivity": "high", "record": False}},
}  # fmt: skip
ONE = ("--tokens", "8", "--prompt-tokens", "100", "--repeat", "1", "--case", "prose")


@pytest.fixture
def tide(server: Canned, monkeypatch: pytest.MonkeyPatch) -> Canned:
    """A TideLM, whose residents have moved once more behind each answer."""
    server.events = answer(*WORDS)
    server.health = (200, json.loads(json.dumps(HEALTH)))
    server.answers_when = lambda: server.health[1].update(generation=server.health[1]["generation"] + 1)
    return server


def answer(*words: str) -> list[Any]:
    events = Canned.chunks(*({"content": word} for word in words), finish_reason="length")
    events[-2]["x_engine_stats"] = STATS | {"of": "no figure"}
    return events


def test_a_receipt_holds_what_the_server_is_before_and_after(tidectl: Tidectl, tide: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert tidectl("bench", "--url", tide.url, "--receipt", str(path), *ONE).exit_code == 0
    found = receipt.read(path)
    assert found.server == Server(tide.url, HEALTH, HEALTH | {"generation": 3 + 2 + 1})
    assert found.build["code"] == code_digest()
    assert (found.machine.cores, found.machine.python) == (machine()["cores"], platform.python_version())
    assert found.machine.load >= 0


def test_of_another_server_nothing_is_told(tidectl: Tidectl, tide: Canned, tmp_path: Path) -> None:
    tide.health = (200, HEALTH | {"engine": "another"})
    tide.answers_when = lambda: None
    path = tmp_path / "r.json"
    assert tidectl("bench", "--url", tide.url, "--receipt", str(path), *ONE).exit_code == 0
    assert receipt.read(path).server == Server(tide.url, {}, {})


def test_a_receipt_holds_what_each_answer_was_and_cost(tidectl: Tidectl, tide: Canned, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    tidectl("bench", "--url", tide.url, "--receipt", str(path), *ONE)
    [[[group]]] = [case.repetitions for case in receipt.read(path).cases]
    [found] = group.requests
    assert found.sha256 == hashlib.sha256("".join(WORDS).encode()).hexdigest()
    assert found.stats == STATS
    assert (found.prompt_tokens, found.tokens, found.counted, found.finish_reason) == (11, 5, True, "length")
    assert found.ttft_s > 0
    assert group.wall_s >= found.ttft_s + found.decode_s - 1e-5


@pytest.mark.parametrize("by", ["option", "environment"])
def test_the_key_is_sent_with_every_question_and_kept_nowhere(
    tidectl: Tidectl, tide: Canned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    path, given = tmp_path / "r.json", ["--api-key", "sesame"] if by == "option" else []
    if by == "environment":
        monkeypatch.setenv("TIDE_API_KEY", "sesame")
    assert tidectl("bench", "--url", tide.url, "--receipt", str(path), *given, *ONE).exit_code == 0
    assert {headers.get("Authorization") for _, headers, _ in tide.requests} == {"Bearer sesame"}
    assert "sesame" not in path.read_text()
    tide.requests.clear()
    tidectl("bench", "verify", str(path), "--url", tide.url, *given, "--tolerance", "1000")
    assert {headers.get("Authorization") for _, headers, _ in tide.requests} == {"Bearer sesame"}


def test_each_figure_of_the_table_is_in_its_column() -> None:
    one = Measured(20, 0, 5, True, 0.5, 2.0, 2.0, "length", "ab", stats=STATS)
    two = Measured(22, 0, 7, True, 0.4, 2.0, 3.0, "length", "cd", stats=STATS | {"substituted_weight_share": 0.0479})
    runs = [[Group([one], 3.0)], [Group([two], 3.0)]]
    assert dict(zip(table.COLUMNS, *table.rows(CaseResult("prose", runs, receipt.summarise(runs))), strict=True)) == {
        "case": "prose",
        "tok/s": "2.5 (2.0 to 3.0)",
        "all tok/s": "",
        "first token": "0.450 s (0.400 to 0.500)",
        "prompt tok/s": "48 (40 to 55)",
        "prompt": "20 to 22",
        "answer": "5 to 7",
        "substituted": "4.00 %",
        "accepted": "2.50",
    }
    [row] = table.rows(CaseResult("streams", [[Group([one, two], 4.0)]], receipt.summarise([[Group([one, two], 4.0)]])))
    assert row[2] == "3.0 (3.0 to 3.0)"


def test_a_replay_that_says_other_words_on_another_server_is_told(
    tidectl: Tidectl, tide: Canned, tmp_path: Path
) -> None:
    path, again = tmp_path / "r.json", ("--tolerance", "1000", "--json")
    tidectl("bench", "--url", tide.url, "--receipt", str(path), *ONE, "--case", "prefix")
    same = json.loads(tidectl("bench", "verify", str(path), "--url", tide.url, *again).stdout)
    assert same["differs"] == []
    assert [(row["same"], row["answers"]) for row in same["verdicts"]] == [(1, 1), (2, 2)]
    tide.events = answer(*WORDS, " all")
    tide.health[1]["build"]["code"] = "ba"
    tide.health[1]["engine_policy"]["tide"]["record"] = True
    other = json.loads(tidectl("bench", "verify", str(path), "--url", tide.url, *again).stdout)
    assert other["differs"] == ["build", "policy"]
    assert [(row["same"], row["answers"]) for row in other["verdicts"]] == [(0, 1), (0, 2)]
    shown = tidectl("bench", "verify", str(path), "--url", tide.url, "--tolerance", "1000")
    assert "0 of 2" in shown.stdout
    assert "not the same as then: build, policy" in shown.stderr


def test_one_answer_of_two_that_is_another_is_counted() -> None:
    from tidectl.bench.verify import judge

    def case(*texts: str) -> CaseResult:
        runs = [[Group([Measured(9, 0, 5, True, 0.5, 2.0, 2.0, "length", text)], 3.0)] for text in texts]
        return CaseResult("prose", runs, receipt.summarise(runs))

    assert judge(case("a", "b"), case("a", "c")).same == 1


def resealed(path: Path, body: dict[str, Any]) -> Path:
    """`body` under a digest that fits, if it can have one."""
    with suppress(msgspec.ValidationError, TypeError):  # refused before its digest is looked at
        body["digest"] = receipt.digest_of(msgspec.convert(body, receipt.Receipt))
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def whole(tidectl: Tidectl, tide: Canned, tmp_path: Path) -> dict[str, Any]:
    """Of two cases, twice each, one of them in two groups."""
    path = tmp_path / "whole.json"
    made = ("--tokens", "8", "--prompt-tokens", "100", "--repeat", "2", "--case", "code", "--case", "prefix")
    assert tidectl("bench", "--url", tide.url, "--receipt", str(path), *made).exit_code == 0
    body: dict[str, Any] = json.loads(path.read_text())
    return body


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body.update(settings={}), "is no receipt"),
        (lambda body: body["settings"].update(repetitions="two"), "is no receipt"),
        (lambda body: body["settings"].update(streams=10**9), "is no receipt"),
        (lambda body: body["settings"].update(fidelity="exact\n"), "is no receipt"),
        (lambda body: body["server"].pop("before"), "is no receipt"),
        (lambda body: body["server"].update(before=[]), "is no receipt"),
        (lambda body: body["machine"].pop("load"), "is no receipt"),
        (lambda body: body["cases"][0].update(name="poem"), r"a case that is not known here \(poem\)"),
        (lambda body: body["settings"]["cases"].append("poem"), r"a case that is not known here \(poem\)"),
        (
            lambda body: body["cases"][0].update(name="prose"),
            r"name other cases \(code, prefix\) than it holds \(prose, ",
        ),
        (lambda body: body["cases"].pop(), "name other cases"),
        (lambda body: body.update(cases=[]), "name other cases"),
        (lambda body: (body.update(cases=[]), body["settings"].update(cases=[])), "is no receipt"),
        (lambda body: body["settings"].update(repetitions=3), "code, prefix: there are other runs than its settings"),
        (lambda body: body["cases"][1].update(repetitions=[]), "figures of prefix do not follow"),
        (lambda body: body["cases"][1].update(repetitions=[], summary={}), "prefix: there are other runs"),
        (lambda body: body["cases"][1].update(repetitions=[[], []], summary={}), "prefix: there are other runs"),
        (lambda body: body["cases"][0].update(repetitions=body["cases"][0]["repetitions"][:1]), "do not follow|other"),
    ],
)
def test_a_sealed_receipt_that_does_not_fit_together_is_refused(
    tidectl: Tidectl, whole: dict[str, Any], tmp_path: Path, change: Any, told: str
) -> None:
    change(whole)
    path = resealed(tmp_path / "odd.json", whole)
    with pytest.raises(DataError, match=told):
        receipt.read(path)
    for command in (("verify", "--no-replay"), ("table",)):
        assert tidectl("bench", *command, str(path)).exit_code == DataError.exit_code


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, found in inner:
        yield from places(found, (*at, name))


def test_whatever_a_sealed_receipt_holds_it_is_refused_or_can_be_shown_and_compared(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every place in turn, with a value of each kind."""
    whole["server"]["after"] = {"uptime_s": 9.0}  # nobody reads it
    told, shown = json.dumps(whole), 0
    again = receipt.read(resealed(tmp_path / "whole.json", whole))
    for at in places(whole):
        for odd in (None, True, -1, 1e300, "two", [], {"two": [[]]}):
            body = json.loads(told)
            if not at:
                body = odd
            else:
                inside = body
                for name in at[:-1]:
                    inside = inside[name]
                inside[at[-1]] = odd
            try:
                found = receipt.read(resealed(tmp_path / "odd.json", body))
            except DataError:
                continue
            table.show(found)
            table.markdown([("odd", found)])
            verify.differences(found, again)
            assert verify.options_of(found).cases == ["code", "prefix"]
            assert len([verify.judge(one, two) for one, two in zip(found.cases, again.cases, strict=True)]) == 2
            shown += 1
    assert shown > 100
    capsys.readouterr()


def test_a_file_that_is_nested_without_an_end_is_no_receipt(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"server": ' + '{"before": ' * 9000)
    with pytest.raises(DataError, match="is no receipt"):
        receipt.read(tmp_path / "deep.json")


def test_what_the_command_takes_a_receipt_may_hold() -> None:
    hints = get_type_hints(bench_command.run, include_extras=True)
    most = {name: hints[name].__metadata__[0].max for name in ("streams", "repeat")}
    assert most == {"streams": receipt.MOST_STREAMS, "repeat": receipt.MOST_RUNS}
