"""What is drafted changes how fast tokens come, and never which: the law of a drafted answer is the target's."""

from itertools import product

import pytest
import torch

from tided.engine import drafting
from tided.engine.drafting import Chooser, block
from tided.engine.sampling import draw, noise, sample
from tided.engine.types import Request, Sampling
from tided.errors import PairError

P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
DRAFTERS = {
    "the same": P,
    "near": torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05]),
    "far": torch.tensor([0.02, 0.08, 0.1, 0.3, 0.5]),
    "sure and wrong": torch.tensor([1e-9, 1e-9, 1e-9, 1e-9, 1.0]),
    "a first token less": torch.tensor([0.4, 0.225, 0.175, 0.125, 0.075]),
}


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def request(**sampling) -> Request:
    stop_ids = sampling.pop("stop_ids", ())
    return Request(request_id="r", prompt_ids=[1], sampling=Sampling(**sampling), max_tokens=9, stop_ids=stop_ids)


def accepted(logits: torch.Tensor, drafts: list[int], asked: Request, first: int) -> list[int]:
    """As a step does: logits [1 + drafts, vocab], `first` the position of the token that the first row draws."""
    drawn = sample(logits, [(asked.sampling, first + row) for row in range(len(logits))])
    return drafting.accepted(drawn, drafts, asked.stop_ids)


def drawn_alike(p: torch.Tensor, q: torch.Tensor) -> float:
    """The algebra of a race: token i is first in both where its clock is below all others', at both ratios."""
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / ratios.sum(1)).sum())


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_of_what_comes_is_the_targets_whatever_is_drafted(name):
    """One draft a step, drawn as a step draws it; the token that comes first follows p and the one behind an accepted
    draft does too, and drafts stay as often as the algebra says."""
    draws, logits, q = 6000, P.log(), DRAFTERS[name].log()
    first, second, stayed = torch.zeros(5), torch.zeros(5), 0
    for seed in range(draws):
        choose = Chooser([Sampling(seed=seed)], [11])
        draft = choose(0, q[None]).tolist()
        tokens = accepted(torch.stack([logits, logits]), draft, request(seed=seed), 11)
        assert tokens[0] == draw(logits, Sampling(seed=seed), noise(seed, 11))
        first[tokens[0]] += 1
        if len(tokens) == 2:
            stayed += 1
            second[tokens[1]] += 1
    assert chi_square(first, P * draws) < 18.5  # 4 degrees of freedom, p = 0.001
    if stayed > 200:
        assert chi_square(second, P * stayed) < 18.5
    expected = drawn_alike(P.double(), DRAFTERS[name].double())
    assert abs(stayed / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5 + 1e-3


def test_integrated_over_the_noise_the_law_is_exact():
    """Clocks on a grid of quantiles: over all of their combinations the race draws p, up to the grid."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    grid = -torch.log((torch.arange(60, dtype=torch.float64) + 0.5) / 60)
    times = torch.cartesian_prod(grid, grid, grid)
    counts = torch.bincount((times / p).argmin(1), minlength=3).double() / len(times)
    assert torch.allclose(counts, p, atol=0.01)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_stay_at_least_as_often_as_the_distance_allows(name):
    q = DRAFTERS[name]
    distance = float((P - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) - 1e-9 <= drawn_alike(P, q) <= 1 - distance + 1e-6


def test_a_draft_is_kept_where_the_draw_says_so():
    """Every pattern of three drafts over greedy rows: as many as are right, and the next one."""
    truth = [4, 2, 7, 1]
    logits = torch.zeros(4, 9)
    logits[range(4), truth] = 5.0
    for right in product([True, False], repeat=3):
        drafts = [truth[i] if ok else 8 for i, ok in enumerate(right)]
        kept = next((i for i, ok in enumerate(right) if not ok), 3)
        assert accepted(logits, drafts, request(temperature=0.0), 5) == truth[: kept + 1]


def test_nothing_comes_behind_a_stop_id():
    logits = torch.zeros(3, 9)
    logits[range(3), [4, 2, 7]] = 5.0
    assert accepted(logits, [4, 2], request(temperature=0.0, stop_ids=(2,)), 5) == [4, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_block_is_what_its_rows_are_one_by_one(temperature):
    generator = torch.Generator().manual_seed(7)
    for seed in range(20):
        logits, wanted = torch.randn(5, 50, generator=generator), request(seed=seed, temperature=temperature)
        alone = [sample(logits[i : i + 1], [(wanted.sampling, 30 + i)])[0] for i in range(5)]
        wrong = seed % 5
        drafts = [token if i != wrong else token + 1 for i, token in enumerate(alone[:4])]
        assert accepted(logits, drafts, wanted, 30) == alone[: wrong + 1]


def test_positions_follow_the_block():
    """A token's noise is that of its position, in a block of any width."""
    logits, wanted = torch.zeros(4, 1000), request(seed=3)
    alone = [accepted(logits[:1], [], wanted, 20 + i)[0] for i in range(4)]
    assert accepted(logits, alone[:3], wanted, 20) == alone
    choose = Chooser([Sampling(seed=3), Sampling(seed=4)], [20, 50])
    assert [int(choose(place, logits[:2])[0]) for place in range(4)] == alone


def test_drafts_that_are_missing_end_the_rank():
    assert block(5, [6, 7], 1) == [5, 6]
    with pytest.raises(PairError, match="3 drafts"):
        block(5, [6, 7], 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_drawn_as_tokens_are(temperature):
    logits = torch.randn(6, 2, 50, generator=torch.Generator().manual_seed(2))
    samplings = [Sampling(seed=seed, temperature=temperature, top_p=0.9) for seed in (3, 4)]
    choose = Chooser(samplings, [20, 50])
    for place, each in enumerate(logits):
        wanted = sample(each, [(samplings[0], 20 + place), (samplings[1], 50 + place)])
        assert choose(place, each).tolist() == wanted
    choose.check()


def test_a_drafter_s_logits_that_are_no_numbers_stop_the_pair():
    """They are noticed behind the last place; the ids until then are some of the vocabulary."""
    choose, logits = Chooser([Sampling(temperature=0.0), Sampling()], [1, 9]), torch.zeros(2, 5)
    logits[1, 2] = torch.nan
    assert int(choose(0, logits).min()) == 0
    choose(1, torch.zeros(2, 5))
    with pytest.raises(PairError, match="no numbers"):
        choose.check()


KINDS = [
    [Sampling(temperature=0.0, seed=3), Sampling(temperature=0.0, seed=4)],
    [Sampling(seed=2**63 + 5), Sampling(seed=4, temperature=0.6, min_p=0.05)],
    [Sampling(temperature=0.0), Sampling(seed=4, temperature=1.3)],
    [Sampling(seed=3, top_p=0.7, temperature=0.8), Sampling(seed=4, top_k=7)],
    [Sampling(seed=3, top_p=0.5, top_k=9, min_p=0.02), Sampling(temperature=0.0, top_p=0.5)],
]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_law_of_a_graph_draws_what_the_chooser_draws(number):
    draw, samplings = torch.Generator().manual_seed(2), KINDS[number]
    for turn in range(40):
        choose, logits = Chooser(samplings, [20 + turn, 2**40 + turn]), 3 * torch.randn(4, 2, 300, generator=draw)
        law = choose.law(4)
        for place, each in enumerate(logits):
            assert torch.equal(law.drawn(each, law.told[place]), choose(place, each)), (turn, place)


def test_a_law_draws_every_lane_by_its_own_numbers():
    """Of flat logits: none of the numbers is read in another's place."""
    flat, lanes = torch.zeros(2, 5000), [Sampling(seed=3), Sampling(seed=4)]
    law = Chooser(lanes, [20, 50]).law(3)
    drawn = torch.stack([law.drawn(flat, law.told[place]) for place in range(3)])
    assert len(set(drawn.flatten().tolist())) == 6
    assert law.name == "raced"
    assert Chooser([*lanes[:1], Sampling(top_k=4)], [1, 2]).law(1).name == "ranked"
    assert Chooser([Sampling(temperature=0.0, top_p=0.5)], [1]).law(1).name == "likeliest"


@pytest.mark.parametrize("samplings", [KINDS[0], KINDS[1], KINDS[4]])
def test_what_a_law_drew_of_no_numbers_stops_the_pair(samplings):
    choose, logits = Chooser(samplings, [1, 9]), torch.zeros(2, 500)
    law = choose.law(1)
    choose.took(law.drawn(logits, law.told[0]).unsqueeze(0))
    choose.check()
    logits[1, 2] = torch.nan
    drawn = law.drawn(logits, law.told[0])
    assert drawn[1] == -1 < drawn[0]
    choose.took(drawn.unsqueeze(0))
    with pytest.raises(PairError, match="no numbers"):
        choose.check()
