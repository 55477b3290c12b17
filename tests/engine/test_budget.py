"""Another budget of experts while answers are made: no answer changes that must not, nothing is lost, and memory that
is given up goes back to the system."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integrity import at_rest
from msgspec.structs import replace
from real_pair import EXL3, Living, opened

from tided.engine.budget import BudgetAsk, Forecast, Nodes, refusal
from tided.engine.build import open_model
from tided.engine.types import Failed, Request, Sampling
from tided.errors import PairError, RequestError
from tided.experts import placement
from tided.settings import Tide
from tided.tide.budget import rebudget
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.kinds import kinds_of
from tided.tide.pilot import Pilot
from tided.tide.planner import boot_set, boot_set_of_bytes

SEEDS = range(int(os.environ.get("TIDE_BUDGET_SEEDS", "1")))  # more than one are for a person who waits
LEAST = 30  # 10 layers of top-3 of the golden model


def ask(name, fidelity="fast", begin=0, tokens=40, answer=24, seed=None) -> Request:
    prompt = [(37 * i * i + 11 * i + begin) % 512 for i in range(begin, begin + tokens)]
    sampling = Sampling(temperature=0.0) if seed is None else Sampling(temperature=1.0, seed=seed)
    return Request(
        request_id=name, prompt_ids=prompt, sampling=sampling, max_tokens=answer, stop_ids=(), fidelity=fidelity
    )


def model(ranks=1, resident=60, path=None, **tide):
    one = opened(ranks, resident, **({} if path is None else {"path": path}))
    return open_model(replace(one.settings, tide=Tide(**{"sync_slots": 4} | tide)))


def pilot_of(one, folder: Path) -> Pilot:
    shape = RouterShape(one.shape.moe_layers, one.shape.experts_per_layer, one.shape.top_k)
    history = History.open(folder, "m", shape, record=True)
    return Pilot(history, None, one.settings.tide, shape, one.settings.experts.resident, one.kinds)


def told(pair: Living, resident=None, nbytes=None, apply=True, free=None) -> Forecast | RequestError:
    heard = []
    pair.engine.ask_budget(BudgetAsk(resident, nbytes, apply, free or {}, heard.append))
    pair.engine.take_in()
    (answer,) = heard
    return answer


def changed(pair: Living, resident: int, timeout_turns=4000) -> None:
    answer = told(pair, resident)
    assert isinstance(answer, Forecast), answer
    assert answer.applied
    for _ in range(timeout_turns):
        pair.turn()
        if not pair.engine.budgets.changing:
            return
        assert not pair.faults, pair.faults
    raise AssertionError("the change does not end")


def begun(pair: Living, name: str) -> None:
    while not pair.tokens(name):
        pair.turn()
        assert not pair.faults, pair.faults
    assert len(pair.tokens(name)) < 12


def everywhere(pair: Living) -> list[int]:
    """Residents of each rank, which hold the same and have their books in order."""
    pair.rest()
    pair.check()
    sets = [rank.residents.pairs for rank in pair.ranks]
    assert all(one == sets[0] for one in sets)
    if pair.pilot is not None:
        assert pair.pilot.residents == sets[0]
    for rank in pair.ranks:
        assert rank.residents.count == sum(rank.residents.places.residents)
        assert rank.residents.arena_bytes == rank.residents.arena.held_bytes
    return [len(one) for one in sets]


@pytest.fixture(scope="module")
def whole():
    """Answers with every expert resident, by ranks."""
    found = {}
    for ranks in (1, 2):
        pair = Living(model(ranks, 80))
        pair.submit(ask("x", "exact"))
        pair.rest()
        found[ranks] = pair.tokens("x")
        pair.close()
    return found


@pytest.mark.parametrize(("ranks", "ring"), [(1, 0), (1, 6), (2, 6)])
def test_a_budget_shrinks_and_grows_while_answers_stream(whole, tmp_path, ranks, ring):
    one = model(ranks, 60, hot_ring_slots=ring)
    pair = Living(one, pilot_of(one, tmp_path))
    full = pair.ranks[0].residents.arena_bytes
    record = one.largest_bytes
    pair.submit(ask("x", "exact"), ask("y", begin=20, seed=3))
    begun(pair, "y")
    changed(pair, 40)
    assert pair.engine.living == (40, 60)
    assert pair.tokens("y"), "the answer went on"
    assert pair.ranks[0].residents.arena_bytes == full - 20 * record
    assert everywhere(pair) == [40] * ranks
    assert pair.tokens("x") == whole[ranks], "an exact answer does not depend on what is resident"
    assert len(pair.tokens("y")) == 24
    pair.submit(ask("x2", "exact"), ask("y2", begin=20, seed=3))
    begun(pair, "y2")
    changed(pair, 75)
    assert everywhere(pair) == [75] * ranks
    assert pair.tokens("x2") == whole[ranks]
    assert len(pair.tokens("y2")) == 24
    changed(pair, 80)
    pair.submit(ask("x3", "exact"))
    assert everywhere(pair) == [80] * ranks
    assert pair.tokens("x3") == whole[ranks]
    assert not any(isinstance(event, Failed) for event in pair.events)
    pair.close()
    assert pair.faults == []


def test_a_change_repeats_on_the_same_traffic(tmp_path):
    """What an answer is under a set does not depend on how the set came to be: the mask alone counts."""
    answers = []
    for budgets in ([], [40, 70], [80, 35, 60]):
        one = model(1, 60, sensitivity="off")
        pair = Living(one)
        for resident in [*budgets, 50]:
            changed(pair, resident)
        pairs = everywhere(pair) and pair.ranks[0].residents.pairs
        pair.submit(ask("a", seed=4))
        pair.rest()
        answers.append((pairs, pair.tokens("a")))
        pair.close()
    same = [tokens for pairs, tokens in answers if pairs == answers[0][0]]
    assert all(tokens == same[0] for tokens in same)
    assert all(len(pairs) == 50 for pairs, _ in answers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path, ranks):
    pair = Living(model(ranks, 60))
    pair.engine.budgets.nodes = Nodes(("",) * ranks, keep_bytes=1000)
    before = [(rank.residents.state(), rank.residents.arena_bytes) for rank in pair.ranks]
    record = pair.ranks[0].residents.places.nbytes[0]
    for resident, why in ((LEAST - 1, "30 to 80"), (81, "30 to 80"), (0, "30 to 80")):
        refused = told(pair, resident)
        assert isinstance(refused, RequestError)
        assert why in refused.what
    room = (10 * record + pair.ranks[0].executor.caching.prefixes.room_bytes) * ranks + 1000
    short = told(pair, 70, free={0: room - 1})
    assert isinstance(short, RequestError)
    assert "must stay" in short.what
    enough = told(pair, 70, apply=False, free={0: room})
    assert isinstance(enough, Forecast)
    assert not enough.applied
    assert isinstance(told(pair, 40, apply=False, free={0: 0}), Forecast), "to give memory back none is needed"
    pair.turn(20)
    assert [(rank.residents.state(), rank.residents.arena_bytes) for rank in pair.ranks] == before
    assert everywhere(pair) == [60] * ranks
    pair.close()


@pytest.mark.parametrize("by_writing", [True, False])
def test_places_that_are_promised_are_not_promised_again(by_writing):
    """One turn after the first change its places are there and mostly free, and the node's memory is free still."""
    pair = Living(model(1, 40))
    residents = pair.ranks[0].residents
    residents.arena._memory.by_writing = by_writing
    record = residents.places.nbytes[0]
    room = 25 * record + pair.ranks[0].executor.caching.prefixes.room_bytes
    assert told(pair, 60, free={0: room}).applied
    pair.turn(2)
    assert pair.engine.budgets.changing
    taken = (residents.count if by_writing else 60) - 40
    assert taken < 20 or not by_writing
    left = room - taken * record
    if by_writing:
        refused = told(pair, 66, free={0: left})
        assert isinstance(refused, RequestError)
        assert "must stay" in refused.what
    assert told(pair, 65, free={0: left}).applied, "as much as there is still room for"
    assert everywhere(pair) == [65]
    pair.close()


def test_what_a_change_takes_counts_on_each_rank_of_a_node():
    nodes = Nodes(("a", "b", "a"), keep_bytes=5)
    nodes.refuse_growth(13, {0: 2 * 13 + 5, 1: 13 + 5})
    for rank, free in ((0, 2 * 13 + 4), (1, 13 + 4)):
        with pytest.raises(RequestError, match=f"rank {rank}'s node"):
            nodes.refuse_growth(13, {rank: free})


def test_the_forecast_tells_what_the_system_gives_and_gets_back(monkeypatch):
    """A device that reads the system's memory has it in segments, so that a small change gives nothing back."""
    pair = Living(model(1, 60))
    arena, record = pair.ranks[0].residents.arena, pair.ranks[0].residents.places.nbytes[0]
    segment = 16 * record
    monkeypatch.setattr(arena._memory, "held", lambda used: placement._rounded_bytes(used, segment, arena.data.nbytes))
    before = arena.held_bytes
    assert before > sum(one.slots * one.nbytes for one in arena.classes)
    for resident in (59, 57, 40, 61, 75):
        told_of = told(pair, resident, apply=False)
        assert told_of.bytes - told_of.bytes_now == (resident - 60) * record
        assert told_of.arena_bytes_now == before
        assert told_of.arena_bytes % segment in (0, arena.data.nbytes % segment)
        assert abs(told_of.arena_bytes - before - (resident - 60) * record) < 2 * segment
    assert told(pair, 59, apply=False).arena_bytes == before
    more = told(pair, 75, apply=False)
    keep = pair.ranks[0].executor.caching.prefixes.room_bytes + more.arena_bytes - before
    assert isinstance(told(pair, 75, apply=False, free={0: keep}), Forecast)
    assert isinstance(told(pair, 75, apply=False, free={0: keep - 1}), RequestError), "segments are what it takes"
    changed(pair, 40)
    assert arena.held_bytes == told(pair, apply=False).arena_bytes < before
    pair.close()


def test_where_memory_cannot_be_given_back_the_budget_stands():
    """A device with memory of its own."""
    pair = Living(model(1, 60))
    pair.ranks[0].residents.arena._memory = None
    refused = told(pair, 40)
    assert isinstance(refused, RequestError)
    assert "one allocation of a device with memory of its own" in refused.what
    assert not told(pair, apply=False).may_change
    assert everywhere(pair) == [60]
    pair.close()


def test_places_change_on_all_ranks_or_on_none(monkeypatch, caplog):
    """Addresses are counted as memory on one node: slots would lie elsewhere on its rank."""
    real, made = placement.Reserved, []

    def second_refuses(nbytes):
        made.append(nbytes)
        if len(made) == 2:
            raise OSError(12, "Cannot allocate memory")
        return real(nbytes)

    monkeypatch.setattr(placement, "Reserved", second_refuses)
    pair = Living(model(2, 60))
    assert len(made) == 2
    first, second = (rank.residents for rank in pair.ranks)
    assert first.places == second.places
    assert first.arena.urgent == second.arena.urgent
    assert first.state() == second.state()
    assert "cannot change while serving: 1 of the ranks cannot" in caplog.text
    pair.submit(ask("x", "exact"), ask("y", seed=3))
    pair.rest()
    assert len(pair.tokens("x")) == len(pair.tokens("y")) == 24
    refused = told(pair, 40)
    assert isinstance(refused, RequestError)
    assert "one allocation" in refused.what
    assert everywhere(pair) == [60, 60]
    pair.close()
    assert pair.faults == []


def test_a_second_change_waits_for_the_first():
    pair = Living(model(1, 60))
    assert isinstance(told(pair, 40), Forecast)
    second = told(pair, 50)
    assert isinstance(second, RequestError)
    assert second.status == 409
    pair.rest()
    assert everywhere(pair) == [40]
    assert isinstance(told(pair, 50), Forecast)
    assert everywhere(pair) == [50]
    pair.close()


def test_what_became_impossible_since_it_was_asked_is_dropped(monkeypatch):
    pair = Living(model(1, 60, hot_ring_slots=4))
    budgets = pair.engine.budgets
    with monkeypatch.context() as patched:
        patched.setattr(budgets, "_budget", lambda resident: (_ for _ in ()).throw(refusal("no room")))
        budgets.ask(40)
        pair.turn(3)
    assert not budgets.changing
    assert pair.engine.living == (60, 60)
    pair.submit(ask("a"))
    pair.rest()
    assert pair.engine.motion.count.issued > 0, "reads begin again"
    assert everywhere(pair) == [60]
    pair.close()


def test_the_forecast_is_what_happens(tmp_path):
    one = model(1, 60)
    pilot = pilot_of(one, tmp_path)
    pair = Living(one, pilot)
    pair.submit(ask("a"), ask("b", begin=9))
    pair.rest()
    record = one.largest_bytes
    now = told(pair, apply=False)
    assert (now.resident, now.leave, now.come, now.bytes) == (60, 0, 0, 60 * record)
    assert now.covered == now.covered_now
    less, more = told(pair, 40, apply=False), told(pair, nbytes=70 * record + 5, apply=False)
    assert (less.leave, less.come, less.bytes) == (20, 0, 40 * record)
    assert (more.resident, more.leave, more.come) == (70, 0, 10)
    assert less.covered < now.covered < more.covered <= 1
    changed(pair, 70)
    assert everywhere(pair) == [70]
    assert told(pair, apply=False).covered_now == pytest.approx(more.covered, abs=1e-4)
    pair.close()


def test_who_follows_a_change_costs_no_forecast(tmp_path, monkeypatch):
    """The whole one takes longer than a decode step: it looks at every pair."""
    one = model(1, 40)
    pair = Living(one, pilot_of(one, tmp_path))
    pair.submit(ask("a"))
    pair.rest()
    assert told(pair, 60).applied
    pair.turn(2)
    budgets, residents = pair.engine.budgets, pair.ranks[0].residents
    whole = budgets.forecast(60)
    with monkeypatch.context() as patched:
        patched.setattr(budgets, "_filled", lambda *_: pytest.fail("the best set was looked for"))
        patched.setattr(type(residents), "pairs", property(lambda _: pytest.fail("every resident was looked at")))
        now = told(pair, apply=False)
    assert now.changing
    assert (now.covered, now.come) == (now.covered_now, 60 - now.held)
    assert replace(now, covered=whole.covered) == whole
    assert everywhere(pair) == [60]
    pair.close()


def test_where_sizes_differ_a_budget_is_bytes_of_mean_experts(tmp_path):
    one = model(1, 12, path=EXL3)
    pair = Living(one, pilot_of(one, tmp_path))
    whole = one.kinds.sizes
    pair.submit(ask("a", "exact"))
    for resident in (7, 16, 5, 11):
        changed(pair, resident)
        everywhere(pair)
        held = sum(int(whole[at]) for at in pair.ranks[0].residents.pairs)
        budget = one.kinds.budget_bytes(resident)
        assert held <= budget
        smallest = min((int(whole[at]) for at in one.all_pairs if at not in pair.ranks[0].residents.pairs), default=0)
        assert budget - held < max(smallest, whole.max())
    assert len(pair.tokens("a")) == 24
    pair.close()
    assert pair.faults == []


def resident_bytes_of_process() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_that_is_given_up_is_the_systems_again():
    """With slots of a megabyte, so that what else the process does is small beside them: within 5 %."""
    import torch

    from kernels.record import ExpertRecord
    from tided.experts.arena import Arena

    arena = Arena(ExpertRecord(1024, 640, 1), 60, 4, torch.device("cpu"), most=100)
    nbytes = arena.places.nbytes[0]
    assert nbytes > 1_000_000
    for at in range(60):
        slot = arena.take()
        arena.load(slot, lambda out, at=at: out.__setitem__(slice(None), bytes([at + 1]) * nbytes))
        arena.hold({(0, at): slot})
    for slot in [arena.take() for _ in range(4)]:
        arena.load(slot, lambda out: out.__setitem__(slice(None), b"s" * nbytes))
        arena.release(slot)
    before = resident_bytes_of_process()
    for at in range(0, 60, 2):
        arena.drop((0, at))
    moved = arena.resize([20 + 10])
    arena.check()
    given = before - resident_bytes_of_process()
    assert abs(given - 30 * nbytes) < 0.05 * 30 * nbytes
    assert moved, "what lay behind has moved before"
    for at in range(1, 60, 2):
        assert arena.data[arena.slot_of((0, at))].eq(at + 1).all(), "and its bytes with it"
    arena.resize([100])
    arena.check()
    assert resident_bytes_of_process() < before - 25 * nbytes, "places that nobody has take no memory"
    with pytest.raises(PairError, match="at most"):
        arena.resize([101])
    with pytest.raises(PairError):
        arena.resize([2])
    arena.check()


@given(st.data())
def test_the_best_stay_and_come_and_no_floor_breaks(data):
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 8))
    floor = data.draw(st.integers(1, experts))
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = draw.random((layers, experts))
    mixed = data.draw(st.booleans())
    sizes = draw.choice([4096, 8192, 12288], size=(layers, experts)).astype(np.int64)
    kinds = kinds_of(sizes, 2, 0) if mixed else None
    most = [layers * experts] if kinds is None else np.bincount(kinds.of.ravel()).tolist()
    start, target = (data.draw(st.integers(layers * floor, layers * experts)) for _ in range(2))
    weights = np.ones_like(sizes) if kinds is None else sizes

    def allowed(resident: int) -> int:
        return resident if kinds is None else kinds.budget_bytes(resident)

    try:
        before = (
            boot_set(scores, start, floor) if kinds is None else boot_set_of_bytes(scores, sizes, allowed(start), floor)
        )
        found = rebudget(scores, before, target, floor, most, kinds)
    except ValueError:
        assert mixed, "floors of experts that are large do not fit into mean ones' bytes"
        return
    left = set(before) - set(found.evict)
    assert len(left) == len(before) - len(found.evict)
    assert sum(int(weights[pair]) for pair in left) <= allowed(target) or not found.evict
    assert min(np.bincount([layer for layer, _ in left], minlength=layers)) >= floor
    of = np.zeros((layers, experts), np.int64) if kinds is None else kinds.of
    by_kind = np.bincount([of[pair] for pair in left], minlength=len(most))
    assert all(count <= places <= limit for count, places, limit in zip(by_kind, found.places, most, strict=True))
    if found.evict:
        assert tuple(by_kind) == found.places
        last = found.evict[-1]
        assert sum(int(weights[pair]) for pair in (*left, last)) > allowed(target), "nobody leaves for nothing"
    if kinds is None:
        assert sum(found.places) == target
        worst = max((scores[pair] for pair in found.evict), default=-1.0)
        free = [p for p in left if sum(q[0] == p[0] for q in left) > floor]
        assert all(scores[pair] >= worst for pair in free)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_budgets_requests_and_reads_leaves_the_books_in_order(tmp_path, whole, seed):
    """Two ranks with a ring: swaps, hot reads and reads before use beside changes of the budget."""
    draw = random.Random(seed)
    one = model(2, 50, hot_ring_slots=4, replan_decode_tokens=8, min_prefill_tokens=1)
    pair = Living(one, pilot_of(one, tmp_path))
    exact = []
    for step in range(20):
        act = draw.choice(["ask", "exact", "budget", "budget", "turn", "turn", "rest"])
        if act in ("ask", "exact"):
            name = f"{act}{step}"
            pair.submit(ask(name, "exact") if act == "exact" else ask(name, begin=draw.randrange(60), seed=step))
            exact += [name] if act == "exact" else []
        elif act == "budget":
            told(pair, draw.randrange(LEAST - 2, 83))
        elif act == "rest":
            pair.rest()
            pair.check()
        pair.turn(draw.randrange(12))
        assert not pair.faults, pair.faults
    pair.rest()
    for _ in range(400):
        if not pair.engine.budgets.changing:
            break
        pair.turn()
    pair.rest()
    pair.check()
    for rank in pair.ranks:
        at_rest(rank)
    assert pair.ranks[0].residents.state() == pair.ranks[1].residents.state()
    assert pair.pilot.residents == pair.ranks[0].residents.pairs
    assert all(pair.tokens(name) == whole[2] for name in exact)
    pair.close()
    assert pair.faults == []
