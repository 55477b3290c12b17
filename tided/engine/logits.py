"""Logits before a token is drawn from them: what a request bans, likes, has said already, and may say by its grammar.

Pure functions of replicated values: every rank computes the same (C1). The order is: bias, penalties, bans, grammar;
temperature and the filters come after (`engine.sampling`). Log probabilities are of the logits as the model made them.

Sources: OpenAI's API reference for bias, presence and frequency penalty (of the answer's tokens); Keskar et al.,
"CTRL" (2019), section 4.1, for the repetition penalty (of the prompt's tokens too, as other servers do).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tided.engine.types import Request, Sampling

BANNED = -1e30
"""A logit that is never drawn while any other is left: finite, so that what is no number still shows."""

BAN_BIAS = -100.0


def shaped(row: Tensor, request: Request, drawn: Sequence[int], tokens: int, mask: bytes | None) -> Tensor:
    """row [vocab] fp32 as the model made it, not changed -> [vocab]. `drawn`: the answer so far where penalties need
    it; `tokens`: its length; `mask`: the grammar's (`messages.Mask`)."""
    if as_made(request, tokens, mask):
        return row
    sampling, bans, row = request.sampling, _bans(request, tokens), row.clone()
    bias(row, sampling)
    if sampling.penalised:
        penalise(row, sampling, request.prompt_ids, drawn)
    if bans:
        row[_ids(bans, row)] = BANNED
    if mask is not None:
        row.masked_fill_(~allowed(mask, row), BANNED)
    return row


def as_made(request: Request, tokens: int, mask: bytes | None) -> bool:
    """Whether the request draws from logits as the model made them."""
    sampling = request.sampling
    return not (sampling.logit_bias or sampling.penalised or _bans(request, tokens) or mask is not None)


def _bans(request: Request, tokens: int) -> Sequence[int]:
    return request.stop_ids if tokens < request.min_tokens else ()


def bias(row: Tensor, sampling: Sampling) -> None:
    """row [vocab], changed in place."""
    if sampling.logit_bias:
        ids = _ids(sampling.logit_bias, row)
        added = torch.tensor([sampling.logit_bias[i] for i in ids.tolist()], dtype=row.dtype, device=row.device)
        row[ids] = torch.where(added <= BAN_BIAS, BANNED, row[ids] + added)


def penalise(row: Tensor, sampling: Sampling, prompt_ids: Sequence[int], drawn: Sequence[int]) -> None:
    """row [vocab], changed in place. Repetition first: it scales what the model said, the others are subtracted."""
    if sampling.repetition_penalty != 1:
        seen = _ids({*prompt_ids, *drawn}, row)
        values, by = row[seen], sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / by, values * by).clamp_(min=BANNED)
    if drawn and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.asarray(drawn, dtype=np.int64), return_counts=True)
        minus = counts * sampling.frequency_penalty + sampling.presence_penalty
        row[_ids(ids.tolist(), row)] -= torch.from_numpy(minus).to(row)


def allowed(mask: bytes, row: Tensor) -> Tensor:
    """[vocab] bool on the row's device."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=row.numel())
    return torch.from_numpy(bits).to(row.device).to(torch.bool)


def _ids(ids: Iterable[int], row: Tensor) -> Tensor:
    """Those that the model has a logit for; a client's lists are of any length, the checks are elsewhere."""
    return torch.tensor([i for i in ids if 0 <= i < row.numel()], dtype=torch.int64, device=row.device)
