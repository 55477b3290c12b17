"""A stream in chunks of OpenAI's shapes, of chats and of completions: `exchange.Writer` but for what stands in them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from tided.api.answers import Piece
from tided.api.errors import error_body
from tided.api.sse import DONE, comment, data
from tided.errors import RequestError


class Chunks(ABC):
    @abstractmethod
    def _pieces(self, deltas: Sequence[Piece]) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def _end(self) -> Iterator[dict[str, Any]]: ...

    def pieces(self, deltas: Sequence[Piece]) -> str:
        return data(self._pieces(deltas))

    def silence(self) -> str:
        return comment("keep-alive")

    def end(self) -> str:
        return data(self._end()) + DONE

    def fault(self, error: RequestError) -> str:
        return data([error_body(error)]) + DONE
