"""Prompts that are scored: their own tokens' log probabilities, as the model gives them one after the other."""

import pytest
import torch
from engine_fakes import LIMITS, Bench, FakePilot, request
from msgspec.structs import replace
from real_pair import GLM, GOLDEN, Served, opened
from test_caches import LONG, PROMPT, RAM, ask, model

from tided.engine.build import build_rank
from tided.engine.offline import first_pairs, teacher_forced
from tided.engine.scheduler import Limits
from tided.engine.score import SCORED_ROWS
from tided.engine.types import Scored, Tokens
from tided.errors import RequestError
from tided.models.parallel import Alone


def limits(**changes) -> Limits:
    return Limits(**({name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__} | changes))


def scored(request, top: int = 0):
    return replace(request, scored=True, scored_top=top)


def scores(events, name: str) -> list:
    return [one for event in events if isinstance(event, Scored) and event.request_id == name for one in event.logprobs]


@pytest.mark.parametrize("chunk", [1, 8, 64, 500])
def test_every_token_but_the_first_is_told_before_the_answer_whatever_the_chunk(chunk):
    bench = Bench(limits=limits(chunk_tokens=chunk))
    asked = request("a", prompt=150)
    bench.submit(scored(asked, 2))
    bench.finish()
    told = scores(bench.events, "a")
    assert [one.token_id for one in told] == asked.prompt_ids[1:]
    assert all(len(one.top) == 2 and one.top[0][1] >= one.logprob for one in told)
    kinds = [type(event) for event in bench.events if isinstance(event, Scored | Tokens)]
    assert kinds == sorted(kinds, key=lambda kind: kind is Tokens)
    plain = Bench(limits=limits(chunk_tokens=chunk))
    plain.submit(asked)
    plain.finish()
    assert bench.tokens("a") == plain.tokens("a")
    assert scores(plain.events, "a") == []
    # The chunks are those of any prompt; logits of a whole chunk are memory, so fewer rows are there at once.
    assert [one for one in bench.model.calls if one[0] != "head"] == plain.model.calls
    assert max(rows for kind, rows in bench.model.calls if kind == "head") <= min(chunk, SCORED_ROWS)


@pytest.mark.parametrize("ring", [0, 2])
def test_nobody_learns_from_a_prompt_that_leaves_the_experts_alone(ring):
    """No vote, no plan, no hot read; beside it others do as if it were not there."""
    quiet = replace(scored(request("quiet", prompt=40, max_tokens=1)), adapts=False)
    pilot = FakePilot()
    bench = Bench(pilot=pilot, ring_slots=ring)
    bench.submit(quiet)
    bench.finish()
    assert len(scores(bench.events, "quiet")) == 39
    assert {what for what, _ in pilot.told} <= {"idle"}
    assert not any(step.change for step in bench.link.sent)
    assert bench.engine.executor.tap.take_wanted().rows.sum() == 0
    bench.submit(replace(quiet, request_id="loud", adapts=True))
    bench.finish()
    assert [what for what, _ in pilot.told if what != "idle"] == ["prompt", "request"]
    assert any(step.change for step in bench.link.sent) == bool(ring)


@pytest.mark.parametrize("changes", [{"max_tokens": 2}, {"scored": False}], ids=str)
def test_an_answer_always_counts(changes):
    quiet = replace(scored(request("quiet", max_tokens=1)), adapts=False)
    with pytest.raises(RequestError, match="leave the experts alone"):
        Bench().submit(replace(quiet, **changes))


@pytest.mark.parametrize("path", [GOLDEN, GLM], ids=["deepseek", "glm"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exact_scores_at_a_small_budget_are_those_of_all_experts(path, ranks):
    asked = [scored(replace(ask(name, PROMPT[:90], 1), fidelity=name), 3) for name in ("fast", "exact")]
    total = {GOLDEN: 80, GLM: 64}[path]
    whole = Served(opened(1, path=path, resident=total), asked[:1])
    served = Served(opened(ranks, path=path, resident=total // 2), asked)
    assert served.faults == []
    told = {name: scores(served.events, name) for name in ("fast", "exact")}
    wanted = scores(whole.events, "fast")
    if ranks == 1:
        assert told["exact"] == wanted
    assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(told["exact"], wanted, strict=True))
    assert any(abs(a.logprob - b.logprob) > 1e-2 for a, b in zip(told["fast"], wanted, strict=True))


def test_a_bounded_replay_scores_the_same():
    asked = scored(ask("a", LONG, 1), 2)
    bounded, full = (Served(model(1, chunk=200, replay=replay), [asked]) for replay in ("bounded", "full"))
    assert scores(bounded.events, "a") == scores(full.events, "a")
    assert len(scores(full.events, "a")) == len(LONG) - 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_they_are_the_models_own_and_touch_no_cache(ranks):
    """A cached prefix would leave out what is to be told; what scoring computes, in chunks of its own, is not kept."""
    first, plain = scored(ask("scored first", LONG)), ask("plain", LONG)
    again, last = scored(ask("scored again", LONG)), ask("last", LONG)
    served = Served(model(ranks, chunk=200, prefix_ram_bytes=RAM), [first, plain, again, last])
    assert served.faults == []
    cached = [served.stats(name)["cached_tokens"] for name in ("scored first", "plain", "scored again", "last")]
    assert cached == [0, 0, 0, len(LONG)]
    told = scores(served.events, "scored first")
    assert [one.token_id for one in told] == LONG[1:]
    assert told == scores(served.events, "scored again")
    assert served.tokens("scored first") == served.tokens("plain")
    opened = model(1, chunk=200)
    rank = build_rank(opened, Alone(), first_pairs(opened), lambda *_: None)
    logits = teacher_forced(rank.model, torch.tensor(LONG), 0, 200)
    wanted = torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(LONG) - 1), LONG[1:]]
    worst = max(abs(one.logprob - value) for one, value in zip(told, wanted.tolist(), strict=True))
    assert worst < 1e-5
    rank.close()


def test_another_salt_is_another_cache():
    salted = [
        replace(ask(name, LONG), cache_salt=salt) for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", ""))
    ]
    served = Served(model(prefix_ram_bytes=RAM), salted)
    assert [served.stats(name)["cached_tokens"] for name in "abcd"] == [0, 0, len(LONG), 0]
