"""Pages: taken and given back, never shared, and found again at the right rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.cache.context import Context, ContextShape
from tided.cache.pool import PAGE_TOKENS, Layout, Pool, Source, physical_rows, rows_between
from tided.errors import PairError, UnavailableError

CPU = torch.device("cpu")
LAYOUT = Layout((Source(2, 2), Source(6, 1)), head_dim=4, index_dim=2, dtype=torch.float32)
SHAPE = ContextShape(layers=3, window=8, head_dim=4, tail_tokens=3, pad_id=7, dtype=torch.bfloat16)


def pool(tokens):
    return Pool(LAYOUT, tokens, CPU)


def context(index=0):
    return Context(index, SHAPE, CPU)


def test_a_fresh_context():
    c = context(5)
    assert (c.index, c.position, c.pages) == (5, 0, [])
    assert c.tail.tolist() == [7, 7, 7]
    assert c.windows.shape == (3, 8, 4)


def test_bytes_of_a_pool():
    p = pool(300)
    assert p.free_tokens == 3 * PAGE_TOKENS
    assert LAYOUT.page_bytes == (PAGE_TOKENS + PAGE_TOKENS // 2) * (4 + 2) * 4
    assert sum(t.nbytes for held in (p.rows, p.keys) for t in held.values()) == 3 * LAYOUT.page_bytes


@pytest.mark.parametrize(("tokens", "size"), [(1 << 50, "40,532,396.6 GB"), (1 << 62, "GB")])
def test_a_pool_that_no_machine_has_room_for(tokens, size):
    with pytest.raises(UnavailableError, match=f"no memory for a context pool of {tokens} tokens: .*{size}") as caught:
        pool(tokens)
    assert "pool_tokens in [cache]" in str(caught.value)


def test_growing_takes_only_what_is_missing():
    p, c = pool(1024), context()
    p.grow([c], 1)
    assert len(c.pages) == 1
    c.position = 100
    p.grow([c], 28)
    assert len(c.pages) == 1
    p.grow([c], 29)
    assert len(c.pages) == 2
    c.position = 129
    p.grow([c], 600)
    assert len(c.pages) == 6


def test_all_or_none():
    p, one, two = pool(256), context(0), context(1)
    assert p.can_grow([one, two], 128)
    assert not p.can_grow([one, two], 129)
    with pytest.raises(UnavailableError, match="256 tokens free"):
        p.grow([one, two], 129)
    assert (one.pages, two.pages, p.free_tokens) == ([], [], 256)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=40))
@settings(deadline=None, max_examples=60)
def test_no_page_is_lost_or_shared(moves):
    """A move (lane, tokens) appends tokens; 0 closes the lane."""
    p, lanes = pool(2048), [context(i) for i in range(4)]
    for lane, tokens in moves:
        if tokens == 0:
            p.release(lanes[lane])
            lanes[lane] = context(lane)
        elif p.can_grow([lanes[lane]], tokens):
            p.grow([lanes[lane]], tokens)
            lanes[lane].position += tokens
        held = [page for c in lanes for page in c.pages]
        assert len(set(held)) == len(held)
        assert len(held) * PAGE_TOKENS + p.free_tokens == 2048
        assert all(c.position <= len(c.pages) * PAGE_TOKENS for c in lanes)
        assert all(c.page_table.tolist() == c.pages for c in lanes)
        p.check(lanes)


@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (6, 1)])
def test_rows_are_found_where_they_were_put(layer, ratio):
    """Two lanes whose pages interleave."""
    p, lanes = pool(1024), [context(0), context(1)]
    for _ in range(3):
        for c in lanes:
            p.grow([c], 120)
            c.position += 120
    for c in lanes:
        rows = torch.arange(360 // ratio)
        p.rows[layer][physical_rows(c, ratio, rows)] = (1000.0 * c.index + rows).unsqueeze(1).expand(-1, 4)
    for c in lanes:
        count, page = 360 // ratio, PAGE_TOKENS // ratio
        for n in (1, 63, 64, 65, count):
            for first in {0, (n - 1) // page * page}:
                got = rows_between(c, ratio, first, n, p.rows[layer])
                assert got[:, 0].tolist() == [1000 * c.index + i for i in range(first, n)]
                assert got.shape == (n - first, 4)
        with pytest.raises(ValueError, match="row 5 is not the first of a page"):
            rows_between(c, ratio, 5, 64, p.rows[layer])


def fill(p, c, value):
    for source in LAYOUT.sources:
        rows = physical_rows(c, source.ratio, torch.arange(c.position // source.ratio))
        p.rows[source.layer][rows] = value + torch.arange(len(rows)).unsqueeze(1).expand(-1, 4)
        p.keys[source.layer][rows] = -value - torch.arange(len(rows)).unsqueeze(1).expand(-1, 2)


def held(p, c) -> list[float]:
    found = []
    for source in LAYOUT.sources:
        rows = physical_rows(c, source.ratio, torch.arange(c.position // source.ratio))
        found += p.rows[source.layer][rows].flatten().tolist() + p.keys[source.layer][rows].flatten().tolist()
    return found


@given(st.lists(st.tuples(st.sampled_from(["open", "park", "resume", "close"]), st.integers(0, 3)), max_size=30))
@settings(deadline=None, max_examples=40)
def test_pages_that_leave_and_come_back_hold_what_they_held(moves):
    p, lanes, parked = pool(1024), {}, {}
    for turn, (move, lane) in enumerate(moves):
        if move == "open" and lane not in lanes and lane not in parked and p.free_tokens >= 256:
            lanes[lane] = context(lane)
            p.grow([lanes[lane]], 200)
            lanes[lane].position = 200
            fill(p, lanes[lane], 1000.0 * turn)
        elif move == "park" and lane in lanes:
            c = lanes.pop(lane)
            parked[lane] = (held(p, c), p.copied(c, 0, len(c.pages)))
            p.release(c)
        elif move == "resume" and lane in parked and p.free_tokens >= 256:
            expected, parts = parked.pop(lane)
            c = lanes[lane] = context(lane)
            p.grow([c], 200)
            p.put(c, 0, {name: part[:1] for name, part in parts.items()})
            p.put(c, 1, {name: part[1:] for name, part in parts.items()})
            c.position = 200
            assert held(p, c) == expected
        elif move == "close" and lane in lanes:
            p.release(lanes.pop(lane))
        p.check(lanes.values())


def test_a_page_that_is_lost_or_held_twice_is_found():
    p, one, two = pool(1024), context(0), context(1)
    p.grow([one, two], 200)
    with pytest.raises(PairError, match=r"pages \[2, 3\] of the context pool are lost"):
        p.check([one])
    two.pages[0] = one.pages[0]
    with pytest.raises(PairError, match="held twice"):
        p.check([one, two])
