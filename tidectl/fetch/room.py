"""Where a fetch goes on other nodes, and whether there is room for it: asked over ssh before a byte comes."""

from collections.abc import Sequence
from pathlib import Path

from tidectl import room
from tidectl.node_messages import Free, Room
from tidectl.nodes import Node
from tidectl.team import Team

There = tuple[str, Free]
"""A node's name, and what it answered."""


def ask(names: Sequence[str], question: Room) -> list[There]:
    """Raises for a node that is not reached, has no TideLM, or cannot use the directory."""
    with Team([Node(name, (), False) for name in names], Path()) as team:
        answers = team.all([(member, question) for member in team.members], Free)
    return list(zip(names, answers, strict=True))


def refuse_shortage(there: Sequence[There]) -> None:
    for name, found in there:
        room.refuse_shortage(f"{name}, {found.directory}", found.left_bytes, found.free_bytes)
