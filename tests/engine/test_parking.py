"""Who is parked, who comes back and when, on a model of a few lines: pages of four tokens."""

import pytest
from engine_fakes import LIMITS, Bench, Wire, follower, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from tided.cache.chain import chain
from tided.engine.caching import CachePlan, Caching
from tided.engine.scheduler import Limits, Scheduler, worth_saving
from tided.engine.types import Failed, Finished
from tided.errors import PairError

TIGHT = {"page_tokens": 4, "pool_tokens": 60, "context_tokens": 60, "park_tokens": 120, "lanes": 3, "queue": 8}


def limits(**changes) -> Limits:
    return Limits(**({name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__} | TIGHT | changes))


def bench(link=None, **changes) -> Bench:
    found = Bench(link, limits=limits(**changes))
    tap = found.engine.executor.tap
    assert tap.counts.shape[0] >= 2
    return found


def serve(requests, **changes) -> Bench:
    found = bench(**changes)
    found.submit(*requests)
    found.finish()
    found.engine.executor.check()
    assert not found.faults
    return found


def parks(found: Bench) -> list[int]:
    return [lane for step in found.link.sent for lane in step.park]


TWO = [request("a", prompt=6, max_tokens=50, seed=1), request("b", prompt=9, max_tokens=45, temperature=1.0, seed=2)]


def test_the_newest_is_parked_and_goes_on_where_it_was():
    tight, roomy = serve(TWO, lanes=2), serve(TWO, lanes=2, pool_tokens=400)
    assert set(parks(tight)) == {1}
    assert parks(roomy) == []
    for name in "ab":
        assert tight.tokens(name) == roomy.tokens(name)
        assert tight.end(name).stats["experts"] == roomy.end(name).stats["experts"]
    # The older one never missed a step: with each step that has work it moves on.
    alone = serve(TWO[:1], lanes=2)
    works = [step.work for step in tight.link.sent if step.work]
    assert sum(0 in getattr(work, "lanes", [work.lane] if hasattr(work, "lane") else []) for work in works) == len(
        alone.work()
    )


def test_it_comes_back_before_any_newcomer_and_with_room_to_go_on():
    found = bench(lanes=2)
    found.submit(*TWO)
    while not parks(found):
        found.turn()
    found.submit(request("c", prompt=1, max_tokens=1))
    found.finish()
    assert found.started() == ["a", "b", "c"]
    resumed = [step for step in found.link.sent if step.resume]
    admitted = [step for step in found.link.sent if any(one.request.request_id == "c" for one in step.admit)]
    assert resumed[0].seq <= admitted[0].seq  # within a step, those that come back are first
    assert len(parks(found)) <= 4  # not once for every page


def test_a_parked_request_is_cancelled_and_leaves_nothing():
    found = bench(lanes=2)
    found.submit(*TWO)
    while not parks(found):
        found.turn()
    found.cancel("b")
    found.finish()
    assert found.end("b").reason == "cancelled"
    assert len(found.tokens("a")) == 50
    found.engine.executor.check()


def test_what_cannot_be_read_again_ends_its_request_alone():
    found = bench(lanes=2)
    found.engine.executor.caching.parked.load = lambda lane: False
    found.submit(*TWO)
    found.finish()
    (failed,) = [event for event in found.events if isinstance(event, Failed)]
    assert failed.request_id == "b"
    assert len(found.tokens("a")) == 50
    found.engine.executor.check()


def test_where_nothing_may_be_parked_the_answer_is_priced_whole():
    found = serve(TWO, lanes=2, park_tokens=0)
    assert parks(found) == []
    assert found.end("b").stats["lanes_busy"] == 1  # it waited for the other


def test_the_newest_fails_when_too_little_may_be_parked():
    found = serve(TWO, lanes=2, park_tokens=4)
    (failed,) = [event for event in found.events if isinstance(event, Failed)]
    assert failed.request_id == "b"
    assert "park_tokens" in failed.message
    assert len(found.tokens("a")) == 50


def test_a_lane_may_use_the_whole_pool():
    found = serve([request("a", prompt=20, max_tokens=40)], lanes=2)
    assert len(found.tokens("a")) == 40


def test_two_ranks_park_and_resume_in_the_same_steps():
    import threading

    link, faults = Wire(), []
    other = follower(link, faults)
    thread = threading.Thread(target=other.run, daemon=True)
    thread.start()
    found = bench(link, lanes=2)
    found.submit(*TWO)
    found.finish()
    found.engine.close("done")
    found.engine.run()
    thread.join(30)
    assert (found.faults, faults, set(parks(found))) == ([], [], {1})
    assert found.tokens("b") == serve(TWO, lanes=2, pool_tokens=400).tokens("b")
    other.executor.check()


asked = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 12), st.booleans())


@settings(max_examples=25, deadline=None)
@given(st.lists(asked, min_size=1, max_size=6), st.sampled_from([60, 72, 100]), st.booleans())
def test_any_traffic_ends_as_if_it_were_alone(traffic, pool, snapshots):
    """Prompt, answer, turns before it is sent, and whether it is cancelled soon."""
    found = bench(pool_tokens=pool, lanes=2, snapshots=snapshots)
    plan = found.engine.executor.caching.plan
    if snapshots:
        found.engine.executor.caching = type(found.engine.executor.caching)(
            found.model, plan.__class__(seed="s", chunk_tokens=8, ram_bytes=4000)
        )
    sent = [request(str(i), prompt=p, max_tokens=m, seed=i) for i, (p, m, _, _) in enumerate(traffic)]
    for one, (_, _, turns, cancelled) in zip(sent, traffic, strict=True):
        found.turn(turns)
        found.submit(one)
        if cancelled:
            found.turn(3)
            found.cancel(one.request_id)
        pool_pages, running = found.engine.scheduler.limits.pool_pages, found.engine.scheduler.active
        assert sum(-(-lane.length // 4) for lane in running) <= pool_pages
    found.finish()
    found.engine.executor.check()
    assert not found.engine.scheduler.running
    assert not found.engine.executor.lanes
    assert not found.faults
    for one, (_, _, _, cancelled) in zip(sent, traffic, strict=True):
        end = next(e for e in found.events if isinstance(e, Finished | Failed) and e.request_id == one.request_id)
        if not cancelled:
            alone = serve([changed(one)], pool_tokens=400)
            assert isinstance(end, Finished)
            assert found.tokens(one.request_id) == alone.tokens(one.request_id)


def test_a_changed_last_line_of_a_long_prompt_reuses_nearly_all_of_it():
    """A time stamp five tokens before the end of 14,336, in chunks of 1,024."""
    prompt = [i % 500 for i in range(14_336)]
    other = [*prompt[:-5], 501, *prompt[-4:]]
    one, two = chain("s", prompt, 1024), chain("s", other, 1024)
    saved = {one.chunks[i] for i in range(14) if worth_saving((i + 1) * 1024, len(prompt), 1024)}
    hits = [(i + 1) * 1024 for i, key in enumerate(two.chunks) if key in saved]
    assert max(hits) >= 0.85 * len(other)
    assert one.whole != two.whole


def test_a_rank_at_rest_may_keep_what_rank_0_waits_for():
    """Another rank still reads: this one has told, and nothing comes for a while."""
    found = bench()
    found.engine.executor.caching._read[1] = object()
    found.engine.executor.check()
    found.engine._rested = False
    with pytest.raises(PairError, match="kept for nobody"):
        found.engine._rest()


@pytest.mark.parametrize(("strict", "kept"), [(True, 1), (False, 3)])
def test_a_prompt_whose_set_changed_on_the_way_is_no_strict_snapshot(strict, kept):
    found = bench(lanes=1, snapshots=True)
    executor = found.engine.executor
    plan = CachePlan(seed="s", chunk_tokens=8, ram_bytes=1 << 20, strict=strict)
    caching = executor.caching = Caching(found.model, plan)
    found.submit(request("a", prompt=20, max_tokens=2))
    found.turn()
    executor.residents.mask_hash = 7
    found.finish()
    assert len(caching.prefixes._states) == kept


def test_drafts_count_as_growth():
    s = Scheduler(limits(lanes=2, draft_tokens=5))
    s.submit(request("a", prompt=4, max_tokens=50))
    s.next_step()
    s.drew(0, 1)
    s.next_step()
    assert s.running[0].pages == 3  # 4 tokens and 1 + 5 more


@pytest.mark.parametrize(("prompt", "saved"), [(8, [8]), (20, [8, 16, 20]), (800, None)])
def test_which_chunks_become_snapshots(prompt, saved):
    s = Scheduler(limits(lanes=1, snapshots=True, context_tokens=900, pool_tokens=900))
    s.submit(request("a", prompt=prompt, max_tokens=2))
    ends = []
    while (step := s.next_step()) and hasattr(step.work, "start"):
        if step.save:
            ends.append(step.work.start + step.work.count)
    if saved is not None:
        assert ends == saved
    else:
        assert 25 <= len(ends) <= 34
        assert ends[-2:] == [792, 800]
