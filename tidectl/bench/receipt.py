"""A receipt: everything that a figure depends on, and the figures. A file of JSON, self-checked by a digest of its
content, which `tidectl bench verify` reads, adds up again and replays.

It holds no text of prompts or answers: prompts follow from case and seed, answers are told by their SHA-256.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tidectl.bench.cases import BY_NAME, Sizes
from tided.errors import DataError

SCHEMA = "tidectl.bench/1"
MOST_RUNS, MOST_STREAMS = 100, 64  # as the command's


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


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What was asked for, within what the command takes. `words`: how many of ours were a prompt of `prompt_tokens`."""

    cases: Annotated[list[str], Meta(min_length=1)]
    repetitions: Annotated[int, Meta(ge=1, le=MOST_RUNS)]
    answer_tokens: Annotated[int, Meta(ge=2)]
    prompt_tokens: Annotated[int, Meta(ge=16)]
    streams: Annotated[int, Meta(ge=1, le=MOST_STREAMS)]
    seed: Annotated[int, Meta(ge=0)]
    words: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=2)]
    model: str
    fidelity: Annotated[str, Meta(pattern=r"^(|fast|balanced|exact)\Z")]
    thinking: bool | None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.answer_tokens, self.prompt_tokens, self.streams, self.seed)


class Machine(msgspec.Struct, forbid_unknown_fields=True):
    """`load`: the mean of a minute when the runs were over."""

    system: str
    machine: str
    processor: str
    cores: int
    load: float
    python: str


class Server(msgspec.Struct, forbid_unknown_fields=True):
    """/health of a TideLM server, which tells build, machine, checkpoint and settings; of others nothing."""

    url: str
    before: dict[str, Any]
    after: dict[str, Any]


class Receipt(msgspec.Struct, forbid_unknown_fields=True):
    """`build` and `machine`: the client's. `digest`: of everything else."""

    made: str
    build: dict[str, str | None]
    machine: Machine
    settings: Settings
    server: Server
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"is no receipt ({error})", where=str(path), hint=hint) from error
    if receipt.schema != SCHEMA:
        raise DataError(f"is a receipt of another form ({receipt.schema})", where=str(path), hint=hint)
    if receipt.digest != digest_of(receipt):
        raise DataError("was changed after it was written: its digest is another", where=str(path), hint=hint)
    if wrong := _contradiction(receipt):
        raise DataError(wrong, where=str(path), hint=hint)
    return receipt


def _contradiction(receipt: Receipt) -> str:
    """What does not fit together, in words; empty: nothing."""
    settings, names = receipt.settings, [case.name for case in receipt.cases]
    if wrong := [case.name for case in receipt.cases if _summary(case) != case.summary]:
        return f"the figures of {', '.join(wrong)} do not follow from its runs"
    if unknown := [name for name in (*settings.cases, *names) if name not in BY_NAME]:
        return f"has a case that is not known here ({unknown[0]})"
    if names != settings.cases:
        return f"its settings name other cases ({', '.join(settings.cases)}) than it holds ({', '.join(names)})"
    if wrong := [case.name for case in receipt.cases if _shape(case) != _asked(case, settings)]:
        return f"{', '.join(wrong)}: there are other runs than its settings name"
    return ""


def _shape(case: CaseResult) -> list[list[int]]:
    """How many requests each group of each repetition has."""
    return [[len(group.requests) for group in groups] for groups in case.repetitions]


def _asked(case: CaseResult, settings: Settings) -> list[list[int]]:
    runs = range(settings.repetitions)
    return [[len(asks) for asks in BY_NAME[case.name].turns(settings.sizes, 1, run)] for run in runs]


def _summary(case: CaseResult) -> dict[str, Spread] | None:
    """None where nothing follows: a group without a request, a time of 0."""
    try:
        return summarise(case.repetitions)
    except (ValueError, ArithmeticError):
        return None


def part_of(told: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of what a server told; {} where it told none."""
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def write(path: Path, receipt: Receipt) -> None:
    """Readable by others: a receipt is made to be shown."""
    from tided.files import write_private

    write_private(path, msgspec.json.format(msgspec.json.encode(receipt), indent=1) + b"\n")
    path.chmod(0o644)
