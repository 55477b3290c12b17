"""What is asked of a node, and what it answers: a JSON object a line, the answers behind `MARK`, because what a login
shell prints comes first. The asking side is `tidectl.peers`, the other `tidectl.node`."""

import msgspec

from tidectl.supervisor import Ended, Run
from tided.control.state import RankState

PROTOCOL = 1
MARK = b"tidelm-node "
MAX_LINE_BYTES = 64 << 20

LogLine = tuple[int, str]
"""Rank and text."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True):
    """The first question; the answer is `About`."""


class Prepare(_Message, frozen=True):
    """Keep a profile (TOML with absolute paths) as `name` and judge it here. `keys`: the control plane's key file to be
    kept; empty where the profile names one, whose leader must then be `leader`. The answer is `Prepared`."""

    name: str
    profile: str
    host: str
    ranks: list[int]
    keys: str
    leader: str


class Begin(_Message, frozen=True):
    """Start the ranks of a profile that is here. The answer is `Done`."""

    profile: str
    ranks: list[int]


class Look(_Message, frozen=True):
    """The answer is `Seen`."""


class End(_Message, frozen=True):
    """Stop what runs: in order until `timeout_s`, then by force. The answer, when all have ended, is `Ends`."""

    timeout_s: float


class Tail(_Message, frozen=True):
    """The end of a rank's log of this run. The answer is `Lines`."""

    rank: int
    lines: int


class OpenLogs(_Message, frozen=True):
    """The last lines of logs, which `MoreLogs` then goes on behind. The answer is `Lines`."""

    ranks: list[int]
    lines: int
    all_runs: bool


class MoreLogs(_Message, frozen=True):
    """What was added to the logs that are open. The answer is `Lines`."""


class Facts(_Message, frozen=True):
    """What the boot guard compares, of a profile as `Prepare` gets it. Nothing is kept. The answer is `Declared`."""

    profile: str
    ranks: list[int]


class Room(_Message, frozen=True):
    """Whether `files` (their bytes by name) could be fetched into a directory: `directory`, or with a profile (as
    `Prepare` gets it) its `model.path` as it counts there, `dense`: its `model.dense`. The answer is `Free`."""

    directory: str
    profile: str
    dense: bool
    files: dict[str, int]


Request = Hello | Prepare | Begin | Look | End | Tail | OpenLogs | MoreLogs | Facts | Room


class About(_Message, frozen=True):
    """`build`: digest of all our sources. `place`: names its state directory among all. `time_s`: of its clock, Unix
    time."""

    protocol: int
    version: str
    build: str
    place: str
    time_s: float


class Prepared(_Message, frozen=True):
    """Where the profile is kept."""

    profile: str


class Done(_Message, frozen=True):
    pass


class Process(_Message, frozen=True):
    """Of a rank: memory that it holds, bytes that it has read from disks (-1: not told), at `Seen.time_s`."""

    memory_bytes: int
    read_bytes: int


class Seen(_Message, frozen=True):
    """`tidectl.supervisor.Status` of a node, and the memory of the machine; 0 where the system does not tell.
    `processes`: of the ranks that live."""

    running: bool
    run: Run | None
    ranks: list[RankState]
    last: Ended | None
    time_s: float
    available_bytes: int
    total_bytes: int
    processes: dict[int, Process]


class Ends(_Message, frozen=True):
    """`ran`: something did. `last`: how its ranks ended."""

    ran: bool
    last: Ended | None


class Lines(_Message, frozen=True):
    """`running`: more may come."""

    lines: list[LogLine]
    running: bool


class Declared(_Message, frozen=True):
    """The facts of the boot guard by rank."""

    ranks: dict[int, dict[str, str]]


class Free(_Message, frozen=True):
    """`left_bytes`: of the files what is not there yet."""

    directory: str
    free_bytes: int
    left_bytes: int


class Failed(_Message, frozen=True):
    """An error of ours, to be raised where it was asked."""

    what: str
    where: str
    hint: str
    exit_code: int


Reply = About | Prepared | Done | Seen | Ends | Lines | Declared | Free | Failed
