"""The scanner says where keys stand; a TOML parser says what they mean. Both must see the same document."""

from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from tided.profile.positions import Location, locate


def leaves(value: Any, at: Location = ()) -> dict[Location, Any]:
    """Every value that is no table, by location; arrays count by themselves and by their elements."""
    if isinstance(value, dict):
        return {place: leaf for key, inner in value.items() for place, leaf in leaves(inner, (*at, key)).items()}
    found = {at: value}
    if isinstance(value, list):
        for index, inner in enumerate(value):
            found |= leaves(inner, (*at, index))
    return found


def agree(text: str) -> None:
    """Each leaf of the parsed document has a value span whose text parses to that very leaf."""
    found = locate(text)
    expected = leaves(tomli.loads(text))
    in_tables = {place for place in expected if place in found.values}
    arrays_of_tables = {place for place in expected if place not in found.values}
    for place in in_tables:
        span = found.values[place]
        assert tomli.loads(f"x = {text[span.start : span.end]}")["x"] == expected[place], place
        assert place in found.keys
    # [[a]] has no value that stands in one place; only its headers do.
    assert all(isinstance(expected[place], list) and place in found.keys for place in arrays_of_tables)
    extra = {place for place in found.values if place not in expected}
    tables = {place for place in extra if text[found.values[place].start] == "{"}
    assert extra == tables


TRICKY = [
    "",
    "# only a comment",
    "a = 1 # b = 2\n",
    'a = "# no comment" # one\n[b] # [c]\nc = "]" \n',
    "'a.b' = 1\n\"c d\".e = 2\n",
    'a."b \\" c".d = true',
    "a . b = 1\n[ x . y ]\nz=2",
    'a = """\nb = 1\n[c]\n\\"""\n"""\nd = 2',
    'a = """x"""""\nb = 1',
    "a = '''it's [here]\n'''\nb = '\\'\n",
    "a = [\n  1, # one\n  2,\n  # [three]\n]\nb = [[1, 2], ['x', \"y\"], []]\n",
    "a = { b = 1, c = { d = [1, { e = 2 }] }, 'f' = 3 }\ng = {}\n",
    "a.b = { c.d = 1, c.e = 2 }\n",
    "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n[[a.e]]\nf = 4\n",
    "a = 1979-05-27 07:32:00 # when\nb = 07:32:00\nc = -1.5e+3\nd = +inf\n",
    "a = 1\r\n[b]\r\nc = [1,\r\n2]\r\n",
    "[b.c]\nd = 1\n[b]\ne = 2\n",
    '"\u00e4\u65e5" = "\u00e4"\nb = 1\n',
    "a = 1\n\n\n",
]


@pytest.mark.parametrize("text", TRICKY)
def test_scanner_and_parser_see_the_same(text: str) -> None:
    agree(text)


def test_where_keys_and_values_stand() -> None:
    text = '[model]\npath = "x"  # here\n[parallel]\nhosts = ["a",\n  "b"]\n'
    found = locate(text)
    assert text[slice(*found.keys["model",])] == "model"
    assert text[slice(*found.keys["model", "path"])] == "path"
    assert text[slice(*found.values["model", "path"])] == '"x"'
    assert text[slice(*found.values["parallel", "hosts", 1])] == '"b"'


def test_a_header_is_a_better_place_than_a_parent_named_on_the_way() -> None:
    text = "[a.b]\nc = 1\n[a]\nd = 2\n"
    assert locate(text).keys["a",].start == text.index("[a]\n") + 1


KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True),
    st.text(max_size=6).map(lambda text: '"' + "".join(f"\\U{ord(c):08x}" for c in text if c < "\ud800") + '"'),
    st.from_regex(r"'[a-z .#\[\]={}\"]{0,6}'", fullmatch=True),
)
SPACE = st.sampled_from(["", " ", "\t", "  "])
GAP = st.sampled_from(["", " ", "\n", " # ] } \" ' =\n", "\r\n\t"])
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.sampled_from(["true", "false", "1_000", "0x1F", "1.5", "-inf", "1979-05-27", "1979-05-27 07:32:00Z"]),
    st.from_regex(r"'[a-z .#\[\]={},\"]{0,8}'", fullmatch=True),
    st.from_regex(r'"([a-z .#\[\]={},\']|\\"|\\\\|\\n){0,8}"', fullmatch=True),
    st.from_regex(r'"""([a-z .#\[\]={},\'\n]|\\"|\\\\|""?[a-z]){0,8}"{3,5}', fullmatch=True),
    st.from_regex(r"'''([a-z .#\[\]={},\"\n]|''?[a-z]){0,8}'{3,5}", fullmatch=True),
)


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    elements = st.lists(st.tuples(GAP, inner, GAP).map("".join), max_size=4)
    pairs = st.lists(st.tuples(SPACE, KEYS, SPACE, st.just("="), SPACE, inner, SPACE).map("".join), max_size=3)
    return elements.map(lambda parts: f"[{','.join(parts)}]") | pairs.map(lambda parts: f"{{{','.join(parts)}}}")


VALUES = st.recursive(SCALARS, containers, max_leaves=6)
DOTTED = st.lists(KEYS, min_size=1, max_size=3).map(".".join)
LINES = st.one_of(
    st.tuples(SPACE, DOTTED, SPACE, st.just("="), SPACE, VALUES, st.sampled_from(["", " # x = [1"])).map("".join),
    DOTTED.map(lambda name: f"[{name}]"),
    DOTTED.map(lambda name: f"[[ {name} ]]"),
    st.just("# [a] = 'b"),
    st.just(""),
)


def kept(lines: list[str], line_end: str) -> str:
    """Lines that together are TOML: one that would repeat a key or contradict another is left out."""
    text = ""
    for line in lines:
        try:
            tomli.loads(text + line + line_end)
        except tomli.TOMLDecodeError:
            continue
        text += line + line_end
    return text


@given(st.lists(LINES, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_scanner_and_parser_agree_on_any_document(lines: list[str], line_end: str) -> None:
    agree(kept(lines, line_end))
