"""One seed: a fault at a stage, and everything that must hold afterwards."""

import asyncio
import re
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from tests.faults import strike
from tests.faults.clients import EXACT, Heard, asked, listen, others
from tests.faults.grid import Case, case
from tests.faults.pair import Nodes, Pair, health
from tests.soak import watch
from tests.soak.clients import Answer
from tided.tide.demand import RouterShape
from tided.tide.history import History

LIMIT_S = 10.0  # from the strike until both ranks have ended
SILENT_S = 60.0  # of a pair that goes on over a link that stays slow; others as long as it may take to end
RIGHT_CODES = {0, 65, 69, 70, None}  # None: of a node that cannot be asked any more
KILLED = 137  # by what struck it, or stopped and then killed by its supervisor
ROUNDS, SETTLE_S, REST_S = 5, 1.0, 60.0
HISTORY = re.compile(r"demand-\w{16}-(\d+)x(\d+)k(\d+)\.sqlite")
UNFINISHED = re.compile(r"^\.|\.(tmp|half)$")


@dataclass
class Outcome:
    """`seconds`: from the strike until both ranks had ended; of a pair that went on, the longest in which no client was
    told anything. `whole` and `broken`: of the requests that were open, or came later."""

    case: Case
    what: str = ""
    seconds: float = 0.0
    codes: list[int | None] = field(default_factory=list)
    whole: int = 0
    broken: int = 0
    compared: int = 0
    lost: int = 0  # votes that could not be written
    faults: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.what != "went on"

    @property
    def line(self) -> str:
        verdict = "nothing wrong" if not self.faults else "WRONG: " + "; ".join(self.faults)
        codes = f" {self.codes}" if self.ended else ""
        return (
            f"{self.case}: {self.what}{codes} in {self.seconds:.1f} s, {self.whole} answers whole, {self.broken} not, "
            f"{self.compared} compared: {verdict}"
        )


class Kept(msgspec.Struct, frozen=True):
    """An outcome as a line of JSON."""

    seed: int
    line: str
    what: str
    seconds: float
    codes: list[int | None]
    whole: int
    broken: int
    compared: int
    lost: int
    faults: list[str]


def kept(outcome: Outcome) -> bytes:
    fields = {name: value for name, value in vars(outcome).items() if name != "case"}
    fields["seconds"] = round(outcome.seconds, 2)
    return msgspec.json.encode(Kept(outcome.case.seed, outcome.line, **fields)) + b"\n"


def read_kept(path: Path) -> list[Outcome]:
    """Those of a file; of a seed that ran several times, the newest."""
    if not path.exists():
        return []
    found = {one.seed: one for one in map(msgspec.json.Decoder(Kept).decode, path.read_bytes().splitlines())}
    return [
        Outcome(
            case(one.seed), one.what, one.seconds, one.codes, one.whole, one.broken, one.compared, one.lost, one.faults
        )
        for one in sorted(found.values(), key=lambda one: one.seed)
    ]


class Trial:
    """A case on a pair. Afterwards the pair serves, whatever became of it."""

    def __init__(self, case: Case, pair: Pair, expected: dict[str, Answer], limit_s: float = LIMIT_S) -> None:
        self.case, self.pair, self.expected, self.limit_s = case, pair, expected, limit_s
        self.out = Outcome(case)
        self.heard: list[Heard] = []
        self.struck_s: float | None = None
        self.votes = 0.0

    def run(self) -> Outcome:
        try:
            if self.case.stage == "boot":
                self._boot()
            else:
                serve(self.pair)
                self._damage()
                self.votes = votes(self.pair)
                self._arm()
                asyncio.run(self._traffic())
                self._judge()
            self._compare(self.heard)
            self._clear()
            self._again()
        except Exception as error:
            self._wrong(f"{type(error).__name__}: {error}")
        return self.out

    def _wrong(self, what: str) -> None:
        self.out.faults.append(what)

    def _arm(self) -> None:
        self.pair.arm(self.case.rank, self.case.strike)

    # A start that is struck

    def _boot(self) -> None:
        if self.pair.left():
            stop(self.pair)
        self.votes = votes(self.pair)
        self._damage()
        self._arm()
        began_s = time.monotonic()
        self.pair.start()
        ready = asyncio.run(self._starting())
        self.struck_s = self.struck_s or began_s
        self.out.seconds = time.monotonic() - self.struck_s
        self.out.what = "went on" if ready else "start ended"
        if not ready:
            self._gone("the start")
            self.out.what, self.out.codes = "start ended", self.pair.codes()
        elif self.case.expects == "ends":
            self._wrong("the start went on")

    async def _starting(self) -> bool:
        """A client tries meanwhile; it must be told, or served."""
        early = asyncio.create_task(listen(self.pair.url, EXACT["country"], Heard("country"), timeout_s=5))
        watcher = asyncio.create_task(self._watch())
        ready = await asyncio.to_thread(self.pair.wait_ready)
        watcher.cancel()
        self.heard.append(await early)
        return ready

    # Traffic that is struck

    async def _traffic(self) -> None:
        for number in range(ROUNDS):
            if self.struck_s is not None or not self.pair.left():
                return
            await self._round(number)

    async def _round(self, number: int) -> None:
        names = sorted(EXACT)
        at = self.case.seed + number
        mine = [names[at % len(names)], names[(at * 5 + 2) % len(names)]]
        bodies = [(EXACT[name], Heard(name)) for name in mine]
        bodies += [(body, Heard("")) for body in others(self.case.seed * 10 + number)]
        heard = [one for _, one in bodies]
        self.heard += heard
        if self.case.fault.name == "a client that does not read":
            heard[0].lasts = True
        tasks: list[asyncio.Task[Heard]] = []

        def hold(one: Heard) -> Callable[[], bool]:
            return lambda: one.lasts and self.struck_s is not None and sum(not task.done() for task in tasks) > 1

        tasks += [asyncio.create_task(listen(self.pair.url, body, one, hold(one))) for body, one in bodies]
        watcher = asyncio.create_task(self._watch())
        if self.case.stage == "shutdown":
            while not any(len(one.times) > 2 for one in heard) and not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            self.pair.ask_to_stop()
        await asyncio.gather(*tasks)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(watcher), SETTLE_S if self.struck_s is None else self._busy_s)
        watcher.cancel()

    _busy_s = 12.0  # longest deed of the parent

    async def _watch(self) -> None:
        """Waits for the strike; does what only a parent can, and lets the rank go on."""
        state_dir, rank, pair = self.pair.state_dir(self.case.rank), self.case.rank, self.pair
        while (at := strike.when_struck(state_dir, rank)) is None:
            await asyncio.sleep(0.005)
        self.struck_s = at
        name, link = self.case.fault.name, pair.link if isinstance(pair, Nodes) else None
        pauses = {"SIGSTOP, SIGCONT after 1 s": 1.0, "SIGSTOP, SIGCONT after 9 s, on two nodes": 9.0}
        if name in pauses:
            await asyncio.sleep(max(0.0, at + pauses[name] - time.monotonic()))
            pair.signal(rank, signal.SIGCONT)
        elif link is not None and name.startswith("a slow link"):
            link.slow()
        elif link is not None:
            link.cut()
        if self.case.strike.deed == "hold":
            strike.go(state_dir, rank).touch()
        if link is not None and "away for" in name:
            await asyncio.sleep(1.0)
            link.heal()

    def _judge(self) -> None:
        """What became of the pair."""
        if self.struck_s is None:
            self._wrong("the stage was not reached")
            self.out.what = "went on"
            return
        if self.case.expects == "ends" or not self._serves():
            self._gone("the pair")
        else:
            self._went_on()

    def _serves(self) -> bool:
        """For a moment, at least: a rank that has just lost its peer says so."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            if health(self.pair.url)[0] != 200:
                return False
            time.sleep(0.1)
        return True

    def _went_on(self) -> None:
        self.out.what = "went on"
        assert self.struck_s is not None
        times = sorted([self.struck_s, *(at for one in self.heard for at in one.times if at > self.struck_s)])
        self.out.seconds = max((later - at for at, later in pairwise(times)), default=0.0)
        if self.out.seconds > (SILENT_S if self.case.fault.name.startswith("a slow link") else self.limit_s):
            self._wrong(f"nothing was told for {self.out.seconds:.1f} s")

    def _gone(self, who: str) -> None:
        assert self.struck_s is not None
        gone = self.pair.wait_gone()
        self.out.seconds = time.monotonic() - self.struck_s
        self.out.what, self.out.codes = f"{who[4:]} ended", self.pair.codes()
        if not gone:
            self._wrong(f"processes {self.pair.left()} are left after {self.out.seconds:.0f} s")
            self.pair.kill_all()
        elif self.out.seconds > self.limit_s:
            self._wrong(f"{who} ended after {self.out.seconds:.1f} s")
        if self.case.expects == "goes on":
            self._wrong(f"{who} ended, where it should go on")
        right = RIGHT_CODES | ({KILLED} if self.case.fault.name.startswith(("kill", "SIGSTOP")) else set())
        if not right.issuperset(self.out.codes):
            self._wrong(f"a rank ended as if by a mistake of ours: {self.out.codes}")

    def _compare(self, heard: list[Heard]) -> None:
        for one in heard:
            self.out.whole += one.finished
            self.out.broken += not one.finished
            self.out.compared += bool(one.name and (one.answer.text or one.answer.reasoning))
            if wrong := one.fault(self.expected):
                self._wrong(wrong)

    # Afterwards

    def _clear(self) -> None:
        """The cause is gone: the disk is read and has room, the link is whole."""
        self.pair.disarm()
        for rank in (0, 1):
            (self.pair.state_dir(rank) / "ballast").unlink(missing_ok=True)
        if isinstance(self.pair, Nodes):
            self.pair.link.heal()

    def _again(self) -> None:
        """The pair serves, from a new start if need be; right answers, whole caches, votes kept, nothing left over."""
        counted, finished = self.votes, sum(one.finished for one in self.heard)
        if not self.pair.left():
            if files := list(self.pair.tmp.iterdir()):
                self._wrong(f"temporary files {[path.name for path in files]}")
            found = votes(self.pair)
            self.out.lost = max(0, int(counted + finished - found))
            if self.out.lost and not self._may_lose:
                self._wrong(f"{counted:g} votes and {finished} answers before, {found:g} votes after")
            counted, finished = found, 0
        serve(self.pair)
        names = sorted(EXACT)
        again = asked(self.pair.url, [names[(self.case.seed + i) % len(names)] for i in (1, 3)])
        for one in again:
            if not one.finished:
                self._wrong(f"afterwards {one.name}: {one.answer.error or 'not whole'}")
        self._compare(again)
        if restless := watch.come_to_rest(self.pair.url, self.pair.caches(), REST_S):
            self._wrong(restless)
        found = votes(self.pair)
        if found < counted + finished + len(again):
            self._wrong(f"{counted:g} votes and {finished + len(again)} answers, {found:g} votes in the history")
        if files := unfinished(self.pair):
            self._wrong(f"unfinished files: {files}")

    @property
    def _may_lose(self) -> bool:
        """Votes that were given while nothing could be written, by a pair that ended before it could again; and those
        of a history that was damaged before the start, which is set aside."""
        return self.case.fault.name == "full disk" or (
            self.case.fault.name.startswith("damaged") and self.case.stage == "boot"
        )

    def _damage(self) -> None:
        """What lies on the disk between two lives: half of the history is gone, cached prompts are cut or changed."""
        if not self.case.fault.name.startswith("damaged"):
            return
        for cache in self.pair.caches():
            for number, path in enumerate(sorted((cache / "prefix").glob("[!.]*"))):
                data = bytearray(path.read_bytes())
                data[-40] ^= 16
                path.write_bytes(data if number % 2 else data[:-7])
        if self.case.stage == "boot":
            for path in history_files(self.pair):
                data = bytearray(path.read_bytes())
                data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
                path.write_bytes(data)
                path.with_name(path.name + "-wal").unlink(missing_ok=True)
            self.votes = 0.0


def serve(pair: Pair) -> None:
    """Raises AssertionError when it does not start."""
    if pair.left():
        if health(pair.url)[0] == 200:
            return
        pair.wait_gone()
    pair.start()
    assert pair.wait_ready(), f"the next start ended: {pair.codes()}"


def stop(pair: Pair) -> None:
    pair.ask_to_stop()
    assert pair.wait_gone(), "it does not stop"
    assert pair.codes() == [0, 0], f"an orderly stop ended with {pair.codes()}"


def history_files(pair: Pair) -> list[Path]:
    return [path for path in (pair.state_dir(0) / "history").glob("*.sqlite") if HISTORY.fullmatch(path.name)]


def votes(pair: Pair) -> float:
    """Of the history as it lies on the disk, read and checked as a start would. Raises AssertionError for one that is
    not whole."""
    files = history_files(pair)
    if not files:
        return 0.0
    (path,) = files
    found = HISTORY.fullmatch(path.name)
    assert found is not None
    shape = RouterShape(*map(int, found.groups()))
    history = History.open(path.parent, identity(path), shape, record=False)
    assert not history.note, history.note
    return history.demand.requests


def identity(path: Path) -> str:
    """As the file says: whose history it is, is not in question here."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(path.name + suffix), copy.with_name(copy.name + suffix))
        connection = sqlite3.connect(copy)
        try:
            return str(connection.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()[0])
        finally:
            connection.close()


def unfinished(pair: Pair) -> list[str]:
    folders = {pair.state_dir(rank) for rank in (0, 1)}
    return sorted(
        str(path.relative_to(folder))
        for folder in folders
        for path in folder.rglob("*")
        if UNFINISHED.search(path.name) and path.is_file()
    )


__all__ = ["LIMIT_S", "Outcome", "Trial", "serve", "stop"]
