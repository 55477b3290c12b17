"""`tidectl profile check | list | show`."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from tidectl import fits, preflight, profiles, runner
from tidectl.output import emit, say, styled, visible
from tidectl.state import chosen_dir
from tided import profile
from tided.errors import TideError
from tided.profile import Problem
from tided.profile.problems import in_order
from tided.profile.reading import read
from tided.profile.schema import KEYS, SECTIONS, Key, value_of
from tided.profile.start import missing
from tided.settings import Settings

AFFECTS = {
    "numbers": "what is computed: equal on every rank",
    "node": "this node alone: may differ between ranks",
    "policy": "decided by rank 0 alone",
}


def check(path: Path, as_json: bool) -> int:
    """The exit code: 78 when the profile has an error."""
    problems, looked = _problems(path)
    errors = sum(problem.severity == "error" for problem in problems)
    if as_json:
        findings = [msgspec.to_builtins(problem) for problem in problems]
        emit("profile-check/1", {"file": str(path), "ok": not errors, "problems": findings})
    elif problems:
        say(profile.render(problems))
        if not looked:
            say("the checkpoint has not been looked at yet")
    if not errors and not as_json:
        say(f"{path}: a valid profile")
    return 78 if errors else 0


def _problems(path: Path) -> tuple[list[Problem], bool]:
    """Everything that a start here would refuse, and whether the checkpoint was looked at, which waits for keys that
    are right. The ports of what runs already are its own."""
    found = profile.check(path)
    if any(problem.severity == "error" for problem in found):
        return found, False
    settings = profile.load(path)
    found += fits.misfits(settings, path)
    if not runner.is_running(chosen_dir()):
        found += preflight.machine_notes(settings, path)
    return in_order(found), True


def list_named(as_json: bool) -> int:
    """The exit code: that of the first profile that is broken. The others are listed all the same."""
    rows = [_listed(name, path) for name, path in profiles.named().items()]
    if as_json:
        emit("profile-list/1", {"profiles": rows})
    else:
        for row in rows:
            _print_listed(row)
    return next((row["error"]["exit_code"] for row in rows if row["error"]), 0)


def _print_listed(row: dict[str, Any]) -> None:
    print(f"{styled(row['name'], 'bold', sys.stdout)}\n    {visible(row['title'])}\n    {row['path']}")
    for obstacle in row["obstacles"]:
        print(styled(f"    does not start: {obstacle}", "yellow", sys.stdout))
    if row["error"]:
        first = visible(row["error"]["what"].partition("\n")[0])
        print(styled(f"    broken: {first}", "red", sys.stdout))
        print(f"    tidectl profile check {row['name']}")


def _listed(name: str, path: Path) -> dict[str, Any]:
    """`error`: why nothing else is known of it; None of a profile."""
    row: dict[str, Any] = {"name": name, "path": str(path), "title": "", "obstacles": [], "error": None}
    try:
        return {**row, "obstacles": _obstacles(path), "title": profiles.title(path)}
    except TideError as error:
        told = {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
        return {**row, "error": told}


def _obstacles(path: Path) -> list[str]:
    """What keeps this build, on this machine, from starting a profile whatever else runs here."""
    settings = profile.load(path)
    unread = [key.dotted for key in KEYS if not key.built and value_of(settings, key) != key.default]
    found = [f"this build does not act on {', '.join(unread)}"] if unread else []
    found += [problem.message for problem in missing(settings, read(path), "note")]
    return found + [problem.message for problem in fits.misfits(settings, path)]


def show(path: Path, as_json: bool) -> None:
    settings = profile.load(path)
    if as_json:
        rows = [_row(settings, key) for key in KEYS]
        emit("profile-show/1", {"file": str(path), "settings": msgspec.to_builtins(settings), "keys": rows})
        return
    for section, keys in SECTIONS.items():
        print(styled(f"[{section}]", "bold", sys.stdout))
        for key in keys.values():
            _print_key(settings, key)
        print()


def _row(settings: Settings, key: Key) -> dict[str, Any]:
    return {
        "key": key.dotted,
        "value": msgspec.to_builtins(value_of(settings, key)),
        "default": None if key.required else msgspec.to_builtins(key.default),
        "required": key.required,
        "affects": key.affects,
        "built": key.built,
        "text": key.text,
    }


def _print_key(settings: Settings, key: Key) -> None:
    value = value_of(settings, key)
    origin = "" if key.required or value != key.default else " (default)"
    print(f"{key.name} = {_toml(value)}{origin}")
    print(f"    {key.text}")
    print(styled(f"    affects {AFFECTS[key.affects]}", "dim", sys.stdout))
    if not key.built:
        print("    this build does not act on it")


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # the values of a profile read the same in TOML and JSON
