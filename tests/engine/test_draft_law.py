"""Drafted answers of a trained mini follow its own distribution: over thousands of seeds the tokens of a block come
as often as undrafted decoding gives them, by chi-square against the probabilities themselves.

What a block computes depends on its tokens alone, so each block is computed once, and only the draws are repeated.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace
from test_drafting import accepted

from tests.bundled import Mini
from tided.engine.build import build_rank, open_model
from tided.engine.offline import first_pairs, settings_of
from tided.engine.sampling import sample
from tided.engine.types import Request, Sampling
from tided.models.base import LaneState
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts

DRAWS, LIKELIEST, DRAFTS = 2000, 5, 2
TEXT = "Once upon a time there was a little girl. She"
LAW = Sampling(temperature=1.0, top_k=LIKELIEST)


class Blocks:
    """The model behind one prompt: what it says to a block of tokens, and what its drafter proposes."""

    def __init__(self, mini: Mini) -> None:
        settings = replace(
            settings_of(mini.path),
            experts=Experts(resident=mini.experts),
            cache=Cache(context_tokens=256, pool_tokens=256),
            engine=Engine(draft="5"),
        )
        opened = open_model(settings)
        self._model = build_rank(opened, Alone(), first_pairs(opened), lambda *_: None).model
        ids = mini.tokenizer.encode_text(TEXT)
        lane, self.anchor, self._tokens = self._model.open_lane(0), ids[-1], len(ids) - 1
        self._model.prefill(lane, torch.tensor(ids[:-1]), "none")
        self._parts, self._page = self._model.lane_parts(lane), self._model.page_parts(lane, 0, 1)
        self._model.close_lane(lane)
        self.first = len(ids)  # the position of the token that comes behind the anchor
        self._targets, self._drafters = dict[tuple[int, ...], torch.Tensor](), dict[tuple[int, ...], torch.Tensor]()

    def target(self, drafts: tuple[int, ...]) -> torch.Tensor:
        """[1 + drafts, vocab]"""
        if drafts not in self._targets:
            block = [self.anchor, *drafts]
            with self._lane() as lane:
                self._targets[drafts] = self._model.decode([lane], torch.tensor(block), [len(block)])
        return self._targets[drafts]

    def drafter(self, before: tuple[int, ...]) -> torch.Tensor:
        """[vocab] of the place behind the drafts `before`."""

        def choose(place: int, logits: torch.Tensor) -> torch.Tensor:
            return torch.tensor([before[place]]) if place < len(before) else logits.argmax(-1)

        if before not in self._drafters:
            with self._lane() as lane:
                draft = self._model.propose([lane], torch.tensor([self.anchor]), choose)
            self._drafters[before] = draft.logits[0, len(before)].clone()
        return self._drafters[before]

    @contextmanager
    def _lane(self) -> Iterator[LaneState]:
        """The prompt but for its last token, the anchor."""
        lane = self._model.restore_lane(0, self._tokens, self._parts, [(0, self._page)])
        yield lane
        self._model.close_lane(lane)

    def propose(self, seed: int) -> list[int]:
        drafts: list[int] = []
        for place in range(DRAFTS):
            row = [(replace(LAW, seed=seed), self.first + place)]
            drafts += sample(self.drafter(tuple(drafts))[None], row)
        return drafts


@pytest.fixture(scope="module")
def blocks(mini) -> Blocks:
    return Blocks(mini)


def probabilities(logits: torch.Tensor) -> dict[int, float]:
    top = torch.topk(logits.double(), LIKELIEST)
    weights = torch.softmax(top.values, -1).tolist()
    return dict(zip(top.indices.tolist(), weights, strict=True))


def expected(blocks: Blocks) -> dict[tuple[int, int], float]:
    """How often undrafted decoding gives each pair of tokens."""
    first = probabilities(blocks.target(())[0])
    return {
        (one, two): share * further
        for one, share in first.items()
        for two, further in probabilities(blocks.target((one,))[1]).items()
    }


def too_far(seen: Counter, law: dict[tuple[int, int], float]) -> bool:
    """Whether chance alone would do so once in a thousand; rare pairs are one cell. Critical values by Wilson and
    Hilferty."""
    total = seen.total()
    common = [pair for pair, share in law.items() if share * total >= 8]
    cells = [(seen[pair], law[pair] * total) for pair in common]
    rest = total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells)
    cells += [rest] if rest[1] >= 8 else []
    distance = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return distance > freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


Accept = Callable[[torch.Tensor, list[int], Request, int], list[int]]


def pairs(blocks: Blocks, accept: Accept) -> tuple[Counter, float]:
    """What comes first and second, and how many drafts stay. A block whose first draft falls brings one token: the
    second is what the next step draws."""
    seen, stayed = Counter(), 0
    for seed in range(DRAWS):
        drafts, law = blocks.propose(seed), replace(LAW, seed=seed)
        request = Request(request_id="r", prompt_ids=[1], sampling=law, max_tokens=9, stop_ids=())
        tokens = accept(blocks.target(tuple(drafts)), drafts, request, blocks.first)
        stayed += len(tokens) - 1
        if len(tokens) == 1:
            tokens += sample(blocks.target((tokens[0],))[1:2], [(law, blocks.first + 1)])
        seen[tokens[0], tokens[1]] += 1
    return seen, stayed / DRAWS


def test_a_drafted_answer_follows_the_models_own_law(blocks):
    seen, stayed = pairs(blocks, accepted)
    assert stayed > 0.2  # drafts did stay, and did fall
    assert stayed < 1.8
    assert not too_far(seen, expected(blocks))


def every_draft(logits, drafts, request, first):
    return [*drafts, *sample(logits[-1:], [(request.sampling, first + len(drafts))])]


def every_likely_draft(logits, drafts, request, first):
    """A draft stays where the target would draw it at all; else the target draws."""
    tokens = []
    for row, draft in zip(logits, (*drafts, None), strict=True):
        (token,) = sample(row[None], [(request.sampling, first + len(tokens))])
        tokens.append(draft if draft in probabilities(row) else token)
        if tokens[-1] != draft:
            break
    return tokens


def drawn_anew(logits, drafts, request, first):
    """Where a draft falls the target draws once more: with noise of its own instead of that which the draft fell by."""
    tokens = accepted(logits, drafts, request, first)
    fell = len(tokens) - 1
    if fell < len(drafts):
        (tokens[fell],) = sample(logits[fell : fell + 1], [(request.sampling, first + 1000)])
    return tokens


@pytest.mark.parametrize("broken", [every_draft, every_likely_draft, drawn_anew])
def test_an_acceptance_that_bends_the_law_is_seen(blocks, broken):
    seen, _ = pairs(blocks, broken)
    assert too_far(seen, expected(blocks))
