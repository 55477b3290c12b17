"""`tidectl tide export | import | merge | reset`. Changing a history waits for nobody: it is refused while a daemon
records."""

import sys
from pathlib import Path
from typing import Any

from tidectl import profiles
from tidectl.output import emit, say
from tidectl.state import as_owner, state_dir
from tidectl.tide.model import model_of, read
from tided.errors import DataError, UnavailableError, UsageError
from tided.files import write_private
from tided.tide.export import Export, added, encoded, export_of, load_export, merged
from tided.tide.history import History, set_aside


def export(file: Path, profile: Path | None, as_json: bool) -> None:
    model = model_of(profile)
    history = read(model)
    if history.note or not model.history.exists():
        raise DataError(history.note or "nothing was recorded of this model yet", where=str(model.history))
    _write(file, export_of(history.demand, model.identity, model.family, model.shape))
    _done("export", as_json, f"{history.demand.requests} requests", {"file": str(file)}, history.demand.requests)


def import_(file: Path, profile: Path | None, merge: bool, replace: bool, as_json: bool) -> None:
    if merge and replace:
        raise UsageError("--merge and --replace exclude each other")
    model, new = model_of(profile), load_export(file)
    mine = export_of(new.demand, model.identity, model.family, model.shape)
    if (new.identity, new.shape) != (mine.identity, mine.shape):
        raise DataError(f"is a history of {new.name}; the profile's model is {mine.name}", where=str(file))
    before = read(model).demand
    if before.requests and not (merge or replace):
        raise UsageError(
            f"there is a history of {before.requests} requests already",
            hint="--merge adds the file's votes to it, --replace sets it aside first",
        )
    kept, directory = model.history, state_dir()
    with as_owner(directory):
        aside = set_aside(kept) if replace else None
        history = History.open(kept.parent, model.identity, model.shape, record=True)
        try:
            history.replace(added(history.demand, new.demand))
        finally:
            history.close()
    if history.note or aside:
        say(history.note or f"the history so far is now {aside}")
    _done("import", as_json, f"{history.demand.requests} requests", {"aside": _text(aside)}, history.demand.requests)


def merge(one: Path, other: Path, out: Path, as_json: bool) -> None:
    try:
        both = merged(load_export(one), load_export(other))
    except ValueError as error:
        raise DataError(f"two models do not mix: {error}", where=f"{one}, {other}") from error
    _write(out, both)
    _done("merge", as_json, f"{both.requests} requests", {"file": str(out)}, both.requests)


def reset(profile: Path | None, yes: bool, as_json: bool) -> None:
    model = model_of(profile)
    requests = read(model).demand.requests
    if model.history.exists() and not yes:
        _confirm(f"forget what {requests} requests taught of {profiles.name_of(str(model.profile))}?")
    file, directory = model.history, state_dir()
    with as_owner(directory):
        aside = set_aside(file)
    words = f"set aside as {aside}" if aside else "there was no history"
    _done("reset", as_json, words, {"aside": _text(aside)}, requests)


def _write(file: Path, content: Export) -> None:
    if file.exists():
        raise UsageError(f"{file} is there already", hint="choose another name, or remove it")
    try:
        write_private(file, encoded(content))
    except OSError as error:
        raise UnavailableError(f"cannot be written: {error.strerror}", where=str(file)) from error


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("this asks before it forgets", hint="off a terminal, say --yes")
    import typer

    typer.confirm(question, abort=True, err=True)


def _done(command: str, as_json: bool, words: str, more: dict[str, Any], requests: int) -> None:
    if as_json:
        emit(f"tide.{command}/1", {"requests": requests, **more})
    else:
        say(words)


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
