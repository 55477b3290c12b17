"""What the loop and the engine say to each other. `api` and `chat` know the engine by these types only."""

from typing import Any, Literal

import msgspec

Fidelity = Literal["fast", "balanced", "exact"]
"""What becomes of a pick whose expert is not resident: substituted; read before use if it is heavy; always read."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `max_tokens` is resolved and fits the context together with the prompt."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    fidelity: Fidelity = "fast"


class Started(msgspec.Struct, frozen=True):
    """The request has a lane; its prompt is being computed."""

    request_id: str


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of an answer, in order; a stop id is not among them."""

    request_id: str
    token_ids: list[int]


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


Event = Started | Tokens | Finished | Failed
