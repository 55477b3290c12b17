"""What the loop and the engine say to each other. `api` and `chat` know the engine by these types only."""

from typing import Any, Literal, Protocol

import msgspec

Fidelity = Literal["fast", "balanced", "exact"]
"""What becomes of a pick whose expert is not resident: substituted; read before use if it is heavy; always read."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    Before that the logits are changed (`engine.logits`): by `logit_bias` (token id -> what is added; -100 and less bans
    the token), and by the penalties: `presence` and `frequency` count the answer's tokens, `repetition` divides what is
    positive and multiplies what is negative, of the prompt's and the answer's tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}

    @property
    def penalised(self) -> bool:
        """Whether what may be drawn depends on what was drawn before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class ImageSpan(msgspec.Struct, frozen=True):
    """An image in a prompt: `tokens` of it from token `first` on. `height`, `width`: pixels, as the model sees it;
    `digest`: of those."""

    first: int
    tokens: int
    height: int
    width: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.first + self.tokens


class Pixels:
    """An image as the model sees it: [height, width, 3] bytes of red, green, blue. It goes beside a request, and no
    further than rank 0."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `max_tokens` is resolved and fits the context together with the prompt.

    `min_tokens`: no stop id is drawn before. `logprobs`: how many of the likeliest tokens are told beside each drawn
    one's log probability; None: nothing is told. `guided`: a `Guide` on rank 0 says what may be drawn. `loop_break`:
    the answer ends when a cycle of tokens came so many times in a row (`engine.loops`); 0: it may go on. `images`: in
    the order of the prompt; their `Pixels` go beside the request. `scored`: the prompt's own tokens are told with their
    log probabilities (`Scored`), and beside each the `scored_top` likeliest, so all of it is computed. `adapts` False:
    nobody learns from it, and no expert moves for it; only of a scored one of a single token. `cache_salt`: prompts of
    another one share no cached prefix. `asker`: names whose key asked; empty: the server is open. `background`, of a
    scored one: it runs while nobody else asks, and gives way.
    `redrawn_from`: what stands from this place of the prompt on is an answer, and what would be drawn in place of each
    of its tokens is told (`Scored.redrawn`); 0: none is.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    fidelity: Fidelity = "fast"
    min_tokens: int = 0
    logprobs: int | None = None
    guided: bool = False
    loop_break: int = 0
    images: tuple[ImageSpan, ...] = ()
    scored: bool = False
    scored_top: int = 0
    adapts: bool = True
    cache_salt: str = ""
    asker: str = ""
    background: bool = False
    redrawn_from: int = 0

    @property
    def may_draft(self) -> bool:
        """Whether tokens may be verified several at once: what changes a draw must not depend on the one before."""
        plain = not self.sampling.penalised and not self.sampling.logit_bias
        return plain and not self.min_tokens and not self.guided and self.logprobs is None


class Guide(Protocol):
    """What a grammar lets a request draw. Made beside the loop, used by rank 0's engine thread alone."""

    mask_s: float
    """Seconds spent on masks so far."""

    error: str
    """Why it cannot go on; empty while it can."""

    def mask(self) -> bytes | None:
        """The tokens that may come next, a bit each, the lowest bit of a byte first; None: any."""
        ...

    def advance(self, token_id: int) -> None:
        """This token was drawn."""
        ...


class Started(msgspec.Struct, frozen=True):
    """The request has a lane; its prompt is being computed, but for the tokens that a cache held."""

    request_id: str
    cached_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithms of the model's own distribution, before anything of `Sampling`. `top`: the likeliest tokens
    and theirs, the likeliest first. `rank`: 1 for the likeliest token, and one more for each that is likelier; 0: not
    told."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of an answer, in order; a stop id is not among them. `logprobs`: one for each, where asked for."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []


class Scored(msgspec.Struct, frozen=True):
    """Log probabilities of the prompt's next tokens, in order, from its second one on; all come before `Tokens`.
    `redrawn`: of those from `redrawn_from` on, what would be drawn in their place."""

    request_id: str
    logprobs: list[TokenLogprob]
    redrawn: list[int] = []


class Finished(msgspec.Struct, frozen=True):
    """The last event of a request. `stats` holds the answer's `x_engine_stats`."""

    request_id: str
    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    completion_tokens: int
    stats: dict[str, Any]


class Failed(msgspec.Struct, frozen=True):
    """The engine cannot finish this request; the last event of it."""

    request_id: str
    message: str


Event = Started | Scored | Tokens | Finished | Failed


class Difference(msgspec.Struct, frozen=True):
    """Token `at` of the answer is `token_id`; with every expert `exact_id` would have been drawn there, before the same
    tokens. `rank`, `logprob`: of the answer's token, with every expert."""

    at: int
    token_id: int
    exact_id: int
    rank: int
    logprob: float


class Audit(msgspec.Struct, frozen=True):
    """Losses in nats a token of the answer. `differ` counts; None: the answer was held to a grammar, and what would
    have been drawn is not known. `ends_alike`: with every expert the answer would end where it ended; None: unknown.
    `residency_loss`: of the experts that are resident now, at the answer's fidelity; `reads`: experts read for it."""

    request_id: str
    fidelity: Fidelity
    tokens: int
    exact_loss: float
    exact_top1: float
    resident_loss: float
    residency_loss: float
    substituted_weight_share: float | None
    reads: int
    read_bytes: int
    seconds: float
    tries: int
    differ: int | None
    differences: list[Difference]
    ends_alike: bool | None
