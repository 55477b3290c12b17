"""Any series of reads, publications, promotions and withdrawals, right or wrong, keeps slots unique and bytes right
(R2: two experts in one slot was never an exception anywhere it happened: only wrong text)."""

from collections import Counter

from expert_fakes import FakeSource, bytes_of, ended, fake_residents, first, quiet, record_of, wait
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tided.errors import PairError

LAYERS, EXPERTS, TOP_K, EACH, SPARE, RING = 3, 6, 2, 3, 3, 2
ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
pairs = st.sampled_from(ALL)


class Set(RuleBasedStateMachine):
    @initialize(read_threads=st.integers(1, 2))
    def boot(self, read_threads):
        self._start(first(LAYERS, EACH), read_threads)

    def _start(self, residents, read_threads):
        self.teardown()
        self.source = FakeSource()
        self.residents = fake_residents(
            LAYERS, EXPERTS, TOP_K, LAYERS * EACH, SPARE, self.source, read_threads, ring=RING
        )
        self.residents.fill(residents, quiet)
        self.resident, self.ring, self.reading, self.number = set(residents), [], {}, 0

    def teardown(self):
        if hasattr(self, "residents"):
            self.residents._io.close()

    @rule(pair=pairs, out=st.one_of(st.none(), pairs))
    def read(self, pair, out):
        swaps = [other for _, other in self.reading.values() if other is not None]
        here = self.resident | set(self.ring) | {pair for pair, _ in self.reading.values()}
        if out is None:
            valid = len(self.ring) + len(self.reading) - len(swaps) < RING
        else:
            valid = out in self.resident and out not in swaps and len(swaps) < SPARE
        self.number += 1
        if self._allowed(valid and pair not in here, lambda: self.residents.read(self.number, pair, out)):
            self.reading[self.number] = (pair, out)

    @rule(data=st.data())
    def publish(self, data):
        if not self.reading:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.reading)), unique=True))
        wait(self.residents, [n for n in self.reading if not self.residents._reading[n].landed])
        chosen = [self.reading[number] for number in numbers]
        swaps = [(out, pair) for pair, out in chosen if out is not None]
        after = (self.resident - {out for out, _ in swaps}) | {pair for _, pair in swaps}
        if self._allowed(
            self._floor_holds(after) and all(out in self.resident for out, _ in swaps),
            lambda: self.residents.publish(numbers),
        ):
            self.resident = after
            self.ring += [pair for pair, out in chosen if out is None]
            for number in numbers:
                del self.reading[number]

    @rule(out=pairs, in_=pairs)
    def promote(self, out, in_):
        after = (self.resident - {out}) | {in_}
        valid = out in self.resident and in_ in self.ring
        if valid and not self._floor_holds(after):
            return  # ends the rank: the books have changed by then
        if self._allowed(valid, lambda: self.residents.promote([(out, in_)])):
            self.resident = after
            self.ring = [pair for pair in self.ring if pair != in_] + [out]

    @rule(pair=pairs)
    def withdraw(self, pair):
        if self._allowed(pair in self.ring, lambda: self.residents.withdraw([pair])):
            self.ring.remove(pair)

    @rule()
    def a_read_fails_and_is_given_up(self):
        absent = sorted(set(ALL) - self.resident - set(self.ring) - {pair for pair, _ in self.reading.values()})
        if self.reading or not absent:
            return
        out = min(self.resident)
        self.source.fails_at = self.source.reads + 1
        self.residents.read(10_000, absent[0], out)
        assert ended(self.residents, [10_000]) == ([10_000], [])
        assert self.residents.pairs == sorted(self.resident)
        self.residents.give_up([10_000])

    @rule(data=st.data())
    def give_up(self, data):
        """What landed here, and not on another rank."""
        if self.reading:
            number = data.draw(st.sampled_from(sorted(self.reading)))
            wait(self.residents, [n for n in self.reading if not self.residents._reading[n].landed])
            self.residents.give_up([number])
            del self.reading[number]

    def _allowed(self, valid, act) -> bool:
        try:
            act()
        except PairError:
            assert not valid, "what is right was refused"
        else:
            assert valid, "what is wrong was done"
        return valid

    def _floor_holds(self, residents) -> bool:
        kept = Counter(layer for layer, _ in residents)
        return all(kept[layer] >= TOP_K for layer in range(LAYERS))

    @invariant()
    def slots_are_unique_and_hold_the_right_bytes(self):
        if not hasattr(self, "resident"):
            return
        self.residents.check_integrity()
        assert self.residents.pairs == sorted(self.resident)
        assert self.residents.ring == self.ring
        routable = [*self.resident, *self.ring]
        assert int(self.residents.tables.routable.sum()) == len(routable)
        under_way = [reading.slot for reading in self.residents._reading.values()]
        slots = [int(self.residents.tables.slot_of[pair]) for pair in routable] + under_way
        assert len(set(slots)) == len(slots)
        assert self.residents.arena.free == SPARE + RING - len(self.ring) - len(self.reading)
        for pair in routable:
            assert bytes_of(self.residents, pair) == record_of(*pair)


TestResidentSet = Set.TestCase
TestResidentSet.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
