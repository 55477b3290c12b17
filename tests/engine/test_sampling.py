"""Draws follow the distribution, repeat, and stay sane at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tided.engine.sampling import (
    _bound_there,
    _landing,
    _units,
    clocks,
    draw,
    least_weight,
    noise,
    philox,
    sample,
    sample_there,
)
from tided.engine.types import Sampling
from tided.errors import PairError


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # published known answers of Random123 for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox(counter, key) == expected


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def histogram(logits: torch.Tensor, sampling: dict, draws: int) -> torch.Tensor:
    counts = torch.zeros(len(logits))
    for position in range(draws):
        counts[draw(logits, Sampling(**sampling), noise(7, position))] += 1
    return counts


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, 3.0, 2.5])
    counts = histogram(logits, {"temperature": 1.3}, 6000)
    expected = torch.softmax(logits / 1.3, dim=0) * 6000
    assert chi_square(counts, expected) < 24.3  # 7 degrees of freedom, p = 0.001


def test_filtered_draws_follow_the_filtered_softmax():
    logits = torch.tensor([4.0, 3.5, 3.0, 2.0, 0.0, -1.0])
    counts = histogram(logits, {"temperature": 1.0, "top_k": 4, "top_p": 0.9}, 4000)
    kept = torch.softmax(logits[:3], dim=0)  # of the four: 0.50 + 0.30 + 0.18 reach 0.9 with the third
    assert counts[3:].sum() == 0
    assert chi_square(counts[:3], kept * 4000) < 13.8  # 2 degrees of freedom, p = 0.001


def test_top_p_counts_what_top_k_left():
    logits = torch.log(torch.tensor([8.0, 4.0, 2.0, 1.0]))
    counts = histogram(logits, {"top_k": 2, "top_p": 0.6}, 200)
    assert counts.tolist() == [200, 0, 0, 0]  # 8 of the 12 that top-k left reach 0.6; of all 15 they would not


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.06, 0.04, 0.1]))
    counts = histogram(logits, {"min_p": 0.19}, 500)
    assert (counts > 0).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"top_p": 1e-12},
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"min_p": 7.0},
        {"temperature": 1e-6, "top_k": 3, "top_p": 1e-9, "min_p": 0.9},
    ],
)
def test_extremes_are_greedy(sampling):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 4
    best = int(logits.argmax())
    assert all(draw(logits, Sampling(**sampling), bits) == best for bits in (0, 1 << 63, (1 << 64) - 1))


@pytest.mark.parametrize("sampling", [{"top_k": 10**9}, {"top_p": 1.0}, {"top_k": 0}, {"temperature": math.inf}])
def test_open_filters_keep_every_token_and_every_noise_is_in_range(sampling):
    logits = torch.zeros(50)
    assert {draw(logits, Sampling(**sampling), noise(1, position)) for position in range(1000)} == set(range(50))
    assert all(0 <= draw(logits, Sampling(**sampling), bits) < 50 for bits in (0, 1 << 63, (1 << 64) - 1))


def test_a_wide_nucleus_over_a_large_vocabulary():
    logits = torch.linspace(1e-3, 0, 20_000)
    drawn = [draw(logits, Sampling(top_p=0.5), noise(3, position)) for position in range(200)]
    assert 9_000 < max(drawn) < 10_100


def test_clocks_are_splitmix64_and_exponential():
    """Published first outputs of the generator for the seed 0; then the law of the clocks."""
    words = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    expected = [-math.log(((word >> 11) + 0.5) * 2**-53) for word in words]
    assert clocks(0, torch.arange(3)).tolist() == pytest.approx(expected, rel=1e-15)
    ids = torch.tensor([7, 100_000, 3])
    assert clocks(5, ids).tolist() == [float(clocks(5, ids[i : i + 1])) for i in range(3)]
    times = torch.stack([clocks(noise(1, position), torch.arange(40)) for position in range(500)])
    counts = torch.histc((-times).exp(), bins=16, min=0, max=1).double()
    assert chi_square(counts, torch.full((16,), 20_000 / 16)) < 37.7  # 15 degrees of freedom, p = 0.001
    assert abs(float(torch.corrcoef(times.T).triu(1).abs().max())) < 0.2  # no two tokens' clocks go together


def test_equal_logits_pick_the_lowest_id():
    assert sample(torch.tensor([[1.0, 3.0, 3.0], [3.0, 3.0, 1.0]]), [(Sampling(temperature=0.0), 0)] * 2) == [1, 0]


def test_rows_do_not_know_each_other():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    rows = [(Sampling(seed=5), 9), (Sampling(seed=6, temperature=0.7), 4), (Sampling(temperature=0.0), 2)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(3)]


def test_seed_and_position_both_matter():
    logits = torch.zeros(1, 50_000)
    drawn = {sample(logits, [(Sampling(seed=seed), position)])[0] for seed in range(8) for position in range(8)}
    assert len(drawn) > 60
    assert noise(-1, 0) == noise((1 << 64) - 1, 0)
    assert noise(1, 0) != noise(1 << 32, 0)
    assert noise(1, 1 << 32) != noise(1, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_stop_the_pair(bad):
    logits = torch.zeros(2, 10)
    logits[1, 3] = bad
    with pytest.raises(PairError, match="no numbers"):
        sample(logits, [(Sampling(), 0), (Sampling(temperature=0.0), 0)])


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12])
def test_the_nucleus_is_that_of_a_full_sort(spread, top_p):
    for seed in range(5):
        weights = torch.exp(torch.randn(700, generator=torch.Generator().manual_seed(seed)).double() * spread)
        weights /= weights.max()
        ranked = weights.sort(descending=True).values
        reached = (ranked.cumsum(0) >= top_p * ranked.sum()).nonzero()
        expected = float(ranked[int(reached[0])] if len(reached) else ranked[-1])
        assert least_weight(weights, Sampling(top_p=top_p)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_nucleus_of_a_large_vocabulary_does_not_depend_on_an_order(spread):
    """Sums are of integers that all together fit."""
    weights = torch.exp(torch.randn(160_000, generator=torch.Generator().manual_seed(1)).double() * spread)
    weights /= weights.max()
    sums = [int(_units(weights[order], len(weights)).cumsum(0)[-1]) for order in (slice(None), torch.randperm(160_000))]
    assert sums[0] == sums[1] > 0
    assert sums[0] / 2 ** (62 - (160_000).bit_length()) == pytest.approx(float(weights.sum()), rel=1e-9)
    bound = least_weight(weights, Sampling(top_p=0.9))
    assert bound == float(_bound_there(weights, Sampling(top_p=0.9)))
    assert float(weights[weights >= bound].sum()) >= 0.9 * float(weights.sum()) * (1 - 1e-9)
    if spread:
        assert float(weights[weights > bound].sum()) < 0.9 * float(weights.sum())


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 5, 300]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
)
def test_what_a_device_draws_without_being_looked_at_is_what_a_cpu_draws(seed, sampling):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(seed)).mul_(4).round_(decimals=1)
    rows = [(replace(sampling, seed=seed + i), 17 + i) for i in range(3)]
    assert sample_there(logits, rows) == sample(logits, rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_device_s_logits_that_are_no_numbers_stop_the_pair_too(bad):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(PairError, match="no numbers"):
        sample_there(logits, [(Sampling(temperature=0), 0)] * 2)


def test_where_ids_land_is_written_to_within_inference_mode_and_outside(monkeypatch):
    """A warmed-up engine draws in that mode, and what it drew into is used again by who does not."""
    unpinned = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **how: unpinned(*size, **how))
    monkeypatch.setattr(torch.cuda, "Event", object)
    with torch.inference_mode():
        ids, _ = _landing(3)
        ids.copy_(torch.tensor([3, 1, 2]))
    assert ids.copy_(torch.tensor([4, 1, 5])).tolist() == [4, 1, 5]
