"""C8: a setting that counts is read by code, and one that is not built is read nowhere.

An attribute access counts as a read of `section.name` when what it is taken from is called like the section
(`settings.parallel.ranks`, `self._parallel.ranks`, `parallel.ranks`), is annotated with the section's class, or was
assigned from such an expression in the same file. What this cannot see: whether the value then has an effect, a read
through `getattr`, and a section handed on under another name without its type. It errs on the side of "not read".
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tided.profile.schema import KEYS, Key
from tided.settings import Settings

ROOT = Path(__file__).parents[2]
SECTION_OF = {field.type.__name__: field.name for field in msgspec.structs.fields(Settings)}


def reads(tree: ast.AST) -> set[tuple[str, str]]:
    """(section, name) of every attribute read of a section in a file."""
    names = dict(aliases(tree))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            section = section_named_by(node.value, names)
            if section:
                found.add((section, node.attr))
    return found


def section_named_by(node: ast.expr, names: dict[str, str]) -> str | None:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return names.get(name) or (name.lstrip("_") if name.lstrip("_") in SECTION_OF.values() else None)


def aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).split(".")[-1]
            annotation = ast.unparse(node.annotation).split(".")[-1].strip("'\"")
            if annotation in SECTION_OF:
                yield target, SECTION_OF[annotation]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            section = section_named_by(node.value, {})
            if section:
                yield from ((ast.unparse(target).split(".")[-1], section) for target in node.targets)


def all_reads() -> set[tuple[str, str]]:
    files = [path for package in ("tided", "tidectl") for path in (ROOT / package).rglob("*.py")]
    # The profile's own rules judge values; they do not act on them.
    acting = [path for path in files if "profile" not in path.parts and path.name != "settings.py"]
    return {read for path in acting for read in reads(ast.parse(path.read_text()))}


@pytest.fixture(scope="module")
def found() -> set[tuple[str, str]]:
    return all_reads()


@pytest.mark.parametrize("key", [key for key in KEYS if key.built], ids=lambda key: key.dotted)
def test_a_built_setting_is_read(key: Key, found: set[tuple[str, str]]) -> None:
    assert (key.section, key.name) in found


@pytest.mark.parametrize("key", [key for key in KEYS if not key.built], ids=lambda key: key.dotted)
def test_an_unbuilt_setting_is_not_read(key: Key, found: set[tuple[str, str]]) -> None:
    assert (key.section, key.name) not in found, f"{key.dotted} is read: mark it as built"


@pytest.mark.parametrize(
    ("code", "section_and_name"),
    [
        ("settings.tide.seed", ("tide", "seed")),
        ("self._settings.tide.seed", ("tide", "seed")),
        ("tide.seed", ("tide", "seed")),
        ("self._tide.seed", ("tide", "seed")),
        ("def f(options: Tide): return options.seed", ("tide", "seed")),
        ("def f(options: 'settings.Tide'): return options.seed", ("tide", "seed")),
        ("own = settings.tide\nown.seed", ("tide", "seed")),
        ("self.own = settings.tide\nself.own.seed", ("tide", "seed")),
    ],
)
def test_reads_that_are_seen(code: str, section_and_name: tuple[str, str]) -> None:
    assert section_and_name in reads(ast.parse(code))


@pytest.mark.parametrize("code", ["history.seed", "seed", "settings.tide.seed = 1", "'settings.tide.seed'"])
def test_what_is_no_read(code: str) -> None:
    assert ("tide", "seed") not in reads(ast.parse(code))
