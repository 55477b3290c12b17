"""What a rank leaves behind when it ends by a fault."""

import json
import threading

from engine_fakes import SWAPS, Bench, FakePilot, request

from tided.control.messages import Admission, Decode, Prefill, Recall, Restore, Step
from tided.engine.flight import STEPS, Flight, flight_path


def run(bench: Bench) -> None:
    thread = threading.Thread(target=bench.engine.run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failing(tmp_path, raise_at=14) -> Bench:
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    bench.engine.flight.path = flight_path(tmp_path, 0)
    bench.submit(request("a", prompt=9, max_tokens=30))
    bench.model.raise_at = raise_at
    return bench


def test_the_last_steps_are_written_when_a_step_fails(tmp_path):
    bench = failing(tmp_path)
    run(bench)
    path = tmp_path / "flight-0.jsonl"
    *steps, fault = lines(path)
    assert [step["seq"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["work"] for step in steps] == ["prefill"] * 2 + ["decode"] * 5
    assert [step["done"] for step in steps] == [True] * 6 + [False]  # the one that failed
    assert "the disk is gone" in fault["fault"]
    assert (steps[0]["admit"][0]["request"], steps[0]["admit"][0]["prompt_tokens"]) == ("a", 9)
    assert steps[2]["load"] == [[1, [0, 7], [0, 0]], [2, [1, 6], [1, 1]]]
    assert steps[3]["publish"] == [1, 2]
    assert (steps[3]["generation"], "load" in steps[1], steps[3]["digest"] != "") == (1, False, True)
    assert set(steps[0]["ms"]) == {"change", "work", "books"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def shown(step: Step) -> dict:
    flight = Flight()
    flight.begin(step)
    return flight.lines()[0]


def test_a_step_of_drafts_says_how_many_rows_it_computes_and_whose():
    step = shown(Step(1, 0, work=Decode([3, 1], drafts=[4, 2], propose=True)))
    assert (step["rows"], step["lanes"], step["drafts"], step["propose"]) == (8, [3, 1], [4, 2], True)
    plain = shown(Step(1, 0, work=Decode([3, 1])))
    assert (plain["rows"], "drafts" in plain, "propose" in plain) == (2, False, False)
    prompt = shown(Step(1, 0, work=Prefill(2, 512, 256, propose=True)))
    assert (prompt["rows"], prompt["lanes"], prompt["start"], prompt["propose"]) == (256, [2], 512, True)


def test_what_happens_to_contexts_is_in_it_and_what_does_not_happen_is_not():
    recalls = [Recall(7, ["a" * 64, "b" * 64]), Recall(8, lane=3)]
    contexts = {"park": [1], "resume": [2], "forget": [5, 6], "save": [4]}
    step = shown(Step(1, 0, **contexts, recall=recalls, admit=[Admission(0, request("a"), Restore(9, 128))]))
    assert {name: step[name] for name in contexts} == contexts
    assert step["recall"] == [[7, 2, -1], [8, 0, 3]]
    assert step["admit"][0]["restore"] == [9, 128]
    empty = shown(Step(1, 0, admit=[Admission(0, request("a"))]))
    assert not {*contexts, "recall"} & set(empty)
    assert "restore" not in empty["admit"][0]


def test_no_token_is_in_it(tmp_path):
    bench = failing(tmp_path)
    run(bench)
    text = (tmp_path / "flight-0.jsonl").read_text()
    assert str(request("a", prompt=9).prompt_ids)[1:-1] not in text
    assert not any(name in text for name in ("prompt_ids", 'tokens": [', "sampling"))


def test_only_the_last_steps_are_kept(tmp_path):
    bench = failing(tmp_path, raise_at=350)
    bench.submit(request("b", prompt=9, max_tokens=380))
    run(bench)
    *steps, _ = lines(tmp_path / "flight-0.jsonl")
    assert len(steps) == STEPS
    assert steps[-1]["seq"] - steps[0]["seq"] == STEPS - 1


def test_a_rank_that_ends_in_order_writes_nothing(tmp_path):
    bench = Bench()
    bench.engine.flight.path = flight_path(tmp_path, 0)
    bench.submit(request("a"))
    bench.finish()
    bench.engine.close("done")
    run(bench)
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_once_and_a_full_disk_hides_no_fault(tmp_path, caplog):
    bench = failing(tmp_path / "missing")
    run(bench)
    assert "the disk is gone" in bench.faults[0].what
    assert "flight recorder cannot be written" in caplog.text
    flight = Flight(tmp_path / "f.jsonl")
    flight.begin(bench.link.sent[0])
    flight.dump("first")
    flight.dump("second")
    assert lines(tmp_path / "f.jsonl")[-1] == {"fault": "first"}
