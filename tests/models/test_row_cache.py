"""The cache of Engram rows: what it gives back, what makes room, what it costs."""

from collections import OrderedDict

import numpy as np
import pytest

from tided.models.deepseek_v41.row_cache import RowCache

ROW_BYTES, PLACE_BYTES = 24, 16


def cache_of(places):
    return RowCache(places * (ROW_BYTES + PLACE_BYTES), ROW_BYTES)


def content(rows):
    """A row's bytes tell its number."""
    return np.repeat(rows.astype(np.int64), 3).view(np.uint8).reshape(len(rows), ROW_BYTES)


def ask(cache, rows):
    """Recalls and checks, remembers the rest -> which were found."""
    rows = np.unique(np.asarray(rows, dtype=np.int64))
    out = np.zeros((len(rows), ROW_BYTES), dtype=np.uint8)
    found = cache.recall(rows, out)
    assert np.array_equal(out[found], content(rows[found]))
    cache.remember(rows[~found], content(rows[~found]))
    return found


@pytest.mark.parametrize("places", [0, 1, 3, 8, 50, 1000])
def test_what_comes_back_is_the_row(places):
    cache, rng = cache_of(places), np.random.default_rng(places)
    hits = [ask(cache, rng.zipf(1.3, 200) % 5000).mean() for _ in range(20)]
    assert (max(hits) > 0) == (places > 0)


@pytest.mark.parametrize("budget", [0, 39, 40, 1000, 1 << 20])
def test_all_that_it_holds_is_within_the_budget(budget):
    cache = RowCache(budget, ROW_BYTES)
    assert budget - 8 * (ROW_BYTES + PLACE_BYTES) < cache.nbytes <= budget


def test_the_row_longest_unused_makes_room():
    cache = cache_of(8)  # one set
    ask(cache, range(8))
    assert ask(cache, [0, 1, 2, 3]).all()
    ask(cache, [20, 21])  # for 4 and 5
    assert ask(cache, [0, 1, 2, 3, 6, 7, 20, 21]).all()
    assert not ask(cache, [4]).any()


def test_more_rows_at_once_than_a_set_holds():
    cache = cache_of(16)  # even rows, odd rows
    ask(cache, range(0, 100, 2))
    assert ask(cache, range(0, 100, 2)).sum() == 8
    ask(cache, range(1, 16, 2))
    assert ask(cache, range(1, 16, 2)).all()


def test_a_row_asked_for_twice_before_it_came_lies_in_one_place():
    cache, rows = cache_of(8), np.arange(4)
    cache.recall(rows, np.zeros((4, ROW_BYTES), dtype=np.uint8))
    cache.remember(rows, content(rows))
    cache.remember(rows, content(rows))
    ask(cache, range(4, 8))
    assert ask(cache, range(8)).all()


def test_as_many_hits_as_an_exact_order_of_use():
    """Eight places a set lose little against one set of all places."""
    cache, rng, exact = cache_of(4096), np.random.default_rng(1), OrderedDict()
    hits = exact_hits = 0
    for _ in range(300):
        rows = np.unique(rng.zipf(1.2, 256) % 100_000)
        hits += int(ask(cache, rows).sum())
        for row in rows.tolist():
            exact_hits += row in exact
            exact[row] = None
            exact.move_to_end(row)
            if len(exact) > 4096:
                exact.popitem(last=False)
    assert hits > 0.97 * exact_hits > 10_000
