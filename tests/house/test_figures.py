"""Every table of docs/results.md is held to the receipts that its section names: what a run printed or wrote.

A row of a table stands on one line of a receipt, or in one object of a JSON one: all its figures, with their signs,
rounded as the table rounds them, as they are, in percent or in another power of a thousand; and those of its words that
receipts know. In tables whose columns are lines of a receipt (`BY_PIECE`) that holds for each piece of a cell, between
commas, semicolons and brackets. A row of figures that are computed of others calls itself derived.

Tables that our own tools make of receipts (`MADE`) are what these make, to the character.

A figure of prose, with its unit, stands on a line of its section's receipts too, or in a sentence that says what it is
instead (`MARKED`), or is a setting of the run (`GIVEN`). Figures on other pages stand in a paragraph that links the
results or names their source; sizes, limits and defaults are in `GIVEN` by page.
"""

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.run import read_kept
from tests.faults.table import BEGIN, END, render
from tidectl.bench.receipt import read
from tidectl.bench.table import markdown

DOCS = Path(__file__).parents[2] / "docs"
RECEIPTS = DOCS / "receipts"
NUMBER = re.compile(r"(?<![\w.-])[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
PIECE = re.compile(r"[|;(]|, ")
WORD = re.compile(r"[a-z]{4,}")
FACTORS = (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e-9)
UNIT = r"\s?(?:tok/s|tokens/s|tokens a second|nats|[GMk]i?B(?:/s)?|ms|µs|us|s|%|times as fast)(?![\w/])"
MORE = rf"(?:(?:,| to| and|,? or) {NUMBER.pattern})*"  # "18 to 45 us": both are
MEASURED = re.compile(rf"({NUMBER.pattern})(?={MORE}({UNIT}))")
DECIMAL = re.compile(r"(?<![\w.-])([-+−]?\d+\.\d{2,})()(?!\.?\d)")  # precise enough to be measured, whatever its unit
SENTENCE = re.compile(r"(?<=[.:;])\s+(?=[A-Z`(\[*0-9])|\n\s*\n")
MARKED = re.compile(
    r"derived|predict|without (?:a )?receipt|(?:another|other|earlier) runs?\b|published", re.IGNORECASE
)
PAGES = sorted(
    {*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "SECURITY.md"}
    - {DOCS / "results.md", DOCS / "profiles.md"}
)
MADE = {"Faults", "Speed by `tidectl bench`"}  # of receipts, by our own tools: to the character
SOURCE = re.compile(r"results\.md|\bsources?\b(?!_)", re.IGNORECASE)
GIVEN = {  # settings, sizes and limits: nothing that a run has measured
    "results.md": {"128 GB", "121.7 GiB", "4.87 GB/s", "260 MB", "6.65"},
    "README.md": {"510 GB", "410 GB", "128 GB", "65 %"},
    "SECURITY.md": {"16 MiB"},
    "anthropic.md": {"10 s"},
    "architecture.md": {
        "1 GiB",
        "4 MB",
        "0.1 s",
        "1 s",
        "256 MB",
        "64 MiB",
        "0.3 %",
        "97 %",
    },  # what bf16 rounds; a test's bound
    "compare.md": {"128 GB", "5 %", "10 %"},
    "eval.md": {"35 %", "95 %", "100 %"},
    "failures.md": {"20 s"},
    "exl3-pack.md": {"4.8 MB"},
    "fetch.md": {"64 MB"},
    "mxfp4-pack.md": {"9.4 MB", "13 MB", "256 MB"},
    "http.md": {"10 s", "90 s", "64 MiB", "60 s", "1 GiB"},
    "install.md": {"128 GB", "510 GB", "293 GB", "145 GB", "15 GB", "20 GB"},
    "openai.md": {"1 GiB", "1 MB", "1 s"},
    "tide.md": {"290 GB", "128 GB", "55 %", "100 %"},
    "using.md": {"30 %"},  # engine.prefill_share
}
BY_PIECE = {
    "A decode step of GLM-5.3 on a GPU",
    "Decode step of the mini",
    "What HTTP costs",
    "A newcomer beside a running answer",
    "What plans and rests cost",
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


def unfounded_prose(section: str, given: set[str], receipts: list[Path]) -> list[str]:
    """Figures of its sentences that stand on no line of the receipts, with their units."""
    lines = [line for path in receipts for line in lines_of(path)]
    prose = "\n".join(line for line in section.splitlines()[1:] if not line.startswith("|"))
    told = [sentence for sentence in SENTENCE.split(prose) if not MARKED.search(sentence)]
    pairs = [pair for sentence in told for pair in (*DECIMAL.findall(sentence), *MEASURED.findall(sentence))]
    found = {text: shown(text, unit) for text, unit in pairs}  # with its unit, where it has one
    return [
        with_unit
        for text, with_unit in found.items()
        if with_unit not in given and not any(is_among(text, line.figures) for line in lines)
    ]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("A prefix from disk", "446 times as fast", "946 times as fast"),
        ("GLM-5.3's latents in FP8", "0.0044 to 0.0066", "0.0094 to 0.0066"),
        ("A newcomer beside a running answer", "was 0.39 s", "was 0.29 s"),
    ],
)
def test_a_wrong_figure_of_a_sentence_is_found(name: str, right: str, wrong: str) -> None:
    section = SECTIONS[name]
    assert right in section
    changed = section.replace(right, wrong, 1)
    assert len(unfounded_prose(changed, GIVEN["results.md"], receipts_of(section))) == 1


def shown(text: str, unit: str) -> str:
    return f"{text.rstrip(',')} {unit.strip()}".strip()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_says_what_its_receipts_say(name: str) -> None:
    section = SECTIONS[name]
    paths = receipts_of(section)
    assert paths, "a section names its receipts"
    assert name in MADE or unfounded(section, name in BY_PIECE, paths) == []


def test_no_receipt_is_without_a_table() -> None:
    named = {path for section in SECTIONS.values() for path in receipts_of(section)}
    assert named == set(RECEIPTS.iterdir())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_sentence_says_what_its_receipts_say(name: str) -> None:
    assert unfounded_prose(SECTIONS[name], GIVEN.get("results.md", set()), receipts_of(SECTIONS[name])) == []


def test_the_table_of_faults_is_what_its_receipt_makes() -> None:
    made = SECTIONS["Faults"].partition(BEGIN)[2].partition(END)[0].strip()
    assert made == render(read_kept(RECEIPTS / "faults.jsonl"), {})


def test_the_table_of_bench_is_what_its_receipt_makes() -> None:
    path = RECEIPTS / "bench-mini-deepseek.json"
    assert markdown([(path.stem, read(path))]).strip() in SECTIONS["Speed by `tidectl bench`"]


def test_only_sections_that_are_there_are_excused() -> None:
    assert SECTIONS.keys() >= BY_PIECE | MADE


def alone(page: str, given: set[str]) -> list[str]:
    """Figures in paragraphs that name no source."""
    blocks = [
        block
        for block in re.split(r"\n\s*\n", page)
        if not re.search(r"results\.md|\bsources?\b(?!_)", block, re.IGNORECASE)
    ]
    found = [shown(text, unit) for block in blocks for text, unit in MEASURED.findall(block)]
    return [figure for figure in found if figure not in given]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_elsewhere_has_its_source_beside_it(page: Path) -> None:
    assert alone(page.read_text(), GIVEN.get(page.name, set())) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("What a budget costs, by `tidectl eval`", "| 35 % | fast |", "| 35 % | balanced |"),
        ("Residency on the mini", "+0.226 (+0.156 to +0.301)", "-0.226 (+0.156 to +0.301)"),
        ("Residency on the mini", "| 27.1 % | 0 |", "| 29.3 % | 0 |"),
        ("GLM-5.3's latents in FP8", "| 0.000118 |", "| 0.000128 |"),
        ("Expert kernels on a GPU", "| 6, 22 | 83.1 |", "| 6, 22 | 64.3 |"),
    ],
)
def test_a_wrong_figure_or_another_rows_is_found(name: str, right: str, wrong: str) -> None:
    section = SECTIONS[name]
    assert right in section
    changed = section.replace(right, wrong, 1)
    assert len(unfounded(changed, name in BY_PIECE, receipts_of(section))) == 1
