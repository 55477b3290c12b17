"""What a grammar lets an answer be: compiled beside the loop, followed token by token on rank 0.

The library is llguidance: it needs no other package, compiles in milliseconds and makes a mask in tens of microseconds.
Only this file and its worker know it. Grammars are its Lark dialect, in which `<[7]>` is the token 7 and `%json {…}` a
JSON schema; special tokens match no text.

A compilation cannot be stopped, so each new text is tried in a process that can (`chat.grammar_worker`), and only what
has passed there is compiled here.
"""

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import llguidance

from tided.chat.fields import refuse
from tided.chat.grammar_worker import read_verdict
from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError
from tided.processes import FailedJobError, Processes

log = logging.getLogger("tided.chat")

MOST_SCHEMA_BYTES = 1 << 20
_LARGE = f"more than {MOST_SCHEMA_BYTES} bytes of schemas"
_KEPT = 64
_KEPT_VERDICTS = 8192  # a line each; a request with many tools asks for hundreds
_MOST_COMPILE_S = 1.0
_PROCESSES = 2
# Two characters of white space between JSON's tokens: without a bound some models write nothing else.
_JSON_OPTIONS = {"whitespace_pattern": "[ \\n]{0,2}"}


def json_rule(schema: dict[str, Any]) -> str:
    """A JSON value of this schema, as a term of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"


@dataclass
class Allowance:
    """What one request may still take for all its grammars together; bytes of the parts that will be in its answer's.
    `alive` is asked before each; it ends the work by raising."""

    alive: Callable[[], None] = lambda: None
    left_s: float = field(default_factory=lambda: _MOST_COMPILE_S)
    left_bytes: int = MOST_SCHEMA_BYTES


class Grammars:
    """Compiles, and keeps the newest. `end`: the token that ends an answer. Safe to use from several threads; the first
    use takes a second with a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.special_id(end)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._processes = Processes("tided.chat.grammar_worker", _PROCESSES, first=(b'start: "a"\n',))

    def close(self) -> None:
        """Ends the processes; what they were at is refused."""
        self._processes.close()

    def error(self, text: str, param: str, allowance: Allowance | None = None) -> str:
        """Why a part of an answer's grammar cannot be used; empty when it can. Raises RequestError that names `param`:
        too large or too slow for what the request may still take."""
        allowance = allowance or Allowance()
        problem = self._verdict(text, param, allowance)
        if not problem:  # it will be part of the answer's: together they may be far larger than the request
            allowance.left_bytes -= len(text)
            if allowance.left_bytes < 0:
                refuse(param, _LARGE)
        return problem

    def compile(self, text: str, param: str, allowance: Allowance | None = None) -> "Grammar":
        """Raises RequestError that names `param`: too large, too slow, or not understood."""
        problem = self._verdict(text, param, allowance or Allowance())
        matcher = None if problem else self._matcher(text)
        if matcher is not None:
            problem = str(matcher.get_error()).partition("\n")[0]
        if matcher is None or problem:
            refuse(param, f"cannot be enforced: {problem}")
        with self._lock:
            self._compiled[text] = matcher
            self._compiled.move_to_end(text)
            _shorten(self._compiled, _KEPT)
        return Grammar(matcher, self._tokenizer.vocabulary_tokens, self._end)

    def _verdict(self, text: str, param: str, allowance: Allowance) -> str:
        allowance.alive()
        data = text.encode()
        if len(data) > MOST_SCHEMA_BYTES:
            refuse(param, _LARGE)
        key = hashlib.sha256(data).digest()
        with self._lock:
            if (known := self._verdicts.get(key)) is not None:
                self._verdicts.move_to_end(key)
                return known
        problem = self._tried(data, param, allowance)
        with self._lock:
            self._verdicts[key] = problem
            _shorten(self._verdicts, _KEPT_VERDICTS)
        return problem

    def _tried(self, text: bytes, param: str, allowance: Allowance) -> str:
        """In a process. What was late there is not remembered: the machine may have been busy."""
        slow = f"cannot be enforced: the schemas take more than {_MOST_COMPILE_S:g} s to compile; make them simpler"
        if allowance.left_s <= 0:
            refuse(param, slow)
        try:
            verdict = self._processes.ask((text,), read_verdict, allowance.left_s, allowance.alive)
        except FailedJobError as failed:
            if self._processes.closed:
                raise RequestError("The server is stopping", status=503, kind="server_error") from None
            if failed.late:
                allowance.left_s = 0
                refuse(param, slow)
            log.warning("a process that compiles grammars has ended with code %s", failed.code)
            refuse(param, "cannot be enforced: compiling the schemas takes too much memory; make them simpler")
        allowance.left_s -= verdict.spent_s
        return verdict.problem

    def _matcher(self, text: str) -> llguidance.LLMatcher:
        with self._lock:
            known = self._compiled.get(text)
        return known or self._new(text)

    def _new(self, text: str) -> llguidance.LLMatcher:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end))
                )
        return llguidance.LLMatcher(self._vocabulary, text, log_level=0)


def _shorten(kept: "OrderedDict[Any, Any]", most: int) -> None:
    """The oldest go."""
    while len(kept) > most:
        kept.popitem(last=False)


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
