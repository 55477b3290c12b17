"""Any series of plans, right, wrong or failing, keeps slots unique and bytes right (two experts in one slot was never
an exception anywhere it happened: only wrong text)."""

from collections import Counter

import pytest
from expert_fakes import FakeSource, bytes_of, fake_residents, first, quiet, record_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tided.errors import DataError, PairError

LAYERS, EXPERTS, TOP_K, EACH, SPARE = 3, 6, 2, 3, 3
ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


class Set(RuleBasedStateMachine):
    @initialize(read_threads=st.integers(1, 2))
    def boot(self, read_threads):
        self._start(first(LAYERS, EACH), read_threads)

    def _start(self, pairs, read_threads):
        self.teardown()
        self.source = FakeSource()
        self.residents = fake_residents(LAYERS, EXPERTS, TOP_K, LAYERS * EACH, SPARE, self.source, read_threads)
        self.residents.fill(pairs, quiet)
        self.expected = set(pairs)

    @rule(data=st.data(), count=st.integers(0, SPARE + 1))
    def plan_of_resident_and_absent_pairs(self, data, count):
        outs = data.draw(st.permutations(sorted(self.expected)))[:count]
        ins = data.draw(st.permutations(sorted(set(ALL) - self.expected)))[:count]
        after = (self.expected - set(outs)) | set(ins)
        kept = Counter(layer for layer, _ in after)
        valid = count <= SPARE and all(kept[layer] >= TOP_K for layer in range(LAYERS))
        self._apply(list(zip(outs, ins, strict=True)), after if valid else None)

    @rule(swaps=st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from(ALL)), min_size=1, max_size=3))
    def any_plan(self, swaps):
        outs, ins = [out for out, _ in swaps], [in_ for _, in_ in swaps]
        after = (self.expected - set(outs)) | set(ins)
        kept = Counter(layer for layer, _ in after)
        valid = (
            len(set(outs)) == len(outs)
            and len(set(ins)) == len(ins)
            and set(outs) <= self.expected
            and not set(ins) & self.expected
            and all(kept[layer] >= TOP_K for layer in range(LAYERS))
        )
        self._apply(swaps, after if valid else None)

    @rule(data=st.data())
    def a_read_fails_and_the_rank_starts_again(self, data):
        out = data.draw(st.sampled_from(sorted(self.expected)))
        absent = sorted(pair for pair in ALL if pair[0] == out[0] and pair not in self.expected)
        if not absent:
            return
        self.source.fails_at = self.source.reads + 1
        with pytest.raises(DataError):
            self.residents.apply([(out, data.draw(st.sampled_from(absent)))])
        assert self.residents.pairs == sorted(self.expected)
        self._start(sorted(self.expected), 1)

    def teardown(self):
        if hasattr(self, "residents"):
            self.residents._io.close()

    def _apply(self, swaps, after):
        try:
            self.residents.apply(swaps)
        except PairError:
            assert after is None, f"a right plan was refused: {swaps}"
        else:
            assert after is not None, f"a wrong plan was taken: {swaps}"
            self.expected = after

    @invariant()
    def slots_are_unique_and_hold_the_right_bytes(self):
        if not hasattr(self, "expected"):
            return
        self.residents.check_integrity()
        assert self.residents.pairs == sorted(self.expected)
        slots = [int(self.residents.tables.slot_of[pair]) for pair in self.residents.pairs]
        assert len(set(slots)) == len(slots)
        assert self.residents.arena.free == SPARE
        for pair in self.residents.pairs:
            assert bytes_of(self.residents, pair) == record_of(*pair)


TestResidentSet = Set.TestCase
TestResidentSet.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
