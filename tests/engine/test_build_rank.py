"""A rank is refused in a second or built whole."""

import pytest
from msgspec.structs import replace
from real_pair import GOLDEN, opened

from tided.engine.build import build_rank, open_model, scheduler_limits
from tided.engine.offline import first_pairs, settings_of
from tided.errors import ConfigError, PairError
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts, Tide


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


@pytest.mark.parametrize("resident", [30, 80])
def test_the_ends_of_the_budget_are_inside(resident):
    model = opened(resident=resident)
    told = []
    rank = build_rank(model, Alone(), first_pairs(model), lambda *progress: told.append(progress))
    assert len(rank.residents.pairs) == resident
    assert rank.bank.slots.shape == (resident + 3 + 1, model.record.slot_bytes)  # spare slots, and the null slot
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
        engine=Engine(lanes=3, queue=7, guard_every_steps=11),
    )
    limits = scheduler_limits(settings)
    assert (limits.lanes, limits.queue, limits.context_tokens, limits.pool_tokens) == (3, 7, 100, 300)
    assert (limits.page_tokens, limits.chunk_tokens, limits.swaps, limits.guard_every_steps) == (128, 512, 5, 11)
