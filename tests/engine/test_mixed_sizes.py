"""Experts whose records differ in size, behind the real engine: EXL3 as its converter writes it, 2 to 4 bits."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from real_pair import EXL3, Served, opened

from tided.engine.build import OpenedModel, build_rank, open_model
from tided.engine.figures import residency_of
from tided.engine.memory import needs
from tided.engine.offline import first_pairs
from tided.engine.packing import pack_checkpoint
from tided.engine.slots import arena_bytes
from tided.engine.types import Request, Sampling
from tided.errors import ConfigError
from tided.experts.pack import PackSource
from tided.models.parallel import Alone
from tided.settings import Tide
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot

LAYERS, EXPERTS, LEAST = 2, 8, 4  # top-2 of 2 layers
ALL = LAYERS * EXPERTS


def ask(name, fidelity="fast", begin=0, tokens=40, answer=12, **sampling) -> Request:
    prompt = [(37 * i * i + 11 * i + begin) % 512 for i in range(begin, begin + tokens)]
    drawn = Sampling(**{"temperature": 0.0} | sampling)
    return Request(
        request_id=name, prompt_ids=prompt, sampling=drawn, max_tokens=answer, stop_ids=(), fidelity=fidelity
    )


def traffic(fidelity) -> list[Request]:
    return [
        ask("a", fidelity),
        ask("b", fidelity, begin=30, tokens=17, temperature=1.0, seed=5),
        ask("c", fidelity, begin=50, tokens=33),
        ask("d", fidelity, begin=7, tokens=3, temperature=0.8, seed=9),
    ]


def model(ranks=1, resident=ALL, numerics="native", tide=None, **engine) -> OpenedModel:
    one = opened(ranks, resident, numerics, path=EXL3, **engine)
    return one if tide is None else open_model(replace(one.settings, tide=Tide(**tide)))


@pytest.fixture(scope="module")
def whole():
    """Answers with every expert resident, by ranks: sums of two ranks round in another place."""
    served = {ranks: Served(model(ranks), traffic("fast")) for ranks in (1, 2)}
    return {ranks: {name: one.tokens(name) for name in "abcd"} for ranks, one in served.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("resident", "slots"), [(LEAST + 2, 1), (9, 3)])
def test_exact_is_all_resident_token_for_token(whole, ranks, resident, slots):
    served = Served(model(ranks, resident, tide={"sync_slots": slots}), traffic("exact"))
    assert served.faults == []
    assert {name: served.tokens(name) for name in "abcd"} == whole[ranks]
    assert all(served.stats(name)["substituted_weight_share"] == 0 for name in "abcd")


@pytest.mark.parametrize(("ranks", "ring"), [(1, 3), (2, 0), (2, 3)])
def test_plans_and_hot_reads_exchange_records_of_one_size(tmp_path, ranks, ring):
    """Ranks agree (the guard compares them every few steps), books balance, and every slot holds its pair's bytes."""
    one = model(ranks, 6, tide={"hot_ring_slots": ring, "replan_decode_tokens": 4, "sensitivity": "max"})
    shape = RouterShape(LAYERS, EXPERTS, 2)
    pilot = Pilot(History.open(tmp_path, "ab" * 32, shape, False), None, one.settings.tide, shape, 6, one.kinds)
    before = [one.kinds.of[pair] for pair in pilot.boot_pairs()]
    served = Served(one, [ask(f"r{i}", begin=40 * i, tokens=30, answer=25) for i in range(6)], pilot)
    assert served.faults == []
    moved = served.engine.motion.count.issued if ring else served.ranks[0].residents.generation
    assert moved > 0, "nothing was read: this test shows nothing"
    for rank in served.ranks:
        residents, arena = rank.residents, rank.residents.arena
        residents.check_integrity()
        assert sorted(one.kinds.of[pair] for pair in residents.pairs) == sorted(before)
        nbytes = np.array(one.kinds.nbytes)[one.kinds.of]
        held = sum(nbytes[pair] for pair in residents.pairs)
        assert residents.bytes_share == pytest.approx(held / nbytes.sum())
        assert residency_of(rank.executor).bytes_share == round(residents.bytes_share, 4)
        for pair in arena.pairs:
            nbytes = one.kinds.nbytes[one.kinds.of[pair]]
            held = arena.data.view(-1)[arena.slot_of(pair) * arena.data.shape[1] :][:nbytes]
            room = torch.zeros(nbytes, dtype=torch.uint8)
            rank.reads.source.read(*pair, room.numpy().data)
            assert torch.equal(held, room), pair


def test_packs_serve_what_the_checkpoint_serves(tmp_path, whole):
    pack_checkpoint(EXL3, 2, None, tmp_path, lambda *_: None)
    one = model(2, 9, tide={"sync_slots": 2})
    experts = replace(one.settings.experts, source="pack", pack_dir=str(tmp_path), verify_reads=True)
    packed = open_model(replace(one.settings, experts=experts))
    served = Served(packed, traffic("exact"))
    assert isinstance(served.ranks[1].reads.source, PackSource)
    assert {name: served.tokens(name) for name in "abcd"} == whole[2]


def test_a_budget_is_that_many_mean_records_worth_of_bytes():
    one = model(resident=9)
    sizes, pairs = one.kinds.sizes, first_pairs(one)
    budget = 9 * sizes.sum() // ALL
    held = sum(int(sizes[pair]) for pair in pairs)
    assert budget - sizes.min() < held <= budget
    arena = build_rank(one, Alone(), pairs, lambda *_: None).residents.arena
    assert sum(kind.residents * kind.nbytes for kind in arena.classes) <= one.kinds.most_bytes(9)
    assert arena.held_bytes <= arena_bytes(one) == sum(need.nbytes for need in needs(one, 0)[:2])


@pytest.mark.parametrize("resident", range(5, 16))
def test_any_number_of_ranks_keeps_the_same_experts(resident):
    assert first_pairs(model(1, resident)) == first_pairs(model(2, resident))


def test_fewer_bytes_than_the_floors_need_are_named():
    """The first two experts of each layer are the large ones."""
    one, wide = model(resident=LEAST), np.where(np.arange(EXPERTS) < 2, 4, 0)
    kinds = one.kinds._replace(of=np.array([wide, wide]))
    other = OpenedModel(one.settings, one.checkpoint, one.family, one.shape, one.record, kinds)
    with pytest.raises(ConfigError, match="bytes are too few for 2 experts in each of 2 layers"):
        first_pairs(other)


def test_the_first_set_without_a_seed_is_fair_to_layers():
    of_layers = np.bincount([layer for layer, _ in first_pairs(model(resident=10))], minlength=LAYERS)
    assert of_layers.min() >= 4
