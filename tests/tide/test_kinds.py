"""Pairs of several record sizes: hot reads, plans and the pilot exchange each kind for itself."""

import numpy as np
import pytest

from tided.engine.motion import Motion
from tided.settings import Tide
from tided.tide.demand import RouterShape, vote_of
from tided.tide.history import History
from tided.tide.hot import HotReads
from tided.tide.kinds import kinds_of
from tided.tide.pilot import Pilot
from tided.tide.seed import Seed

SHAPE = RouterShape(layers=3, experts=12, top_k=2)
EVEN = np.ones((SHAPE.layers, SHAPE.experts))
SIZES = 4096 * np.array([[1 + (expert + layer) % 3 for expert in range(SHAPE.experts)] for layer in range(3)])
KINDS = kinds_of(SIZES, spare_slots=3, ring_slots=6)
RESIDENTS = [(layer, expert) for layer in range(3) for expert in range(5)]


def policy() -> HotReads:
    return HotReads(SHAPE, RESIDENTS, sum(KINDS.ring), 2, EVEN, KINDS)


def of_kinds(pairs) -> list[int]:
    return np.bincount([int(KINDS.of[pair]) for pair in pairs], minlength=3).tolist()


@pytest.mark.parametrize("reads", [1, 2, 8])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_wanted_each_kind_keeps_its_places(seed, reads):
    rng, hot, promoted = np.random.default_rng(seed), policy(), 0
    for step in range(60):
        if step % 15 == 0:  # another topic
            popular = rng.dirichlet(np.full(36, 0.3))
        wanted = rng.choice(36, 6, replace=False, p=(popular + 1e-6) / (popular + 1e-6).sum())
        hot.observe(wanted, rng.dirichlet(np.ones(6), 1)[0] * 3, tokens=8)
        moves = hot.moves(reads)
        promoted += len(moves.promote)
        assert all(KINDS.of[out] == KINDS.of[in_] for out, in_ in moves.promote)
        for pair in moves.load:
            hot.published(pair)
        assert all(held <= places for held, places in zip(of_kinds(hot.ring), KINDS.ring, strict=True))
        assert of_kinds(hot.residents) == of_kinds(RESIDENTS)
        assert all(KINDS.of[out] == KINDS.of[in_] for out, in_ in hot.plan(10))
        hot.check(hot.residents, hot.ring)
    assert promoted, "nothing was exchanged: this test shows nothing"


def test_topics_that_come_and_go_exchange_each_kind_for_itself():
    """Long enough that entries of the ring and residents give way."""
    hot, promoted, withdrawn = policy(), 0, 0
    for step in range(300):
        topic = 5 * (step // 30)
        wanted = [layer * 12 + (topic + number) % 12 for layer in range(3) for number in range(4)]
        hot.observe(wanted, [0.25] * len(wanted), 4)
        moves = hot.moves(4)
        promoted, withdrawn = promoted + len(moves.promote), withdrawn + len(moves.withdraw)
        assert all(KINDS.of[out] == KINDS.of[in_] for out, in_ in moves.promote)
        for pair in moves.load:
            hot.published(pair)
        assert all(held <= places for held, places in zip(of_kinds(hot.ring), KINDS.ring, strict=True))
        assert of_kinds(hot.residents) == of_kinds(RESIDENTS)
    assert promoted > 5, "nothing was exchanged: this test shows nothing"
    assert withdrawn > 5


def test_a_kind_whose_ring_is_full_leaves_the_others_theirs():
    hot = policy()
    small = [(0, 6), (0, 9), (1, 5), (1, 8), (1, 11), (2, 7), (2, 10)]
    assert {int(KINDS.of[pair]) for pair in small} == {0}
    hot.observe([layer * 12 + expert for layer, expert in [*small, (0, 7), (0, 8)]], [1.0] * 7 + [0.9] * 2, 1)
    load = hot.moves(20).load
    assert of_kinds(load)[0] >= KINDS.ring[0]
    assert {(0, 7), (0, 8)} <= set(load), "larger ones find their own places"


def test_without_kinds_all_are_of_one():
    plain, one = HotReads(SHAPE, RESIDENTS, 4, 2, EVEN), HotReads(SHAPE, RESIDENTS, 4, 2, EVEN, ONE)
    for step in range(30):
        wanted = [(7 * step + 5 * i) % 36 for i in range(4)]
        for hot in (plain, one):
            hot.observe(wanted, [0.3 + 0.1 * i for i in range(4)], 1)
        first, second = plain.moves(3), one.moves(3)
        assert first == second
        for pair in first.load:
            plain.published(pair)
            one.published(pair)


ONE = kinds_of(np.full((3, 12), 4096), spare_slots=4, ring_slots=4)


def test_swaps_begin_where_their_kind_has_a_spare_slot():
    """The small kind's second swap waits for its first; the larger one goes on, and the order is kept."""
    motion = Motion(policy(), 1, 99)
    small, large = [((0, 0), (0, 6)), ((0, 3), (0, 9))], ((0, 1), (0, 7))
    assert [int(KINDS.of[out]) for out, _ in (*small, large)] == [0, 0, 1]
    motion.take_plan([*small, large], "a test")
    change, _ = motion.change()
    assert [(load.out, load.pair) for load in change.load] == [small[0], large]
    motion.landed([change.load[0].ticket])
    change, _ = motion.change()
    assert [(load.out, load.pair) for load in change.load] == [small[1]]
    assert motion.planned == 0


def test_the_pilot_keeps_its_budget_of_bytes(tmp_path):
    tide = Tide(min_prefill_tokens=1, sensitivity="max")
    pilot = Pilot(History.open(tmp_path, "ab" * 32, SHAPE, False), None, tide, SHAPE, 15, KINDS)
    first = pilot.boot_pairs()
    nbytes = sum(int(SIZES[pair]) for pair in first)
    assert KINDS.budget_bytes(15) - 4096 < nbytes <= KINDS.budget_bytes(15)
    counts = np.zeros((3, 12))
    counts[:, 8:] = 10.0
    plan = pilot.prompt_done(counts, counts / 2, [240.0, 200.0, 60.0, 50.0], 20, lane=0)
    assert plan, "nothing is planned: this test shows nothing"
    assert all(KINDS.of[out] == KINDS.of[in_] for out, in_ in plan)
    pilot.applied(plan)
    assert sum(int(SIZES[pair]) for pair in pilot.residents) == nbytes
    layers = np.bincount([layer for layer, _ in first], minlength=3)
    assert layers.max() - layers.min() <= 1, "without a seed no layer is preferred"


GLM = RouterShape(layers=6, experts=64, top_k=8)
WIDE_FIRST = np.tile(np.repeat([4, 3, 2], [4, 20, 40]), (GLM.layers, 1))  # bits: what few have is what ids rank first
MIXED = np.random.default_rng(7).permuted(WIDE_FIRST, axis=1)


def shares(pairs, bits) -> list[float]:
    """Of the experts of 2, 3 and 4 bits, how many are resident."""
    kept = np.zeros(bits.shape, dtype=bool)
    kept[tuple(np.array(pairs).T)] = True
    return [float(kept[bits == one].mean()) for one in (2, 3, 4)]


def glm_pilot(path, bits, seed=None, votes=()) -> Pilot:
    history = History.open(path, "cd" * 32, GLM, False)
    for mass in votes:
        history.fold(vote_of(mass, mass, GLM), 0.9)
    kinds = kinds_of(bits * 1_000_000, spare_slots=6, ring_slots=0)
    return Pilot(history, seed, Tide(), GLM, int(0.675 * bits.size), kinds)


@pytest.mark.parametrize("bits", [MIXED, WIDE_FIRST, WIDE_FIRST[:, ::-1]], ids=["mixed", "wide first", "wide last"])
@pytest.mark.parametrize("layers_only", [False, True])
def test_where_nothing_is_known_each_size_is_resident_as_it_occurs(tmp_path, bits, layers_only):
    """Not the smallest first: what a size has at the start it has for good, and the wide may be the ones wanted."""
    even = np.full((GLM.layers, GLM.experts), 1 / GLM.experts)
    seed = Seed(even, "", (), (40,) * GLM.layers) if layers_only else None
    assert shares(glm_pilot(tmp_path, bits, seed).boot_pairs(), bits) == pytest.approx([0.675] * 3, abs=0.1)


def test_what_was_observed_counts_a_byte_and_the_rest_stays_as_it_occurs(tmp_path):
    """One vote: the experts that it names come first whatever their width; no size is preferred of the others."""
    draw = np.random.default_rng(3)
    seen = np.zeros(MIXED.shape)
    for row in seen:
        row[draw.choice(GLM.experts, 16, replace=False)] = draw.gamma(1.0, size=16) + 0.05
    pairs = glm_pilot(tmp_path, MIXED, votes=[seen]).boot_pairs()
    assert {(int(layer), int(expert)) for layer, expert in np.argwhere(seen)} <= set(pairs)
    assert shares(pairs, MIXED) == pytest.approx([0.675] * 3, abs=0.15)


def test_of_equal_worth_the_smaller_are_kept_once_it_was_observed(tmp_path):
    """By a history in which all are wanted alike, and by a seed that says so."""
    even = np.full((GLM.layers, GLM.experts), 1.0)
    by_seed = shares(glm_pilot(tmp_path, MIXED, Seed(even / GLM.experts, "", ("all",))).boot_pairs(), MIXED)
    by_history = shares(glm_pilot(tmp_path, MIXED, votes=[even]).boot_pairs(), MIXED)
    for small, _, wide in (by_seed, by_history):
        assert small == 1.0
        assert wide < 0.7
