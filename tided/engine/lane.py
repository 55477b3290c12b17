"""What a rank keeps of a request that has a lane, and what a step of the lanes brings."""

from collections.abc import Generator
from dataclasses import dataclass, field

from msgspec import structs
from torch import Tensor

from tided.cache.chain import Chain
from tided.engine.types import Request, TokenLogprob
from tided.experts.fetch import Lost
from tided.models.base import LaneState

Demand = tuple[Tensor, Tensor, Tensor]
Scoring = Generator[None, None, tuple[Tensor, list[TokenLogprob], list[int]]]
"""A chunk of a scored prompt in parts; gives its rows [T, hidden], and what `Outcome` has as `scores` and `redrawn`."""


@dataclass
class Lane:
    """A request's context on this rank. `token` is drawn already and not in the context yet."""

    request: Request
    state: LaneState
    token: int = -1
    parked: bool = False  # its context is not in the pool; `state` is the one that was closed
    keys: Chain | None = None  # of the prompt, where snapshots are taken
    masks: set[int] = field(default_factory=set)  # of the routable sets that its prompt was computed under
    logits: Tensor | None = None  # restored with a whole prompt: its first token is to be drawn from them
    drawn: list[int] = field(default_factory=list)  # the answer so far, where penalties count it
    drafts: list[int] = field(default_factory=list)  # proposed to come after `token`
    sure: list[float] = field(default_factory=list)  # the drafter's confidence in each
    scoring: Scoring | None = None  # of a scored prompt, the chunk in hand

    @property
    def asked(self) -> Request:
        """What the lane's draws are made by: without the answer that a scored prompt ends with."""
        request = self.request
        if not request.redrawn_from:
            return request
        return structs.replace(request, prompt_ids=request.prompt_ids[: request.redrawn_from])

    @property
    def draft_room(self) -> int:
        """Tokens that may be drafted behind `token`: the step that verifies them brings one more."""
        if not self.request.may_draft or self.token in self.request.stop_ids:
            return 0
        drawn = self.state.position - len(self.request.prompt_ids) + 1
        return max(0, self.request.max_tokens - drawn - 1)


@dataclass
class Outcome:
    """What a step made: (lane, token) in row order, the log probabilities of lanes that asked, in the same order, those
    of a scored prompt's next tokens, what would be drawn in place of an answer's among them, the demand of a prompt
    that is complete, and the digest if due. `failed`: lanes whose rows were computed without an expert that they waited
    for; they have no tokens, and no other is touched. `unfinished`: the chunk goes on in steps that follow."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    scores: list[TokenLogprob] = field(default_factory=list)
    redrawn: list[int] = field(default_factory=list)
    prompt_demand: Demand | None = None
    digest: str = ""
    failed: dict[int, Lost] = field(default_factory=dict)
    unfinished: bool = False
