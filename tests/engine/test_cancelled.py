"""A request is cancelled wherever it stands: waiting, while its prefix is looked for, inside its prompt, in a drafted
block, parked, while it comes back. The next is answered as if nothing had been, and so is the one beside it (C5)."""

import random
import threading
import time

import pytest
from msgspec.structs import replace
from real_pair import Living
from small_model import CONTEXT, IDS, Small, small_model, small_of, small_pages
from test_drafted_answers import Prompter

from tided.engine.types import Finished, Request, Sampling

POINTS = 12
KINDS = ["waiting", "asked", "prompt", "drafted", "parked", "recalling", "running"]
CACHES = {"prefix_ram_bytes": 1 << 22, "prefix_disk_bytes": 1 << 23}


@pytest.fixture(scope="module")
def checkpoint(mini, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        yield small_of(mini, tmp_path_factory.mktemp("small"))


def ask(name: str, tokens: int, answer: int, **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_ids=random.Random(name).choices(range(3, IDS), k=tokens),
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=answer,
        stop_ids=(),
    )


OLDER = ask("older", 9, 44, temperature=1.0, seed=4)
VICTIM = ask("victim", 47, 40)
NEXT = (ask("greedy", 21, 12), ask("seeded", 40, 12, temperature=0.8, seed=5), replace(VICTIM, max_tokens=12))


class Gate:
    """Holds what readers were asked for while it is closed."""

    def __init__(self, served: Living) -> None:
        self.open = threading.Event()
        self.open.set()
        for rank in served.ranks:
            background = rank.executor.caching.background
            background.read = self._held(background.read)

    def _held(self, read):
        return lambda job: read(lambda: (self.open.wait(60), job()))


def stands(served: Living, name: str, point: str, count: int) -> bool:
    """Whether the request is where it is to be cancelled, with `count` tokens drawn where it draws."""
    scheduler, executor = served.engine.scheduler, served.ranks[0].executor
    running = next((lane for lane in scheduler.running.values() if lane.request.request_id == name), None)
    if running is None:
        return point == "waiting" or (point == "asked" and scheduler.recalls.pending > 0)
    asked = running.lane in scheduler.recalls._lanes
    return {
        "prompt": running.in_prefill and running.computed > count,
        "drafted": running.drawn > count and bool(executor.lanes[running.lane].drafts),
        "parked": running.parked and not asked,
        "recalling": running.parked and asked,
        "running": running.drawn >= count,
    }.get(point, False)


def turn_until(served: Living, name: str, point: str, count: int = 0) -> None:
    deadline_s = time.monotonic() + 60
    while not stands(served, name, point, count):
        served.turn()
        assert served.end(name) is None, f"it never stood where it is to be cancelled: {point}"
        assert time.monotonic() < deadline_s, point


def alone(checkpoint: Small, ranks: int) -> dict[str, list[int]]:
    served = Living(small_model(checkpoint, ranks=ranks, lanes=1))
    for request in (OLDER, VICTIM, *NEXT[:2]):
        served.submit(request)
        served.rest()
    served.close()
    return {name: served.tokens(name) for name in ("older", "victim", "greedy", "seeded")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_cancellation_anywhere_all_goes_on_as_ever(checkpoint, ranks, tmp_path):
    chance = random.Random(ranks)
    expected, requests, answers = alone(checkpoint, ranks), [], {}

    def prompted(living: Living) -> None:
        for rank in living.ranks:
            rank.executor.model = Prompter(rank.model, requests, answers)

    model = small_model(checkpoint, ranks=ranks, lanes=2, draft="5", pool_tokens=CONTEXT, **CACHES)
    served = Living(model, prepare=prompted, cache_dir=tmp_path)
    gate = Gate(served)

    def submit(request: Request, name: str) -> Request:
        named = replace(request, request_id=name)
        requests.append(named)
        answers[name] = expected[request.request_id]
        served.submit(named)
        return named

    def told(request: Request, name: str) -> bool:
        tokens, whole = served.tokens(request.request_id), expected[name]
        return tokens == whole[: len(tokens)] and bool(served.end(request.request_id))

    submit(VICTIM, "kept")
    served.rest()
    for number, point in enumerate(KINDS + chance.choices(KINDS, k=POINTS - len(KINDS))):
        older = submit(OLDER, f"older {number}")
        turn_until(served, older.request_id, "running", 1)
        if point == "asked":
            gate.open.clear()
        prompt = [3 + number, *VICTIM.prompt_ids[1:]]  # which no cache holds
        victim = submit(VICTIM if point == "asked" else replace(VICTIM, prompt_ids=prompt), f"victim {number}")
        if point == "recalling":
            turn_until(served, victim.request_id, "parked")
            gate.open.clear()
        turn_until(served, victim.request_id, point, chance.randrange(8))
        served.cancel(victim.request_id)
        gate.open.set()
        following = chance.choice(NEXT)
        last = submit(following, f"next {number}")
        served.rest()
        served.check()
        assert served.end(victim.request_id).reason == "cancelled", point
        assert told(older, "older"), point
        assert told(last, following.request_id), point
        assert len(served.tokens(last.request_id)) == last.max_tokens
    served.close()
    for rank in served.ranks:
        rank.close()
    assert served.faults == []
    assert sum(isinstance(event, Finished) for event in served.events) == 1 + 3 * POINTS
    assert sum(served.stats(request.request_id)["spec"]["accepted"] for request in requests) > 10 * POINTS
    assert not list(tmp_path.rglob("*.context"))
