"""`tidectl budget`: the living budget of experts, asked of rank 0 by its socket in the state directory."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tidectl.output import emit, say
from tidectl.state import state_dir
from tidectl.waiting import Item, waiting
from tided.control.operator import AskBudget, ask
from tided.errors import TideError, UsageError

POLL_S = 0.2
STALL_S = 60.0  # some records may not be readable
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
AMOUNT = re.compile(
    r"(?P<sign>[+-]?)(?P<number>\d[\d_,]{0,30}(?:\.\d{1,30})?)\s*(?:(?P<experts>experts?|e)|(?P<unit>[kmgt]i?)b?|b)?",
    re.IGNORECASE,
)
MOST = 1 << 62
EXAMPLES = "70G, 10000 experts, +5G or -200 experts"


def run(amount: str, yes: bool, as_json: bool) -> None:
    if amount:
        parsed(amount)
    directory = state_dir()
    now = ask(directory, AskBudget())
    if not amount:
        _show(now, as_json)
        return
    question = wanted(amount, now)
    found = _judged(directory, question, " ".join(amount))
    if found["resident"] == found["resident_now"]:
        _show(found, as_json)
        return
    if not as_json:
        say("\n".join(words(found)))
    if not yes:
        _confirm()
    applied = ask(directory, AskBudget(question.resident, question.nbytes, apply=True))
    after = _follow(lambda: ask(directory, AskBudget()), applied)
    if after["resident_now"] != applied["resident"]:
        raise TideError("the budget stays as it was: what was read meanwhile left no room for it", hint="try again")
    if as_json:
        emit("budget/1", {**applied, "bytes_after": after["bytes_now"], "held_after": after["held"]})
    else:
        say(f"done: {after['resident_now']} experts, {_gb(after['bytes_now'])} on each rank")
        say(f"until the ranks end: a start begins with the profile's {after['resident_of_profile']}", "dim")


def _judged(directory: Path, question: AskBudget, amount: str) -> dict[str, Any]:
    """What the change would mean. A refusal names what was asked for, and where to look."""
    try:
        return ask(directory, question)
    except TideError as error:
        if type(error) is not TideError:  # nobody answers: that is another matter
            raise
        hint = "`tidectl budget` shows how it stands, `tidectl plan PROFILE` what fits and what an expert takes"
        raise TideError(f"{amount}: {error.what}", hint=error.hint or hint) from error


class Amount(NamedTuple):
    """`sign` 0: it is no change, but all."""

    sign: int
    number: int
    is_bytes: bool


def parsed(amount: str) -> Amount:
    """Raises UsageError for what is no amount. Without a unit a number is experts."""
    found = AMOUNT.fullmatch(amount.strip())
    if found is None:
        raise UsageError(f"'{amount}' is no budget", hint=f"for example {EXAMPLES}")
    number, sign = float(re.sub("[_,]", "", found["number"])), {"+": 1, "-": -1}.get(found["sign"], 0)
    is_bytes = found["experts"] is None and amount.strip()[-1].isalpha()
    number *= UNITS[(found["unit"] or "").lower()]
    if number >= MOST:
        raise UsageError(f"'{amount}' is more than any machine has", hint=f"for example {EXAMPLES}")
    if is_bytes:
        return Amount(sign, round(number), True)
    if number != int(number):
        raise UsageError(f"'{amount}': experts are whole", hint=f"for example {EXAMPLES}")
    return Amount(sign, int(number), False)


def wanted(amount: str, now: dict[str, Any]) -> AskBudget:
    sign, number, is_bytes = parsed(amount)
    before = now["bytes_now"] if is_bytes else now["resident_now"]
    target = max(0, before + sign * number) if sign else number
    return AskBudget(nbytes=target) if is_bytes else AskBudget(resident=target)


def words(found: dict[str, Any]) -> list[str]:
    """What a change would mean."""
    moves = f"{found['leave']} leave at once" if found["leave"] else f"{found['come']} are read while it serves"
    return [
        f"experts   {found['resident_now']} -> {found['resident']} of {found['experts']}: {moves}",
        f"memory    {_gb(found['bytes_now'])} -> {_gb(found['bytes'])} on each rank ({_change(found)})",
        f"expected  {found['covered_now']:.2%} -> {found['covered']:.2%} of what the next tokens want is in memory",
    ]


def _change(found: dict[str, Any]) -> str:
    """Of residents; and of the memory that their slots have, where this comes and goes in larger units."""
    more, real = (found[name] - found[f"{name}_now"] for name in ("bytes", "arena_bytes"))
    change = f"{'+' if more > 0 else '-'}{_gb(abs(more))}"
    if real == more:
        return change
    moves = "the system gives" if more > 0 else "the system gets back"
    return f"{change}; {moves} {_gb(abs(real))}, since it does so in larger units"


def _show(now: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit("budget/1", now)
        return
    of, profile = now["resident_now"], now["resident_of_profile"]
    moving = ", a change is under way" if now["changing"] else ""
    say(f"experts   {of} of {now['experts']}{moving}; the profile's are {profile}")
    say(f"memory    {_gb(now['bytes_now'])} on each rank; {now['least']} experts are the least")
    say(f"expected  {now['covered_now']:.2%} of what the next tokens want is in memory")
    if not now["may_change"]:
        say("it cannot change while it serves here: set experts.resident, and start again")


def _follow(look: Callable[[], dict[str, Any]], applied: dict[str, Any]) -> dict[str, Any]:
    """Until the places are filled, or nothing more comes for a while. What is interrupted goes on all the same."""
    held, since_s = -1, time.monotonic()
    with waiting() as show:
        while True:
            now = look()
            begun = now["resident_now"] == applied["resident"]
            state = f"{now['held']} of {now['resident_now']} experts" if begun else "waits for reads"
            show([Item("budget", state, done=now["held"] if begun else 0, total=now["resident_now"])])
            if now["held"] != held:
                held, since_s = now["held"], time.monotonic()
            if not now["changing"]:
                return now
            if time.monotonic() - since_s > STALL_S:
                say(f"{now['held']} of {now['resident_now']} are here, and no more come: see `tidectl logs`")
                return now
            time.sleep(POLL_S)


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise UsageError("this asks before it changes anything", hint="off a terminal, say --yes")
    import typer

    typer.confirm("change it?", abort=True, err=True)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 100_000_000 else f"{nbytes / 1e6:,.2f} MB"
