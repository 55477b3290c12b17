"""Log probabilities as OpenAI shows them. What is told of the likeliest tokens is made when it is written."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from tided.api.json_text import Later
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import TokenLogprob

LEAST = -9999.0
"""Instead of minus infinity, which is no JSON."""


class LogprobJson:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes
        self._spellings = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}

    def piece(self, token_id: int) -> bytes:
        """The token decoded alone; of a special one its spelling, of an id that no token has nothing."""
        data = self._bytes[token_id] if token_id < len(self._bytes) else None
        return self._spellings.get(token_id, "").encode() if data is None else data

    def text(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", "replace")

    def chat(self, logprobs: Iterable[TokenLogprob]) -> list[Later]:
        return [Later(self._with_likeliest, told) for told in logprobs]

    def listed(self, told: Iterable[TokenLogprob], offset: int) -> dict[str, list[Any]]:
        """OpenAI's older shape: parallel lists. `offset`: characters of the text before the first token."""
        lists = _lists()
        for one in told:
            self._append(lists, self.text(one.token_id), one, offset)
            offset += len(lists["tokens"][-1])
        return lists

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprob], shown: str, most: int) -> dict[str, list[Any]]:
        """Of a prompt's tokens, the first of which nothing is told; `shown`: the prompt as the reply repeats it, which
        may lack its beginning token; `most`: of the likeliest tokens, no more are told."""
        lists, decoder, offset = _lists(), self._tokenizer.decoder(), 0
        scores = [structs.replace(one, top=one.top[:most]) for one in scores]
        for token_id, one in zip(ids, [None, *scores], strict=True):
            spelling = self._spellings.get(token_id, "")
            self._append(lists, self.text(token_id), one, offset)
            there = spelling and shown.startswith(spelling, offset)
            offset += len(spelling) if there else len(decoder.feed([token_id]))
        return lists

    def by_id(self, scores: Iterable[TokenLogprob], most: int) -> list[Later | None]:
        """Of a prompt's tokens, as vLLM shows them: by token id, of the first nothing. The prompt's own token comes
        first, then the `most` likeliest."""
        return [None, *(Later(self._ranked, one, most) for one in scores)]

    def _ranked(self, one: TokenLogprob, most: int) -> dict[str, Any]:
        likeliest = {token_id: (value, at) for at, (token_id, value) in enumerate(one.top[:most], 1)}
        own = {one.token_id: (one.logprob, one.rank)}
        told = own | {token_id: ranked for token_id, ranked in likeliest.items() if token_id not in own}
        return {
            str(token_id): {"logprob": max(value, LEAST), "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, (value, rank) in told.items()
        }

    def _append(self, lists: dict[str, list[Any]], text: str, one: TokenLogprob | None, offset: int) -> None:
        lists["tokens"].append(text)
        lists["text_offset"].append(offset)
        lists["token_logprobs"].append(None if one is None else max(one.logprob, LEAST))
        lists["top_logprobs"].append(None if one is None else Later(self._likeliest, one))

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        return {self.text(token_id): max(value, LEAST) for token_id, value in one.top}

    def _with_likeliest(self, told: TokenLogprob) -> dict[str, Any]:
        return self._one(told.token_id, told.logprob) | {"top_logprobs": [self._one(*top) for top in told.top]}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST), "bytes": list(self.piece(token_id))}


def _lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
