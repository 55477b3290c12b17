"""Bytes and needs of snapshots agree whatever happens, and the right ones go first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tided.cache.index import Entry, Index

PAGES = {f"p{i}": 10 + i for i in range(6)}


def index(budget=100, **own) -> Index:
    found = Index(budget)
    for key, size in own.items():
        assert found.add(key, Entry((), size), {}) is not None
    return found


def test_the_least_recently_used_goes_first():
    found = index(a=40, b=40)
    found.touch("a")
    assert found.add("c", Entry((), 40), {}).entries == ["b"]
    assert list(found.entries) == ["a", "c"]


def test_what_is_larger_than_all_there_is_is_not_taken():
    found = index(a=40)
    assert found.add("b", Entry((), 101), {}) is None
    assert list(found.entries) == ["a"]


def test_pages_go_with_the_last_that_needs_them():
    found = Index(100)
    found.add("a", Entry(("p0",), 10), PAGES)
    found.add("b", Entry(("p0", "p1"), 10), PAGES)
    assert found.used_bytes == 20 + 10 + 11
    assert found.remove("a").pages == []
    assert sorted(found.remove("b").pages) == ["p0", "p1"]
    assert found.used_bytes == 0


def test_a_lost_page_set_takes_what_needs_it():
    found = Index(100)
    found.add("a", Entry(("p0",), 5), PAGES)
    found.add("b", Entry(("p0", "p1"), 5), PAGES)
    found.add("c", Entry(("p1",), 5), PAGES)
    gone = found.remove_pages("p0")
    assert (sorted(gone.entries), gone.pages, list(found.entries)) == (["a", "b"], ["p0"], ["c"])


def test_what_many_prompts_begin_with_outlives_newer_ones():
    found = index(system=30, other=30)
    found.touch("system")
    found.touch("system")
    for i in range(20):
        found.add(f"n{i}", Entry((), 30), {})
    assert found.entries["system"].pinned
    assert "other" not in found.entries


def test_pins_hold_half_of_the_bytes_at_most():
    found = index(a=30, b=30)
    for key in "aabb":
        found.touch(key)
    assert (found.entries["a"].pinned, found.entries["b"].pinned) == (False, True)


def test_where_only_pinned_ones_are_left_the_oldest_of_them_goes():
    found = index(a=20, b=20)
    for key in "aabb":
        found.touch(key)
    assert found.add("c", Entry((), 90), {}).entries == ["a", "b"]


class Traffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(120)

    @rule(key=st.integers(0, 9), needs=st.sets(st.sampled_from(sorted(PAGES))), own=st.integers(0, 60))
    def add(self, key, needs, own):
        if str(key) in self.index.entries:  # a key names its content
            return
        gone = self.index.add(str(key), Entry(tuple(sorted(needs)), own), PAGES)
        assert (gone is not None) == (str(key) in self.index.entries)
        assert gone is None or str(key) not in gone.entries

    @rule(key=st.integers(0, 9))
    def touch(self, key):
        if str(key) in self.index.entries:
            self.index.touch(str(key))

    @rule(key=st.integers(0, 9))
    def remove(self, key):
        self.index.remove(str(key))
        assert str(key) not in self.index.entries

    @rule(page=st.sampled_from(sorted(PAGES)))
    def lose(self, page):
        self.index.remove_pages(page)
        assert page not in self.index.page_bytes

    @invariant()
    def agrees(self):
        self.index.check()


Traffic.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
