"""`tidectl bench`: warm up, learn how long our words are, repeat the cases, write the receipt."""

import os
import platform
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tidectl import about, http
from tidectl.bench import measure, table
from tidectl.bench.cases import BY_NAME, Ask, Case, Sizes, long_text
from tidectl.bench.receipt import CaseResult, Machine, Receipt, Server, Settings, summarise, write
from tidectl.output import emit, say
from tidectl.progress import Progress
from tidectl.writable import refuse_unwritable
from tided import guard
from tided.errors import TideError, UsageError

WARM_TOKENS = 64
WARM_WORDS = 256
ROOM_TOKENS = 64  # of a context, for what a chat's format puts around a message


class Options(NamedTuple):
    cases: Sequence[str]
    sizes: Sizes
    repetitions: int
    receipt: Path | None


def run(target: measure.Target, options: Options, as_json: bool) -> None:
    """Measure, print the table, write the receipt."""
    if options.receipt:
        _refuse_unwritable(options.receipt)
    receipt = measured(target, options)
    if not as_json:
        table.show(receipt)
    if options.receipt:
        write(options.receipt, receipt)
        say(f"receipt: {options.receipt}")
    if as_json:
        import msgspec

        emit("bench/1", msgspec.to_builtins(receipt) | {"receipt": str(options.receipt or "")})


def _refuse_unwritable(path: Path) -> None:
    """Before minutes are spent. Raises TideError."""
    refuse_unwritable(path, "--receipt")
    if path.exists():
        raise UsageError("is there already: no receipt is overwritten", where=str(path), hint="another --receipt FILE")


def fitting(target: measure.Target, sizes: Sizes, chosen: Collection[str]) -> Sizes:
    """Sizes that nobody chose, cut to what the server's context holds; that is said, and stands in the receipt."""
    context = http.context_tokens(target.url, target.key)
    if context is None:
        return sizes
    answer = sizes.answer_tokens if "tokens" in chosen else min(sizes.answer_tokens, max(context // 4, 16))
    room = context - max(answer // 8, 16) - 2 * ROOM_TOKENS
    prompt = sizes.prompt_tokens if "prompt_tokens" in chosen else min(sizes.prompt_tokens, max(room, 16))
    if (answer, prompt) != (sizes.answer_tokens, sizes.prompt_tokens):
        say(f"a context of {context:,} tokens: answers of {answer:,}, long prompts of {prompt:,}", "yellow")
    return sizes._replace(answer_tokens=answer, prompt_tokens=prompt)


def measured(target: measure.Target, options: Options) -> Receipt:
    """Raises UsageError for sizes that the server's context does not hold."""
    cases = [BY_NAME[name] for name in options.cases]
    _refuse_too_long(target, options.sizes, cases)
    before = _health(target)
    with Progress("requests", total=_requests(cases, options)) as progress:
        words = _warm(target, options.sizes)
        results = [_case(target, case, options, words, progress) for case in cases]
    return Receipt(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        build=about.build(),
        machine=machine(),
        settings=Settings(
            cases=list(options.cases),
            repetitions=options.repetitions,
            **options.sizes._asdict(),
            words=words,
            temperature=target.temperature,
            model=target.model,
            fidelity=target.fidelity,
            thinking=target.thinking,
        ),
        server=Server(_shown(target.url), before, _health(target)),
        cases=results,
    ).sealed()


def _case(target: measure.Target, case: Case, options: Options, words: int, progress: Progress) -> CaseResult:
    found = []
    for repetition in range(options.repetitions):
        groups = []
        for asks in case.turns(options.sizes, words, repetition):
            progress.say(f"{case.name} {repetition + 1} of {options.repetitions}")
            groups.append(measure.group(target, asks))
            progress.advance(len(asks))
        found.append(groups)
    return CaseResult(case.name, found, summarise(found))


def _requests(cases: Sequence[Case], options: Options) -> int:
    each = sum(len(asks) for case in cases for asks in case.turns(options.sizes, 8, 0))
    return each * options.repetitions


def _warm(target: measure.Target, sizes: Sizes) -> int:
    """-> how many of our words make a prompt of `sizes.prompt_tokens`. Asks twice: the difference leaves out what the
    chat's format adds. A server that does not count tokens is taken to have one a word."""
    least = min(WARM_TOKENS, sizes.answer_tokens)
    one, two = (
        measure.one(target, Ask(long_text(sizes.seed + words, words), least, sizes.seed))[0].prompt_tokens
        for words in (WARM_WORDS // 4, WARM_WORDS)
    )
    a_word = (two - one) / (WARM_WORDS - WARM_WORDS // 4) if two > one > 0 else 1.0
    return max(int((sizes.prompt_tokens - ROOM_TOKENS) / a_word), 1)


def _refuse_too_long(target: measure.Target, sizes: Sizes, cases: Sequence[Case]) -> None:
    context = http.context_tokens(target.url, target.key)
    if context is None:
        return
    if sizes.answer_tokens + ROOM_TOKENS * 4 > context:
        raise UsageError(
            f"answers of {sizes.answer_tokens:,} tokens do not fit the server's context of {context:,}",
            hint=f"--tokens {max(context // 2, 16)}",
        )
    long = any(case.name in ("long-prompt", "prefix") for case in cases)
    if long and sizes.prompt_tokens + max(sizes.answer_tokens // 8, 16) + ROOM_TOKENS > context:
        raise UsageError(
            f"prompts of {sizes.prompt_tokens:,} tokens do not fit the server's context of {context:,}",
            hint=f"--prompt-tokens {max(context // 2, 16)}, or name other cases",
        )


def _health(target: measure.Target) -> dict[str, Any]:
    """Of our servers: what they are and what is resident. Of others: nothing."""
    try:
        found = http.health(target.url)
    except TideError:
        return {}
    return found if found.get("engine") == "tidelm" else {}


def machine() -> Machine:
    """Of the client: the server's own is in its /health."""
    return Machine(**guard.machine(), load=round(os.getloadavg()[0], 2), python=platform.python_version())


def _shown(url: str) -> str:
    """Without what may be a secret: a name and a password, a query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
