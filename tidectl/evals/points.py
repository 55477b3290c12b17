"""Rows of several starts in one file: a server has one budget at a time, a curve has several."""

import json
from pathlib import Path
from typing import Any

from tidectl.writable import refuse_unwritable
from tided.errors import DataError, UnavailableError
from tided.files import whole

NAMES = ("model", "texts", "top", "reference", "case", "overlay", "share")
ALIKE = ("model", "texts", "top")
"""What rows have in common that stand in one table. Their references may differ: rise and KL are compared only where
those are the same."""
MOST_BYTES = 64 << 20


def kept(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the rows to the file, in place of older ones of the same case; gives all that are of the same model, texts
    and number of likeliest tokens. Raises DataError for a file of something else."""
    old = _read(file)
    names = {_of(row, NAMES) for row in rows}
    every = [row for row in old if _of(row, NAMES) not in names] + rows
    _write(file, every)
    same = {_of(row, ALIKE) for row in rows}
    return [row for row in every if _of(row, ALIKE) in same]


def refuse(file: Path) -> None:
    """Before minutes are spent. Raises TideError for a file of something else, and where none can be written."""
    refuse_unwritable(file, "--points")
    _read(file)


def _of(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _read(file: Path) -> list[dict[str, Any]]:
    hint = "--points names a file that `tidectl eval` made, or one that is not there yet"
    try:
        if not file.exists():
            return []
        if file.stat().st_size > MOST_BYTES:
            raise DataError(f"over {MOST_BYTES} bytes", where=str(file), hint=hint)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"the points cannot be read ({error})", where=str(file), hint=hint) from error
    if not all(isinstance(row, dict) and {*NAMES, "mean"} <= row.keys() for row in rows):
        raise DataError("no points of an evaluation", where=str(file), hint=hint)
    return rows


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Whole, or as it was."""
    try:
        with whole(file) as out:
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
    except OSError as error:
        raise UnavailableError(f"the points cannot be written ({error.strerror})", where=str(file)) from error
