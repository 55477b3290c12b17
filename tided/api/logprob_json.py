"""Log probabilities as OpenAI shows them."""

from collections.abc import Iterable
from typing import Any

from tided.chat.tokenizer import Tokenizer
from tided.engine.types import TokenLogprob

LEAST = -9999.0
"""Instead of minus infinity, which is no JSON."""


class LogprobJson:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._spellings = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}

    def piece(self, token_id: int) -> bytes:
        """The token decoded alone; of a special one its spelling, of an id that no token has nothing."""
        data = self._bytes[token_id] if token_id < len(self._bytes) else None
        return self._spellings.get(token_id, "").encode() if data is None else data

    def text(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", "replace")

    def chat(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._one(told.token_id, told.logprob) | {"top_logprobs": [self._one(*top) for top in told.top]}
            for told in logprobs
        ]

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST), "bytes": list(self.piece(token_id))}
