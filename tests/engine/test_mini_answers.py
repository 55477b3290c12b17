"""C5 on the trained minis, whose drafts are their own: drafted, beside other lanes, from a prefix, parked and resumed,
all of it at once, on one rank and two, with every expert and with some of them, an answer is the one it gets alone.

Pages are of 16 tokens here: contexts of a hundred tokens cross many, and two of them fill a pool.
"""

from functools import cache

import pytest
from msgspec.structs import replace
from real_pair import Living
from small_model import small_pages
from test_drafted_answers import Alternating

from tests.bundled import Mini
from tided.engine.build import open_model
from tided.engine.offline import settings_of
from tided.engine.types import Request, Sampling
from tided.settings import Cache, Engine, Experts, Parallel, Tide

CONTEXT = 112
LINES = "".join(f"Line {i}: the river carries {i * 7} barrels past the mill.\n" for i in range(4))
pytestmark = pytest.mark.xdist_group("mini answers")


@pytest.fixture(scope="module", autouse=True)
def pages():
    with pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        yield


@cache
def ask(mini: Mini, name: str) -> Request:
    text, answer, sampling = ASKED[name]
    stops = () if name in ("story", "japan") else mini.stop_ids
    return Request(
        request_id=name,
        prompt_ids=mini.ids(text),
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=answer,
        stop_ids=stops,
    )


ASKED = {
    "prime": ("Write a Python function that checks whether a number is prime.", 48, {}),
    "story": ("Tell me a short story about a fox.", 60, {"temperature": 1.0, "seed": 4}),
    "japan": ("Tell me about Japan.", 40, {}),
    "river": (LINES + "What is this about?", 12, {}),
    "mill": (LINES + "How many barrels in line 3?", 12, {"temperature": 0.8, "seed": 5}),
    "again": (LINES + "What is this about?", 12, {}),
}


def asked(mini: Mini, *names: str) -> list[Request]:
    return [ask(mini, name) for name in names or ASKED]


def opened(mini: Mini, ranks: int = 1, resident: int = 0, lanes: int = 1, draft: str = "off", **cache_):
    """`resident` 0: all experts."""
    settings = settings_of(mini.path)
    return open_model(
        replace(
            settings,
            model=replace(settings.model, numerics="native", prefill_chunk_tokens=32),
            experts=Experts(resident=resident or mini.experts, spare_slots=3),
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


def living(mini: Mini, folder=None, draft: str = "off", **model) -> Living:
    def prepare(served: Living) -> None:
        if draft == "alternating":
            served.engine.scheduler.depths = Alternating("fixed", 5, 5)

    return Living(opened(mini, draft=draft, **model), prepare=prepare, cache_dir=folder)


def end(served: Living) -> None:
    served.close()
    for rank in served.ranks:
        rank.close()


@cache
def plain(mini: Mini, ranks: int = 1, resident: int = 0) -> dict[str, list[int]]:
    """One lane, no draft, no cache, room for all, one after the other."""
    served = living(mini, ranks=ranks, resident=resident)
    for request in asked(mini):
        served.submit(request)
        served.rest()
    end(served)
    return {name: served.tokens(name) for name in ASKED}


def answered(served: Living, requests: list[Request]) -> dict[str, list[int]]:
    served.submit(*requests)
    served.rest()
    served.check()
    end(served)
    assert served.faults == []
    return {request.request_id: served.tokens(request.request_id) for request in requests}


def of(expected: dict[str, list[int]], requests) -> dict[str, list[int]]:
    return {request.request_id: expected[request.request_id] for request in requests}


@pytest.mark.parametrize("draft", ["3", "5", "alternating", "acceptance", "confidence"])
def test_drafted_at_any_depth(mini, draft):
    served = living(mini, draft=draft)
    requests = asked(mini, "prime", "story")
    assert answered(served, requests) == of(plain(mini), requests)
    stats = served.stats("prime")
    assert stats["steps"] < 0.9 * (len(served.tokens("prime")) - 1)  # whole blocks were right


def test_beside_another_lane(mini):
    served = living(mini, lanes=2)
    assert answered(served, asked(mini)) == plain(mini)
    assert served.stats("story")["lanes_busy"] == 2


@pytest.mark.parametrize("kept", ["prefix_ram_bytes", "prefix_disk_bytes"])
def test_from_a_prefix(mini, kept, tmp_path):
    served = living(mini, tmp_path, **{kept: 1 << 26})
    served.submit(*asked(mini, "river"))
    served.rest()
    for rank in served.ranks:
        assert rank.executor.caching.background.flush(60)
    requests = asked(mini, "mill", "again")
    assert answered(served, requests) == of(plain(mini), requests)
    assert served.stats("mill")["cached_tokens"] == 64
    assert served.stats("again")["cached_tokens"] == len(ask(mini, "again").prompt_ids)


def test_parked_and_resumed(mini, tmp_path):
    served = living(mini, tmp_path, lanes=3, pool_tokens=CONTEXT)
    assert answered(served, asked(mini)) == plain(mini)
    assert sum(served.stats(name)["parked"] for name in ASKED) >= 1


@pytest.mark.parametrize(
    ("ranks", "draft", "kept", "fidelity"),
    [
        (1, "confidence", "few", "exact"),
        (2, "alternating", "most", "fast"),
    ],
)
def test_all_of_it_at_once(mini, ranks, draft, kept, fidelity, tmp_path):
    """Drafted, in a pool that parks, behind prefixes from memory and disk, beside two other lanes."""
    resident = getattr(mini, kept)
    expected = plain(mini, ranks, resident if fidelity == "fast" else 0)
    caches = {"prefix_ram_bytes": 600_000, "prefix_disk_bytes": 1 << 26}
    served = living(mini, tmp_path, draft, ranks=ranks, resident=resident, lanes=3, pool_tokens=CONTEXT, **caches)
    requests = [replace(request, fidelity=fidelity) for request in asked(mini)]
    assert answered(served, requests) == expected
    stats = [served.stats(name) for name in ASKED]
    assert sum(one["parked"] for one in stats) >= 1
    assert sum(one["cached_tokens"] for one in stats) >= 64
    assert sum(one["steps"] for one in stats) < sum(len(tokens) - 1 for tokens in expected.values())
