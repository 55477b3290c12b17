"""What a GPU does for the first time takes seconds: kernels are compiled, steps are captured. All of it is done once
before a rank says that it is ready, so that no request waits for it, and no watch over steps takes it for a fault.

Every rank computes the same, so that their collectives meet, on a lane that nobody has; nothing of it is left but what
was compiled: the lane is closed, and its demand is nobody's."""

from collections.abc import Callable

import torch

from kernels.rows import ROWS
from tided.engine.drafting import Chooser
from tided.engine.sampling import sample
from tided.engine.types import Sampling
from tided.experts.tables import DemandTap
from tided.models.base import LaneState, Model
from tided.settings import Settings

SHORT_TOKENS = (
    37  # of a short prompt: kernels are compiled apart for counts of 16, as a whole chunk's is, and for others
)
TOKEN = 0  # any: what is computed is read by nobody
Told = Callable[[str, int, int], None]  # (what is computed, parts done, parts in all)


@torch.inference_mode()
def warm_up(model: Model, tap: DemandTap, settings: Settings, told: Told) -> None:
    """Prompts and decode steps as serving will have them, while no lane is open."""
    rows = row_counts(settings, model.draft_tokens)
    device, tap.enabled = tap.uses.device, False
    try:
        _compute(model, settings, rows, device, told)
    finally:
        tap.enabled = True
    _count(model, tap, min(SHORT_TOKENS, settings.cache.context_tokens - 1))


def _compute(model: Model, settings: Settings, rows: range, device: torch.device, told: Told) -> None:
    told("warming up", 0, len(rows))
    for tokens in ends(settings):
        _prefill(model, tokens)
    lane = model.open_lane(0)
    try:
        for tokens in prompts(settings, rows[-1]):
            model.prefill(lane, torch.full((tokens,), TOKEN), "last")
        for done, count in enumerate(rows):
            told("warming up", done, len(rows))
            logits = model.decode([lane], torch.full((count,), TOKEN), [count])
            if count > 1:
                model.keep(lane, 1)
            sample(logits, [(Sampling(temperature=0.0), lane.position)] * count)
            sample(logits[:1], [(Sampling(top_k=2, top_p=0.5), lane.position)])
        if settings.engine.draft != "off" and model.draft_tokens:
            for count in range(1, settings.engine.lanes + 1):  # a proposal changes nothing: any lane stands for others
                _propose(model, lane, count, device)
        told("warming up", len(rows), len(rows))
    finally:
        model.close_lane(lane)


def _prefill(model: Model, tokens: int) -> None:
    lane = model.open_lane(0)
    try:
        model.prefill(lane, torch.full((tokens,), TOKEN), "last")
    finally:
        model.close_lane(lane)


def _count(model: Model, tap: DemandTap, tokens: int) -> None:
    """The launch that adds up demand, of a prompt and of a step; and forgets it."""
    lane = model.open_lane(0)
    try:
        model.prefill(lane, torch.full((tokens,), TOKEN), "none")
        tap.add_up()
        model.decode([lane], torch.tensor([TOKEN]))
        tap.add_up()
    finally:
        model.close_lane(lane)
        tap.forget(0)
        tap.forget_wishes()


def _propose(model: Model, lane: LaneState, count: int, device: torch.device) -> None:
    """Of so many lanes, by each law that their drafts are drawn by."""
    anchors = torch.full((count,), TOKEN, device=device)
    for sampling in (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.9)):
        model.propose([lane] * count, anchors, Chooser([sampling] * count, [lane.position + 1] * count))


def row_counts(settings: Settings, draft_tokens: int) -> range:
    """Rows that decode steps may have: of every lane one, and its drafts. `draft_tokens`: most that the model makes."""
    draft = settings.engine.draft
    each = 1 + (0 if draft == "off" else min(int(draft), draft_tokens) if draft.isdigit() else draft_tokens)
    room = (settings.cache.context_tokens - 1) // 2  # each stays one token, and a block needs room behind them
    return range(1, min(ROWS, settings.engine.lanes * each, max(1, room)) + 1)


def ends(settings: Settings) -> range:
    """Tokens of the last chunk of a prompt, where kernels of decode steps compute it: they have forms by how many rows
    there are, which steps of so few lanes may not have."""
    return range(1, min(ROWS, settings.cache.context_tokens - 1) + 1)


def prompts(settings: Settings, rows: int) -> list[int]:
    """Tokens of prompts: few, and a whole chunk, where the context has room for both and for the steps behind them."""
    room = settings.cache.context_tokens - 2 * rows
    short = min(SHORT_TOKENS, room)
    chunk = min(settings.model.prefill_chunk_tokens, room - short)
    return [tokens for tokens in (short, chunk) if tokens > 0]
