"""What runs in the background delays nobody, and nothing of it is lost while others need neither its lane nor its
pages."""

import pytest
from engine_fakes import LAYERS, LIMITS, Bench, FakePilot, request
from msgspec.structs import replace

from tided.engine.scheduler import Limits
from tided.engine.types import Failed, Finished, Scored, Tokens
from tided.errors import RequestError


def behind(name: str = "behind", prompt: int = 40, **changes):
    asked = replace(request(name, prompt=prompt, max_tokens=1), scored=True, background=True)
    return replace(asked, **changes)


def bench(pilot=None, **changes) -> Bench:
    names = {name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__}
    # Prompts need not wait for answers: nothing hangs on a clock.
    return Bench(pilot=pilot, limits=Limits(**(names | {"prefill_share": 0.99} | changes)))


def scores(held: Bench, name: str = "behind") -> int:
    return sum(len(e.logprobs) for e in held.events if isinstance(e, Scored) and e.request_id == name)


def steps_to_answer(held: Bench, *asked) -> int:
    """Steps from the submission to the end of all of these."""
    before = len(held.link.sent)
    held.submit(*asked)
    while {one.request_id for one in asked} - {e.request_id for e in held.events if isinstance(e, Finished)}:
        assert held.engine.turn(), "nothing is left to do, and a request is open"
    return len(held.link.sent) - before


LIVE = [request("live", prompt=20, max_tokens=6, temperature=1.0, seed=3), request("other", prompt=9, max_tokens=4)]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2])
def test_a_request_takes_as_many_steps_as_if_there_were_no_background(lanes, before, count):
    plain, beside = bench(lanes=lanes), bench(lanes=lanes)
    wanted = steps_to_answer(plain, *LIVE[:count])
    beside.submit(behind())
    beside.turn(before)
    assert scores(beside) == 8 * (before // LAYERS)
    assert steps_to_answer(beside, *LIVE[:count]) == wanted
    for one in LIVE[:count]:
        assert beside.tokens(one.request_id) == plain.tokens(one.request_id)
    beside.finish()
    ends = [e for e in beside.events if isinstance(e, Finished) and e.request_id == "behind"]
    assert len(ends) == 1
    # With a lane to spare it went on where it stood; else its lane was somebody's, and it ended without a result.
    if lanes > count or not before:
        assert (ends[0].reason, scores(beside)) == ("length", 39)
    else:
        assert ends[0].reason == "cancelled"
    assert beside.faults == []


def test_pages_that_are_needed_are_given_back():
    held = bench(lanes=2, pool_tokens=60, context_tokens=60, park_tokens=60, page_tokens=1)
    held.submit(behind(prompt=30))
    held.turn(2)
    held.submit(request("live", prompt=45, max_tokens=3))
    held.finish()
    assert len(held.tokens("live")) == 3
    assert held.end("behind").reason == "cancelled"
    assert held.end("live").stats["parked"] == 0


def test_pages_that_an_answer_grows_into_are_given_back():
    """It fits beside the background at first; later it does not, and is not parked for it."""
    held = bench(lanes=2, pool_tokens=60, context_tokens=60, park_tokens=60, page_tokens=1)
    held.submit(behind(prompt=30))
    held.turn(3 * LAYERS + 1)
    held.submit(request("live", prompt=10, max_tokens=40))
    held.turn(8)
    assert len(held.engine.scheduler.running) == 2
    held.finish()
    assert len(held.tokens("live")) == 40
    assert held.end("live").stats["parked"] == 0
    assert held.end("behind").reason == "cancelled"


def test_what_gave_way_does_not_vote_and_what_ended_does():
    pilot = FakePilot()
    held = bench(pilot, lanes=1)
    held.submit(behind())
    held.turn(2)
    held.submit(request("live", prompt=4, max_tokens=2))
    held.finish()
    assert [what for what, _ in pilot.told if what != "idle"] == ["prompt", "request"]
    held.submit(behind("again"))
    held.finish()
    assert [what for what, _ in pilot.told if what != "idle"] == ["prompt", "request"] * 2


def test_the_figures_are_of_those_that_somebody_asked():
    plain, beside = bench(), bench()
    beside.submit(behind())
    beside.finish()
    for held in (plain, beside):
        held.submit(*LIVE)
        held.finish()
    of = [(held.engine.ledger.routed(), held.engine.ledger.answer_tokens) for held in (plain, beside)]
    assert of[0] == of[1]
    assert of[0][1] == 10
    assert [held.engine.traces.newest.request_id in ("live", "other") for held in (plain, beside)] == [True, True]


def test_there_is_one_at_a_time_and_it_can_be_cancelled():
    held = bench()
    held.submit(behind("a"), behind("b"))
    held.finish()
    assert [type(e) for e in held.events if getattr(e, "request_id", "") == "b"] == [Failed]
    assert held.end("a").reason == "length"
    held.submit(behind("c"))
    held.turn(2)
    held.cancel("c")
    assert held.end("c").reason == "cancelled"
    held.submit(request("live", max_tokens=9))
    held.turn(2)
    held.submit(behind("d"))
    held.turn()
    held.cancel("d")
    assert held.end("d").reason == "cancelled"
    held.finish()
    assert len(held.tokens("live")) == 9


@pytest.mark.parametrize("changes", [{"max_tokens": 2}, {"scored": False}, {"redrawn_from": 40}], ids=str)
def test_only_what_is_scored_runs_behind(changes):
    with pytest.raises(RequestError):
        bench().submit(behind(**changes))


DRAWS = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 2, "top_p": 0.8},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {3: 2.0, 4: -100}, "temperature": 1.0},
]


@pytest.mark.parametrize("sampling", DRAWS, ids=str)
def test_an_answer_is_drawn_again_as_it_was_drawn(sampling):
    """The same logits give the same tokens, whatever they are drawn by; and a token that is not theirs is seen."""
    held = bench()
    asked = replace(request("a", prompt=13, max_tokens=20, **sampling), min_tokens=3, stop_ids=(1,))
    held.submit(asked)
    held.finish()
    answer = held.tokens("a")
    again = replace(asked, request_id="again", prompt_ids=[*asked.prompt_ids, *answer], max_tokens=1, scored=True,
                    background=True, redrawn_from=13)  # fmt: skip
    held.submit(again)
    held.finish()
    redrawn = [token for e in held.events if isinstance(e, Scored) for token in e.redrawn]
    assert redrawn == answer
    changed = [*asked.prompt_ids, *answer[:5], (answer[5] + 1) % 9, *answer[6:]]
    held.events.clear()
    held.submit(replace(again, request_id="changed", prompt_ids=changed))
    held.finish()
    redrawn = [token for e in held.events if isinstance(e, Scored) for token in e.redrawn]
    assert redrawn[:6] == answer[:6]
    assert len(redrawn) == len(answer)
    assert not any(isinstance(e, Tokens) and len(e.token_ids) > 1 for e in held.events)
