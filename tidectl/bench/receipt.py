"""A receipt: everything that a figure depends on, and the figures. A file of JSON, self-checked by a digest of its
content, which `tidectl bench verify` reads, adds up again and replays.

It holds no text of prompts or answers: prompts follow from case and seed, answers are told by their SHA-256.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from tided.errors import DataError

SCHEMA = "tidectl.bench/1"


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """One request. `ttft_s`: from sending it to its first token. `tok_s`: its tokens after the first over the time from
    the first to the last; 0 for fewer than two. `counted`: the server said how many tokens there were, else chunks were
    counted."""

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    counted: bool
    ttft_s: float
    decode_s: float
    tok_s: float
    finish_reason: str
    sha256: str
    stats: dict[str, Any] = {}


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """Requests side by side. `wall_s`: from the first that was sent to the last token of all."""

    requests: list[Measured]
    wall_s: float


class Spread(msgspec.Struct, forbid_unknown_fields=True):
    """Of repetitions."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(round(median(values), 4), round(min(values), 4), round(max(values), 4))


class CaseResult(msgspec.Struct, forbid_unknown_fields=True):
    """`repetitions`: the groups of each, in order. `summary`: what `summarise` makes of them."""

    name: str
    repetitions: list[list[Group]]
    summary: dict[str, Spread]


class Receipt(msgspec.Struct, forbid_unknown_fields=True):
    """`build` and `machine`: the client's. `server`: its address, and its /health before and after, which tells build,
    machine, checkpoint and settings of a TideLM server; of others nothing. `digest`: of everything else."""

    made: str
    build: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    server: dict[str, Any]
    cases: list[CaseResult]
    schema: str = SCHEMA
    digest: str = ""

    def sealed(self) -> "Receipt":
        return msgspec.structs.replace(self, digest=digest_of(self))


def digest_of(receipt: Receipt) -> str:
    body = msgspec.to_builtins(msgspec.structs.replace(receipt, digest=""))
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def summarise(repetitions: list[list[Group]]) -> dict[str, Spread]:
    """By figure, over the repetitions. Of several groups (a prefix, a change of domain) each has its own figures, the
    first without a number: `ttft_s`, `ttft_s_2`, `ttft_s_3`."""
    found: dict[str, Spread] = {}
    for place in range(min(map(len, repetitions), default=0)):
        suffix = f"_{place + 1}" if place else ""
        groups = [groups[place] for groups in repetitions]
        for name, of in _FIGURES.items():
            found[name + suffix] = Spread.of([of(group) for group in groups])
    return found


_FIGURES: dict[str, Callable[[Group], float]] = {
    "tok_s": lambda group: median(request.tok_s for request in group.requests),
    "total_tok_s": lambda group: sum(request.tokens for request in group.requests) / group.wall_s,
    "ttft_s": lambda group: median(request.ttft_s for request in group.requests),
    "prompt_tok_s": lambda group: median(
        (request.prompt_tokens - request.cached_tokens) / request.ttft_s for request in group.requests
    ),
}


def read(path: Path) -> Receipt:
    """Raises DataError for what is no receipt, has been changed, or does not add up."""
    hint = "`tidectl bench --receipt FILE` writes one"
    try:
        receipt = msgspec.json.decode(path.read_bytes(), type=Receipt)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(path), hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"is no receipt ({error})", where=str(path), hint=hint) from error
    if receipt.schema != SCHEMA:
        raise DataError(f"is a receipt of another form ({receipt.schema})", where=str(path), hint=hint)
    if receipt.digest != digest_of(receipt):
        raise DataError("was changed after it was written: its digest is another", where=str(path), hint=hint)
    wrong = [case.name for case in receipt.cases if _summary(case) != case.summary]
    if wrong:
        raise DataError(f"the figures of {', '.join(wrong)} do not follow from its runs", where=str(path), hint=hint)
    return receipt


def _summary(case: CaseResult) -> dict[str, Spread] | None:
    """None where nothing follows: a group without a request, a time of 0."""
    try:
        return summarise(case.repetitions)
    except (ValueError, ArithmeticError):
        return None


def write(path: Path, receipt: Receipt) -> None:
    """Readable by others: a receipt is made to be shown."""
    from tided.control.files import write_private

    write_private(path, msgspec.json.format(msgspec.json.encode(receipt), indent=1) + b"\n")
    path.chmod(0o644)
