"""Every table of docs/results.md is held to the receipts that its section names: what a run printed or wrote.

A figure of three digits or more is found in a receipt, rounded as the table rounds it, as it is, in percent or in
another power of a thousand. A section without a receipt says so; `WITHOUT` lists them, and may only become shorter.
Figures of speed and quality on other pages stand in a paragraph that links the results, or names their source.
"""

import re
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RECEIPTS = DOCS / "receipts"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
FACTORS = (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e-9)
MEASURED = re.compile(r"\d[\d.,]*\s?(?:tok/s|tokens a second|nats|[GM]B/s|ms\b|µs|us\b|times as fast)")
PAGES = sorted({*DOCS.rglob("*.md"), DOCS.parent / "README.md"} - {DOCS / "results.md", DOCS / "profiles.md"})
WITHOUT = {
    "Decode step of the mini",
    "Experts exchanged, and hot reads, beside decoding",
    "A newcomer beside a running answer",
    "What HTTP costs",
    "Reading a pack, next to fio",
    "Simulator",
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## ", (DOCS / "results.md").read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def receipts_of(section: str) -> list[Path]:
    return [RECEIPTS / name for name in re.findall(r"\(receipts/([\w.-]+)\)", section)]


@cache
def figures_of(path: Path) -> tuple[float, ...]:
    return tuple(abs(float(text.replace(",", ""))) for text in NUMBER.findall(path.read_text()))


def told(section: str) -> list[str]:
    """The figures of its tables that a coincidence would hardly find: of three digits and more. What a row computes of
    others calls itself derived."""
    rows = [line for line in section.splitlines() if line.startswith("|")]
    table = "\n".join(row for row in rows if "derived" not in row)
    found = [text.replace(",", "").lstrip("+-") for text in NUMBER.findall(table)]
    return [text for text in found if len(text.replace(".", "").lstrip("0")) >= 3]


def is_among(text: str, pool: tuple[float, ...]) -> bool:
    half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
    return any(abs(figure * factor - float(text)) <= half for figure in pool for factor in FACTORS)


@pytest.mark.parametrize("name", sections())
def test_a_table_says_what_its_receipts_say(name: str) -> None:
    section = sections()[name]
    paths = receipts_of(section)
    assert ("No receipt was kept" in section) == (name in WITHOUT)
    assert paths or name in WITHOUT, "a section names its receipts, or says that it has none"
    pool = tuple(figure for path in paths for figure in figures_of(path))
    assert [text for text in told(section) if paths and not is_among(text, pool)] == []


def test_no_receipt_is_without_a_table() -> None:
    named = {path for section in sections().values() for path in receipts_of(section)}
    assert named == set(RECEIPTS.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_elsewhere_has_its_source_beside_it(page: Path) -> None:
    blocks = re.split(r"\n\s*\n", page.read_text())
    alone = [block for block in blocks if MEASURED.search(block) and not re.search(r"results\.md|source", block)]
    assert alone == []
