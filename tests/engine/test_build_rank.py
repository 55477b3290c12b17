"""A rank is refused in a second or built whole."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from real_pair import GLM, GOLDEN, opened

from kernels.numerics import WEIGHTS_ONLY
from kernels.record import ExpertRecord
from tided.engine.build import build_rank, check_device, draft_depths, open_model, scheduler_limits
from tided.engine.offline import first_pairs, settings_of, teacher_forced
from tided.engine.packing import pack_checkpoint
from tided.errors import ConfigError, DataError, PairError
from tided.experts.io import Priority
from tided.experts.pack import PackSource
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts, Tide

EXL3 = GLM.parent / "exl3-checkpoint"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"experts": Experts(resident=29)}, r"experts\.resident = 29: this model needs 30 to 80"),
        ({"experts": Experts(resident=81)}, r"experts\.resident = 81: this model needs 30 to 80"),
        ({"cache": Cache(context_tokens=1025, pool_tokens=2048)}, r"cache\.context_tokens = 1025: .* 1024 positions"),
        (
            {"cache": Cache(context_tokens=64, pool_tokens=63)},
            r"pool_tokens = 63: .* cache\.context_tokens = 64",
        ),
    ],
)
def test_settings_that_the_model_cannot_be_served_with_are_named(change, match):
    with pytest.raises(ConfigError, match=match):
        open_model(replace(settings_of(GOLDEN), **change))


def test_experts_without_kernels_are_refused_on_a_gpu():
    """bf16 and MXFP4 of a model that takes no FP8 inputs; EXL3 has kernels for it, and MXFP4 for the other model."""
    on_cuda = Engine(device="cuda")
    with pytest.raises(ConfigError, match="on CUDA this build serves this model's experts in EXL3, not in BF16"):
        open_model(replace(settings_of(GLM), engine=on_cuda))
    for path in (EXL3, GOLDEN):
        open_model(replace(settings_of(path), engine=on_cuda))
    exact = settings_of(GLM)
    open_model(replace(exact, engine=on_cuda, model=replace(exact.model, numerics="fp32")))
    native = SimpleNamespace(engine=on_cuda, model=exact.model)
    with pytest.raises(ConfigError, match="not in MXFP4"):
        check_device(native, ExpertRecord(64, 64, 1, "mxfp4"), WEIGHTS_ONLY)


@pytest.mark.parametrize("resident", [30, 80])
def test_the_ends_of_the_budget_are_inside(resident):
    model = opened(resident=resident)
    told = []
    rank = build_rank(model, Alone(), first_pairs(model), lambda *progress: told.append(progress))
    assert len(rank.residents.pairs) == resident
    assert rank.bank.slots.shape == (80 + 3 + 8 + 1, model.record.slot_bytes)  # addresses for all; spare, urgent, null
    assert told[0] == ("dense weights", 0, 1)
    assert told[-1] == ("experts", resident, resident)
    rank.residents.check_integrity()


def test_a_set_that_is_not_the_budget_is_not_loaded():
    model = opened(resident=40)
    with pytest.raises(PairError):
        build_rank(model, Alone(), opened(resident=41).all_pairs[:41], lambda *_: None)


def test_a_floor_that_the_budget_does_not_hold_is_named():
    model = open_model(replace(settings_of(GOLDEN), experts=Experts(resident=40), tide=Tide(floor_per_layer=5)))
    with pytest.raises(ConfigError, match="floor_per_layer"):
        first_pairs(model)


def test_the_scheduler_gets_every_limit_from_the_profile():
    settings = replace(
        settings_of(GOLDEN),
        experts=Experts(resident=40, spare_slots=5),
        cache=Cache(context_tokens=100, pool_tokens=300),
        engine=Engine(lanes=3, queue=7, guard_every_steps=11, prefill_share=0.2),
        tide=Tide(look_rows=9),
    )
    limits = scheduler_limits(settings)
    assert (limits.lanes, limits.queue, limits.context_tokens, limits.pool_tokens) == (3, 7, 100, 300)
    assert (limits.prefill_share, limits.look_rows) == (0.2, 9)
    assert (limits.page_tokens, limits.chunk_tokens, limits.swaps, limits.guard_every_steps) == (128, 512, 5, 11)
    assert (limits.draft_tokens, scheduler_limits(settings, 5).draft_tokens) == (0, 5)


@pytest.mark.parametrize(
    ("draft", "mode", "fixed"), [("off", "off", 0), ("3", "fixed", 3), ("confidence", "confidence", 0)]
)
def test_the_policy_of_drafts_is_the_profiles(draft, mode, fixed):
    settings = replace(settings_of(GOLDEN), engine=Engine(draft=draft))
    depths = draft_depths(settings, SimpleNamespace(draft_tokens=5, drafts_one_by_one=False))
    assert (depths.mode, depths.fixed, depths.most) == (mode, fixed, 5)


def test_what_a_proposal_costs_is_learned_as_the_model_makes_it():
    settings = replace(settings_of(GOLDEN), engine=Engine(draft="acceptance"))
    for one_by_one in (False, True):
        model = SimpleNamespace(draft_tokens=7, drafts_one_by_one=one_by_one)
        assert draft_depths(settings, model)._one_by_one == one_by_one


def from_packs(directory, verify=False):
    model = opened(resident=40)
    experts = replace(model.settings.experts, source="pack", pack_dir=str(directory), verify_reads=verify)
    return open_model(replace(model.settings, experts=experts))


@pytest.mark.parametrize("verify", [False, True])
def test_a_rank_from_a_pack_computes_the_same_bits_as_one_from_the_checkpoint(tmp_path, verify):
    pack_checkpoint(GOLDEN, 1, None, tmp_path, lambda done, total: None)
    ids, logits = torch.arange(24), []
    for model in (opened(resident=40), from_packs(tmp_path, verify)):
        rank = build_rank(model, Alone(), first_pairs(model), lambda *_: None)
        assert isinstance(rank.reads.source, PackSource) == (model.settings.experts.source == "pack")
        assert rank.reads.io.counts[Priority.SWAP].reads == 40
        assert rank.reads.source.stats.records == 40
        assert rank.reads.about().items() >= {
            "source": model.settings.experts.source, "in_flight_at_boot": 4, "in_flight_while_serving": 1, "curve": [],
        }.items()  # fmt: skip
        assert "too few" in rank.reads.about()["not_measured"]
        logits.append(teacher_forced(rank.model, ids, 4, 16))
        rank.reads.close()
    assert torch.equal(*logits)


def test_only_mxfp4_and_exl3_experts_are_packed(tmp_path):
    with pytest.raises(DataError, match="a pack holds MXFP4 or EXL3 experts, these are bf16"):
        pack_checkpoint(GLM, 2, None, tmp_path, lambda done, total: None)
    assert not list(tmp_path.iterdir())


def test_verify_reads_refuses_a_pack_with_a_flipped_byte_at_the_start(tmp_path):
    [path] = pack_checkpoint(GOLDEN, 1, None, tmp_path, lambda done, total: None)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    model = from_packs(tmp_path, verify=True)
    with pytest.raises(DataError, match=rf"{path.name}:\d+: expert 7 of layer 9 is damaged"):
        build_rank(model, Alone(), damaged_pairs(), lambda *_: None)


def damaged_pairs():
    """40 pairs, the last expert of the last layer among them."""
    return [(layer, expert) for layer in range(10) for expert in range(4, 8)]


def test_a_pack_of_another_checkpoint_is_refused(tmp_path):
    [path] = pack_checkpoint(GOLDEN, 1, None, tmp_path / "packs", lambda done, total: None)
    copy = tmp_path / "copy"
    shutil.copytree(GOLDEN, copy)
    config = copy / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "x",', 1))
    model = from_packs(path.parent)
    other = open_model(replace(model.settings, model=replace(model.settings.model, path=str(copy))))
    with pytest.raises(DataError, match="is a pack of another checkpoint"):
        build_rank(other, Alone(), first_pairs(other), lambda *_: None)
