"""Every table of docs/results.md is held to the receipts that its section names: what a run printed or wrote.

A row of a table stands on one line of a receipt, or in one object of a JSON one: all its figures, with their signs,
rounded as the table rounds them, as they are, in percent or in another power of a thousand; and those of its words that
receipts know. In tables whose columns are lines of a receipt (`BY_PIECE`) that holds for each piece of a cell, between
commas, semicolons and brackets. A row of figures that are computed of others calls itself derived.

A section without a receipt says so; `WITHOUT` lists them, and may only become shorter. Figures of speed and quality on
other pages stand in a paragraph that links the results, or names their source.
"""

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RECEIPTS = DOCS / "receipts"
NUMBER = re.compile(r"(?<![\w.-])[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
PIECE = re.compile(r"[|;(]|, ")
WORD = re.compile(r"[a-z]{4,}")
FACTORS = (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e-9)
MEASURED = re.compile(r"\d[\d.,]*\s?(?:tok/s|tokens a second|nats|[GM]B/s|ms\b|µs|us\b|times as fast)")
PAGES = sorted({*DOCS.rglob("*.md"), DOCS.parent / "README.md"} - {DOCS / "results.md", DOCS / "profiles.md"})
WITHOUT = {
    "Experts exchanged, and hot reads, beside decoding",
    "Reading a pack, next to fio",
}
BY_PIECE = {
    "Decode step of the mini",
    "What HTTP costs",
    "A newcomer beside a running answer",
    "What plans and rests cost",
    "Faults",
    "Drafts on the mini",
    "Viewers of the map",
    "A decode step at the real shapes on a GPU",
    "A prompt at the real shapes on a GPU",
    "Memory: the plan against published budgets",
}


class Line(NamedTuple):
    words: frozenset[str]
    figures: tuple[float, ...]


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


SECTIONS = sections((DOCS / "results.md").read_text())


def receipts_of(section: str) -> list[Path]:
    return [RECEIPTS / name for name in re.findall(r"\(receipts/([\w.-]+)\)", section)]


@cache
def lines_of(path: Path) -> tuple[Line, ...]:
    text = path.read_text()
    parts = _objects(json.loads(text)) if path.suffix == ".json" else text.splitlines()
    return tuple(_line(part) for part in parts if NUMBER.search(part))


def _objects(value: Any, listed: bool = False) -> Iterator[str]:
    """Those that are elements of a list, each with all that is below it."""
    if isinstance(value, dict):
        if listed:
            yield json.dumps(value)
        for part in value.values():
            yield from _objects(part)
    elif isinstance(value, list):
        for part in value:
            yield from _objects(part, listed=True)


def _line(text: str) -> Line:
    return Line(frozenset(WORD.findall(text.lower())), tuple(map(_value, NUMBER.findall(text))))


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def is_among(text: str, figures: tuple[float, ...]) -> bool:
    value, half = _value(text), 0.5001 * 10.0 ** -len(text.partition(".")[2])
    signed = text[0] in "+-−"
    found = figures if signed else tuple(map(abs, figures))
    return any(abs(figure * factor - value) <= half for figure in found for factor in FACTORS)


def unfounded(section: str, by_piece: bool, receipts: list[Path]) -> list[str]:
    """The rows of its tables, or their pieces, that stand on no line of the receipts."""
    lines = [line for path in receipts for line in lines_of(path)]
    known = frozenset(word for line in lines for word in line.words)
    parts = [part for row in _rows(section) for part in (PIECE.split(row) if by_piece else [row])]
    return [part for part in parts if NUMBER.search(part) and not _stands(part, by_piece, known, lines)]


def _rows(section: str) -> Iterator[str]:
    """Of tables, without their heads."""
    lines = section.splitlines()
    for before, row in itertools.pairwise(lines):
        is_head = row.startswith("|---") or f"{row}\n|---" in section
        if row.startswith("|") and before.startswith("|") and not is_head and "derived" not in row:
            yield row


def _stands(part: str, by_piece: bool, known: frozenset[str], lines: list[Line]) -> bool:
    words = frozenset() if by_piece else frozenset(WORD.findall(part.lower())) & known
    texts = NUMBER.findall(part)
    return any(words <= line.words and all(is_among(text, line.figures) for text in texts) for line in lines)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_says_what_its_receipts_say(name: str) -> None:
    section = SECTIONS[name]
    paths = receipts_of(section)
    assert ("No receipt was kept" in section) == (name in WITHOUT)
    assert paths or name in WITHOUT, "a section names its receipts, or says that it has none"
    assert not paths or unfounded(section, name in BY_PIECE, paths) == []


def test_no_receipt_is_without_a_table() -> None:
    named = {path for section in SECTIONS.values() for path in receipts_of(section)}
    assert named == set(RECEIPTS.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_elsewhere_has_its_source_beside_it(page: Path) -> None:
    blocks = re.split(r"\n\s*\n", page.read_text())
    alone = [block for block in blocks if MEASURED.search(block) and not re.search(r"results\.md|source", block)]
    assert alone == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("What a budget costs, by `tidectl eval`", "| 35 % | fast |", "| 35 % | balanced |"),
        ("Residency on the mini", "+0.226 (+0.156 to +0.301)", "-0.226 (+0.156 to +0.301)"),
        ("Residency on the mini", "| 27.1 % | 0 |", "| 29.3 % | 0 |"),
        ("GLM-5.3's latents in FP8", "| 0.00449 |", "| 0.00355 |"),
        ("Expert kernels on a GPU", "| 6, 22 | 83.1 |", "| 6, 22 | 64.3 |"),
    ],
)
def test_a_wrong_figure_or_another_rows_is_found(name: str, right: str, wrong: str) -> None:
    section = SECTIONS[name]
    assert right in section
    changed = section.replace(right, wrong, 1)
    assert len(unfounded(changed, name in BY_PIECE, receipts_of(section))) == 1
