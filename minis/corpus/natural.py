"""Readers of natural text. The texts keep their own terms, are read at training time and are never stored here."""

from __future__ import annotations

import ast
import gzip
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

_CALIBRATION = "exllamav3/conversion/standard_cal_data/"
_MACRO = re.compile(r"^[.'].*$", re.M)
_ESCAPE = re.compile(r"\\f[A-Z0-9(\[][A-Z]{0,2}\]?|\\[&,/|]|\\\(..|\\\*\(..")


def calibration(wheel: Path, name: str) -> str:
    """One of the calibration texts inside the exllamav3 wheel."""
    with ZipFile(wheel) as z:
        return z.read(f"{_CALIBRATION}{name}.utf8").decode("utf-8", "replace")


def chunks(text: str, size: int = 3000) -> Iterator[str]:
    """Cuts at blank lines, so that a document starts where a paragraph does."""
    part = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if part and len(part) + len(paragraph) > size:
            yield part
            part = ""
        part += ("\n\n" if part else "") + paragraph
        while len(part) > 2 * size:
            yield part[:size]
            part = part[size:]
    if part.strip():
        yield part


def _python_files() -> list[Path]:
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])]
    files = [f for root in roots for f in root.rglob("*.py") if "test" not in f.as_posix() and f.stat().st_size > 1500]
    return sorted(set(files))


def code(rng: random.Random, limit: int) -> Iterator[str]:
    """Installed Python sources in random order, up to `limit` characters."""
    files = _python_files()
    rng.shuffle(files)
    for f in files:
        text = f.read_text("utf-8", "replace")[:40_000]
        if len(text.splitlines()) < 20:
            continue
        yield from chunks(text, 3200)
        limit -= len(text)
        if limit < 0:
            return


def docstrings(rng: random.Random, limit: int) -> Iterator[str]:
    """Docstrings of installed modules: prose about programs."""
    files = _python_files()
    rng.shuffle(files)
    for f in files:
        try:
            tree = ast.parse(f.read_text("utf-8", "replace"))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]
        text = "\n\n".join(d for d in found if d and len(d) > 200)
        if len(text) > 500:
            yield from chunks(text[:30_000])
            limit -= min(len(text), 30_000)
        if limit < 0:
            return


def manuals(rng: random.Random, limit: int, folder: Path = Path("/usr/share/man/man1")) -> Iterator[str]:
    """Manual pages without their layout commands, where the system has any."""
    files = sorted(folder.glob("*.gz")) if folder.is_dir() else []
    rng.shuffle(files)
    for f in files:
        try:
            raw = gzip.decompress(f.read_bytes()).decode("utf-8", "replace")
        except OSError:
            continue
        text = _ESCAPE.sub("", _MACRO.sub("", raw)).replace("\\-", "-").replace("\\e", "\\")
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) > 1000:
            yield from chunks(text[:12_000])
            limit -= min(len(text), 12_000)
        if limit < 0:
            return
