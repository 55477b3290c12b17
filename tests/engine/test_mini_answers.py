"""C5 on the trained mini, whose drafts are its own: drafted, beside other lanes, from a prefix, parked and resumed, all
of it at once, on one rank and two, with every expert and with some of them, an answer is the one it gets alone.

Pages are of 16 tokens here: contexts of a hundred tokens cross many, and two of them fill a pool.
"""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace
from real_pair import Living
from small_model import small_pages
from test_drafted_answers import Alternating

from tided.chat.deepseek_v41 import encode_prompt
from tided.chat.messages import Conversation, Message
from tided.chat.tokenizer import Tokenizer
from tided.engine.build import open_model
from tided.engine.offline import settings_of
from tided.engine.types import Request, Sampling
from tided.settings import Cache, Engine, Experts, Parallel, Tide

MINI = Path(__file__).parents[2] / "minis" / "deepseek"
ALL, FROZEN, FEW, CONTEXT = 480, 400, 156, 112
LINES = "".join(f"Line {i}: the river carries {i * 7} barrels past the mill.\n" for i in range(4))
pytestmark = pytest.mark.xdist_group("mini answers")


@pytest.fixture(scope="module", autouse=True)
def pages():
    with pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        yield


@cache
def ids(text: str) -> list[int]:
    messages = (Message(role="user", parts=(text,)),)
    prompt = encode_prompt(Conversation(messages=messages, thinking=False))
    return Tokenizer.open(MINI).encode(prompt.segments)


def ask(name: str, text: str, answer: int, stop=(1,), **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_ids=ids(text),
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=answer,
        stop_ids=stop,
    )


PRIME = ask("prime", "Write a Python function that checks whether a number is prime.", 48)
STORY = ask("story", "Tell me a short story about a fox.", 60, stop=(), temperature=1.0, seed=4)
JAPAN = ask("japan", "Tell me about Japan.", 40, stop=())
RIVER = ask("river", LINES + "What is this about?", 12)
AGAIN = replace(RIVER, request_id="again")
MILL = ask("mill", LINES + "How many barrels in line 3?", 12, temperature=0.8, seed=5)
EVERY = (PRIME, STORY, JAPAN, RIVER, MILL, AGAIN)


def opened(ranks: int = 1, resident: int = ALL, lanes: int = 1, draft: str = "off", **cache_):
    settings = settings_of(MINI)
    return open_model(
        replace(
            settings,
            model=replace(settings.model, numerics="native", prefill_chunk_tokens=32),
            experts=Experts(resident=resident, spare_slots=3),
            tide=Tide(sync_slots=8),
            cache=Cache(**({"context_tokens": CONTEXT, "pool_tokens": 8 * CONTEXT} | cache_)),
            engine=Engine(
                lanes=lanes,
                guard_every_steps=8,
                prefill_share=0.99,  # prompts need not wait: what meets in the pool depends on no clock
                draft="5" if draft == "alternating" else draft,
            ),
            parallel=Parallel(ranks=ranks),
        )
    )


def living(folder=None, draft: str = "off", **model) -> Living:
    def prepare(served: Living) -> None:
        if draft == "alternating":
            served.engine.scheduler.depths = Alternating("fixed", 5, 5)

    return Living(opened(draft=draft, **model), prepare=prepare, cache_dir=folder)


def end(served: Living) -> None:
    served.close()
    for rank in served.ranks:
        rank.close()


@cache
def plain(ranks: int, resident: int) -> dict[str, list[int]]:
    """One lane, no draft, no cache, room for all, one after the other."""
    served = living(ranks=ranks, resident=resident)
    for request in EVERY:
        served.submit(request)
        served.rest()
    end(served)
    return {request.request_id: served.tokens(request.request_id) for request in EVERY}


def answered(served: Living, requests=EVERY) -> dict[str, list[int]]:
    served.submit(*requests)
    served.rest()
    served.check()
    end(served)
    assert served.faults == []
    return {request.request_id: served.tokens(request.request_id) for request in requests}


def of(expected: dict[str, list[int]], requests) -> dict[str, list[int]]:
    return {request.request_id: expected[request.request_id] for request in requests}


@pytest.mark.parametrize("draft", ["3", "5", "alternating", "acceptance", "confidence"])
def test_drafted_at_any_depth(draft):
    served = living(draft=draft)
    requests = (PRIME, STORY)
    assert answered(served, requests) == of(plain(1, ALL), requests)
    stats = served.stats("prime")
    assert stats["steps"] < 0.9 * (len(served.tokens("prime")) - 1)  # whole blocks were right


def test_beside_another_lane():
    served = living(lanes=2)
    assert answered(served) == plain(1, ALL)
    assert served.stats("story")["lanes_busy"] == 2


@pytest.mark.parametrize("kept", ["prefix_ram_bytes", "prefix_disk_bytes"])
def test_from_a_prefix(kept, tmp_path):
    served = living(tmp_path, **{kept: 1 << 26})
    served.submit(RIVER)
    served.rest()
    for rank in served.ranks:
        assert rank.executor.caching.background.flush(60)
    requests = (MILL, AGAIN)
    assert answered(served, requests) == of(plain(1, ALL), requests)
    assert served.stats("mill")["cached_tokens"] == 64
    assert served.stats("again")["cached_tokens"] == len(AGAIN.prompt_ids)


def test_parked_and_resumed(tmp_path):
    served = living(tmp_path, lanes=3, pool_tokens=CONTEXT)
    assert answered(served) == plain(1, ALL)
    assert sum(served.stats(request.request_id)["parked"] for request in EVERY) >= 1


@pytest.mark.parametrize(
    ("ranks", "draft", "resident", "fidelity"),
    [
        (1, "confidence", FEW, "exact"),
        (2, "alternating", FROZEN, "fast"),
    ],
)
def test_all_of_it_at_once(ranks, draft, resident, fidelity, tmp_path):
    """Drafted, in a pool that parks, behind prefixes from memory and disk, beside two other lanes."""
    expected = plain(ranks, resident if fidelity == "fast" else ALL)
    caches = {"prefix_ram_bytes": 600_000, "prefix_disk_bytes": 1 << 26}
    served = living(tmp_path, draft, ranks=ranks, resident=resident, lanes=3, pool_tokens=CONTEXT, **caches)
    requests = [replace(request, fidelity=fidelity) for request in EVERY]
    assert answered(served, requests) == expected
    stats = [served.stats(request.request_id) for request in requests]
    assert sum(one["parked"] for one in stats) >= 1
    assert sum(one["cached_tokens"] for one in stats) >= 64
    assert sum(one["steps"] for one in stats) < sum(len(tokens) - 1 for tokens in expected.values())
