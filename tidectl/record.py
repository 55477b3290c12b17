"""`nodes.json` in the state directory of rank 0's node: which nodes the run of several was started on, so that `stop`,
`status` and `logs` find them whatever becomes of the profile. A run on this machine alone has none."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidectl.nodes import Node
from tidectl.supervisor import read_file
from tided.files import write_private

FILE = "nodes.json"


class Record(msgspec.Struct, frozen=True):
    """`over`: the run was ended on all nodes, so nobody needs to be asked any more."""

    nodes: list[Node]
    over: bool = False


def write(state_dir: Path, nodes: Sequence[Node], over: bool = False) -> None:
    if len(nodes) > 1:
        write_private(state_dir / FILE, msgspec.json.encode(Record(list(nodes), over)) + b"\n")
    else:
        (state_dir / FILE).unlink(missing_ok=True)


def read(state_dir: Path) -> Record | None:
    return read_file(state_dir / FILE, Record)


def nodes_here(state_dir: Path) -> list[Node]:
    """The nodes of what runs, or ran last: this machine alone where nothing else is written."""
    found = read(state_dir)
    return found.nodes if found else [Node("", (), True)]
