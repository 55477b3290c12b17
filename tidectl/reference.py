"""`tidectl profile reference`: every key of a profile as a page of Markdown, of the settings' own descriptions."""

import msgspec

from tided.profile.schema import SECTIONS, Key, wanted
from tided.settings import MOST_BYTES

AFFECTS = {"numbers": "all ranks", "node": "this node", "policy": "rank 0"}
HEAD = """\
# Profiles

Every key, made by `tidectl profile reference` of the descriptions that a start checks by. `tidectl profile show
PROFILE` prints the values of one profile, `tidectl profile check PROFILE` tells everything that is wrong with it.

Acts on: `all ranks`, it changes what is computed, so it is the same on every rank or the boot guard refuses; `this
node`, it may differ between nodes; `rank 0`, rank 0 alone decides by it. Paths are relative to the profile's directory.
"""


def markdown() -> str:
    return "\n".join([HEAD, *map(_section, SECTIONS)])


def _section(name: str) -> str:
    rows = [_row(key) for key in SECTIONS[name].values()]
    return "\n".join([f"## [{name}]", "", "| key | value | default | acts on | |", "|---|---|---|---|---|", *rows, ""])


def _value(key: Key) -> str:
    return wanted(key.type).replace(f" to {MOST_BYTES}", "")  # a bound against overflow, of no interest here


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{msgspec.json.encode(key.default).decode()}`"
    cells = (f"`{key.name}`", _value(key), default, AFFECTS[key.affects], key.text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
