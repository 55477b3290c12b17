"""What a grammar lets an answer be: compiled beside the loop, followed token by token on rank 0.

The library is llguidance: it needs no other package, compiles in milliseconds and makes a mask in tens of microseconds.
Only this file knows it. Grammars are its Lark dialect, in which `<[7]>` is the token 7 and `%json {…}` a JSON schema;
special tokens match no text.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import llguidance

from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError

MOST_SCHEMA_BYTES = 1 << 20
_KEPT = 64
_MOST_COMPILE_S = 1.0
# Two characters of white space between JSON's tokens: without a bound some models write nothing else.
_JSON_OPTIONS = {"whitespace_pattern": "[ \\n]{0,2}"}


def json_rule(schema: dict[str, Any]) -> str:
    """A JSON value of this schema, as a term of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"


class Grammars:
    """Compiles, and keeps the newest. `end`: the token that ends an answer. Safe to use from several threads; the first
    use takes a second with a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.special_id(end)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def error(self, text: str) -> str:
        """Why the grammar cannot be used; empty when it can."""
        _, problem = self._matcher(text)
        return problem

    def compile(self, text: str, param: str) -> "Grammar":
        """Raises RequestError that names `param`: too large, too slow, or not understood."""
        if len(text) > MOST_SCHEMA_BYTES:
            raise RequestError(f"{param}: more than {MOST_SCHEMA_BYTES} bytes of schemas", param=param)
        matcher, problem = self._matcher(text)
        if problem:
            raise RequestError(f"{param}: cannot be enforced: {problem}", param=param)
        return Grammar(matcher, self._tokenizer.vocabulary_tokens, self._end)

    def _matcher(self, text: str) -> tuple[llguidance.LLMatcher, str]:
        with self._lock:
            if (found := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
                return found, ""
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end))
                )
        began_s = time.monotonic()
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0)
        problem = str(matcher.get_error()).partition("\n")[0]
        if not problem and time.monotonic() - began_s > _MOST_COMPILE_S:
            problem = f"it takes more than {_MOST_COMPILE_S:g} s to compile"
        if not problem:
            with self._lock:
                self._compiled[text] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return matcher, problem


class Grammar:
    """A compiled grammar; each answer opens its own `Guide`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary_tokens: int, end: int) -> None:
        self._matcher, self._vocabulary_tokens, self._end = matcher, vocabulary_tokens, end

    def open(self, after: int | None = None, banned: Iterable[int] = ()) -> "GrammarGuide":
        """`after`: the grammar begins behind this token (the end of the reasoning), and until then all may be drawn but
        the answer's end and `banned`. None: at once."""
        free = bytearray(b"\xff" * (-(-self._vocabulary_tokens // 8)))
        for token_id in (self._end, *banned):
            free[token_id // 8] &= ~(1 << token_id % 8)
        return GrammarGuide(self._matcher.deep_copy(), after, bytes(free), self._vocabulary_tokens)


class GrammarGuide:
    """`tided.engine.types.Guide`. `free`: the mask before the grammar begins."""

    def __init__(self, matcher: llguidance.LLMatcher, after: int | None, free: bytes, vocabulary_tokens: int) -> None:
        self.mask_s, self.error = 0.0, ""
        self._matcher, self._after, self._free = matcher, after, free
        self._mask_bytes = -(-vocabulary_tokens // 8)

    def mask(self) -> bytes | None:
        if self._after is not None:
            return self._free
        began_s = time.perf_counter()
        bits = bytes(self._matcher.compute_bitmask())[: self._mask_bytes]
        self.mask_s += time.perf_counter() - began_s
        self._note_error()
        return bits

    def advance(self, token_id: int) -> None:
        if self._after is not None:
            self._after = None if token_id == self._after else self._after
            return
        # Behind the answer's end nothing is drawn; the library would call it an error.
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self._note_error()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = str(self._matcher.get_error()).partition("\n")[0] or "unknown"


class _Vocabulary:
    """The tokenizer as the library wants it."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        spellings = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
        table = tokenizer.token_bytes
        self.tokens = [
            spellings.get(at, f"<unused {at}>").encode() if text is None else text for at, text in enumerate(table)
        ]
        self.special_token_ids = [at for at, text in enumerate(table) if text is None]
        self.eos_token_id, self.bos_token_id = end, None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode_text(text if isinstance(text, str) else text.decode("utf-8", "replace"))
