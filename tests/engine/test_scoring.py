"""Prompts that are scored: their own tokens' log probabilities, as the model gives them one after the other."""

import pytest
import torch
from engine_fakes import LIMITS, Bench, request
from msgspec.structs import replace
from real_pair import Served
from test_caches import LONG, RAM, ask, model

from tided.engine.build import build_rank
from tided.engine.offline import first_pairs, teacher_forced
from tided.engine.scheduler import SCORED_TOKENS, Limits
from tided.engine.types import Scored, Tokens
from tided.errors import RequestError
from tided.models.parallel import Alone


def limits(**changes) -> Limits:
    return Limits(**({name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__} | changes))


def scored(request, top: int = 0):
    return replace(request, scored=True, logprobs=top)


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
    # Logits of a whole chunk are memory: no more rows at once than are allowed for.
    assert max(count for kind, count in bench.model.calls if kind == "prefill") <= min(chunk, SCORED_TOKENS)


def test_a_profile_that_computes_last_rows_only_refuses():
    bench = Bench(limits=limits(can_score=False))
    with pytest.raises(RequestError, match="decoder_replay"):
        bench.submit(scored(request("a")))
    bench.submit(request("b"))
    bench.finish()
    assert bench.faults == []
    assert bench.tokens("b")


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
