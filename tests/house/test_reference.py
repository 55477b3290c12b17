"""docs/profiles.md is what the settings say of themselves."""

from pathlib import Path

from tidectl import reference
from tided.profile.schema import KEYS

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"


def test_the_page_is_what_the_command_prints() -> None:
    made = "tidectl profile reference > docs/profiles.md"
    assert PAGE.read_text() == reference.markdown(), f"a setting has changed: {made}"


def test_every_key_has_a_row() -> None:
    rows = [line.split("|")[1].strip() for line in reference.markdown().splitlines() if line.startswith("| `")]
    assert rows == [f"`{key.name}`" for key in KEYS]
