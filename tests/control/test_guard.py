from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from tests.control.conftest import make_settings
from tided import guard
from tided.settings import Section, Settings


def leaves(section, path=()):
    """(path, field) of every setting, read in another way than the guard does: from msgspec's own view."""
    for field in msgspec.inspect.type_info(section).fields:
        kind = field.type
        meta = kind if isinstance(kind, msgspec.inspect.Metadata) else None
        if meta is None:
            yield from leaves(kind.cls, (*path, field.name))
        else:
            yield (*path, field.name), meta.extra["affects"]


ALL = list(leaves(Settings))
NUMBERS = [path for path, affects in ALL if affects == "numbers"]
OTHERS = [path for path, affects in ALL if affects != "numbers"]


def changed(settings, path):
    """The settings with another value of the right type at `path`; its limits do not matter here."""
    head, *rest = path
    value = getattr(settings, head)
    if rest:
        return msgspec.structs.replace(settings, **{head: changed(value, rest)})
    if isinstance(value, bool):
        other = not value
    else:
        other = (*value, "x") if isinstance(value, tuple) else value + ("x" if isinstance(value, str) else 1)
    return msgspec.structs.replace(settings, **{head: other})


def differing(path):
    settings = make_settings()
    ours, theirs = guard.facts(settings, "id"), guard.facts(changed(settings, path), "id")
    return [name for name, _, _ in guard.compare(ours, theirs)]


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_a_setting_that_changes_numbers_is_in_the_guard(path):
    assert differing(path) == [".".join(path)]


@pytest.mark.parametrize("path", OTHERS, ids=".".join)
def test_a_setting_of_a_node_or_of_the_policy_may_differ(path):
    assert differing(path) == []


def test_there_are_settings_of_each_kind():
    assert len(NUMBERS) > 10
    assert {affects for _, affects in ALL} == {"numbers", "node", "policy"}


class Part(Section, frozen=True):
    fresh: Annotated[int, Meta(extra={"affects": "numbers"})] = 3
    local: Annotated[str, Meta(extra={"affects": "node"})] = ""


class Whole(Section, frozen=True):
    part: Part = Part()


class Silent(Section, frozen=True):
    field: Annotated[int, Meta(ge=0)] = 1


def test_a_new_field_is_in_the_guard_by_construction():
    assert dict(guard.setting_facts(Whole())) == {"part.fresh": "3"}


def test_a_field_that_says_nothing_is_found():
    with pytest.raises(TypeError, match="field does not say what it affects"):
        dict(guard.setting_facts(Silent()))


def test_missing_facts_are_differences_too():
    assert guard.compare({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        ("a", "1", "(absent)"),
        ("b", "2", "3"),
        ("c", "(absent)", "4"),
    ]
    assert guard.compare({"a": "1"}, {"a": "1"}) == []


def test_another_kind_of_machine_counts(monkeypatch):
    settings = make_settings()
    ours = guard.facts(settings, "id")
    monkeypatch.setattr(guard.platform, "machine", lambda: "riscv64")
    differences = guard.compare(ours, guard.facts(settings, "id"))
    assert [(name, theirs) for name, _, theirs in differences] == [("machine", "riscv64")]


def test_checkpoint_libraries_environment_and_further_facts_count(monkeypatch):
    settings = make_settings()
    ours = guard.facts(settings, "checkpoint one", pack_format="1")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    theirs = guard.facts(settings, "checkpoint two", pack_format="2")
    names = [name for name, _, _ in guard.compare(ours, theirs)]
    assert names == ["checkpoint", "environment.MKL_CBWR", "pack_format"]
    assert ours["library.torch"].startswith("2.")


@pytest.mark.parametrize("change", ["content", "name", "new file", "moved bytes"])
def test_the_code_digest_sees_every_change_of_our_sources(tmp_path, change):
    for package in guard.SOURCE_PACKAGES:
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "a.py").write_text("one = 1\n")
        (tmp_path / package / "deep" / "b.py").write_text("two = 2\n")
    before = guard.code_digest(tmp_path)
    assert guard.code_digest(tmp_path) == before
    a, b = tmp_path / "tided" / "deep" / "a.py", tmp_path / "tided" / "deep" / "b.py"
    if change == "content":
        a.write_text("one = 2\n")
    elif change == "name":
        a.rename(a.with_name("c.py"))
    elif change == "new file":
        a.with_name("new.py").touch()
    else:
        a.write_text("one = 1\ntwo")
        b.write_text(" = 2\n")
    assert guard.code_digest(tmp_path) != before


def test_ours_is_digested():
    assert len(guard.code_digest()) == 32
    assert guard.facts(make_settings(), "id")["code"] == guard.code_digest()
