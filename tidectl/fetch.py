"""`tidectl fetch`: a checkpoint of a hub, or what of it is no routed expert, onto this node and others."""

import fcntl
import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from packers import wanted
from packers.headers import Shard
from packers.hub import SHA256, Repository
from packers.manifest import Entry, Kind, Manifest, is_untouched, read_manifest, write_manifest
from packers.transfer import Stopped, adopted, in_parallel, part_bytes, transfer
from packers.wanted import Target
from tidectl import fetch_room, room
from tidectl.fetch_lender import lending
from tidectl.fetch_nodes import Node, Nodes
from tidectl.fetch_room import There
from tidectl.node_messages import Room
from tidectl.output import emit, say
from tidectl.room import free_bytes, size
from tidectl.waiting import Item, Show, waiting
from tided.errors import DataError, TideError, UnavailableError, UsageError

KEEP_EVERY_S = 1.0  # the manifest, in a repository of many small files
RATE_S = 15.0  # over which a rate is told
PATIENT_TRIES = 40  # a router that starts anew takes minutes, and nobody watches for hours: a quarter of an hour


class Options(NamedTuple):
    """`to` None: a directory of the repository's name, here. `sums`: NAME=SHA256, the user's own word. `from_hub`: the
    other nodes fetch for themselves. `verify`: all that is here is read again. `lent`: another node has all of it, as
    it is to be. `profile`, `sent`: the name of whose directories it goes to, each node's own; what peers get of it."""

    repository: str
    to: Path | None = None
    revision: str = ""
    dense: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    sums: Sequence[str] = ()
    nodes: Sequence[str] = ()
    connections: int = 8
    dry_run: bool = False
    from_hub: bool = False
    verify: bool = False
    lent: bool = False
    profile: str = ""
    sent: str = ""

    @property
    def directory(self) -> Path:
        name = self.repository.rpartition("/")[2] + ("-dense" if self.dense else "")
        return (self.to or Path(name)).absolute()

    @property
    def kind(self) -> Kind:
        return "dense" if self.dense else "whole"

    def command(self, commit: str, *where: str) -> list[str]:
        """That goes on with it, here or on another node. `where`: words that name the directory."""
        told = [
            *(["--dense"] if self.dense else []),
            *(["--verify"] if self.verify else []),
            *(part for pattern in self.include for part in ("--include", pattern)),
            *(part for pattern in self.exclude for part in ("--exclude", pattern)),
            *(part for given in self.sums for part in ("--sha256", given)),
        ]
        return ["tidectl", "fetch", self.repository, "--revision", commit, *where, *told]


@dataclass
class Plan:
    """`here`: files that are whole, by the manifest; `verify`: none is believed to be. `left_bytes`: of the others what
    has not come yet."""

    repository: Repository
    targets: list[Target]
    manifest: Manifest
    directory: Path
    left_out_bytes: int = 0
    verify: bool = False
    here: set[str] = field(default_factory=set)

    @property
    def total_bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    @property
    def missing(self) -> list[Target]:
        return [target for target in self.targets if target.name not in self.here]

    @property
    def changed(self) -> list[str]:
        """Files of ours that have been written to since."""
        if self.verify:
            return []
        names = (target.name for target in self.missing if target.name in self.manifest.files)
        return sorted(name for name in names if _size(self.directory / name) is not None)

    def come_bytes(self, target: Target) -> int:
        """Of a file that is not known to be whole."""
        return target.nbytes if self.may_be(target) else self.part_bytes(target)

    def may_be(self, target: Target) -> bool:
        """A file of its size is there: it is compared before anything comes."""
        known = target.is_published or target.name in self.manifest.files
        return known and _size(self.directory / target.name) == target.nbytes

    def part_bytes(self, target: Target) -> int:
        """That came before the fetch was ended."""
        return 0 if self.may_be(target) else part_bytes(self.directory / target.name, target.nbytes)

    def look(self) -> None:
        """What is here. Raises UsageError for files that are in the way, UnavailableError where another fetch came
        between."""
        found = read_manifest(self.directory) or self.manifest
        if (found.repository, found.commit, found.kind) != (
            self.manifest.repository,
            self.manifest.commit,
            self.manifest.kind,
        ):
            raise UnavailableError("another fetch has begun here", where=str(self.directory), hint="run it again")
        self.manifest = found
        self.here = {target.name for target in self.targets if not self.verify and _is_here(self, target)}
        _refuse_others_files(self)

    @property
    def left_bytes(self) -> int:
        return sum(target.nbytes - self.come_bytes(target) for target in self.missing)


def run(options: Options, as_json: bool) -> None:
    stop = threading.Event()
    with waiting() as show:
        plan = make_plan(options, stop, show)
        there = _there(options, plan, show)
    if options.dry_run:
        _tell_plan(options, plan, there, as_json)
        return
    commit = plan.repository.commit
    nodes = Nodes({name: options.command(commit, "--to", found.directory) for name, found in there})
    with _alone(options.directory):
        plan.look()  # a fetch that ended meanwhile may have brought all of it
        refuse_shortage(plan)
        fetch_room.refuse_shortage(there)
        say(_headline(plan))
        if changed := plan.changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            say(
                f"{changed[0]}{more} changed since they were fetched: compared now, and fetched again where they differ"
            )
        try:
            _bring(options, plan, nodes, stop)
        except KeyboardInterrupt:
            stop.set()
            left = f"{size(plan.left_bytes)} of {size(plan.total_bytes)} are left" if plan.missing else "all is here"
            say(f"stopped: {left}; this goes on:\n  {_again(options, plan)}")
            raise
    _report(plan, nodes.nodes, as_json)


def _there(options: Options, plan: Plan, show: Show) -> list[There]:
    """The directories of the other nodes."""
    if not options.nodes:
        return []
    show([Item("asking", ", ".join(options.nodes))])
    files = {target.name: target.nbytes for target in plan.targets}
    return fetch_room.ask(options.nodes, Room(str(options.directory), options.sent, options.dense, files))


def _bring(options: Options, plan: Plan, nodes: Nodes, stop: threading.Event) -> None:
    """Onto this node, then from it onto the others; or onto all of them at the same time."""
    here = Item("here", "whole", ready=True)
    if options.from_hub:
        with waiting() as show, nodes.running(None):
            fetch(plan, options.connections, stop, lambda items: show([*items, *nodes.items()]))
            nodes.wait(lambda: show([here, *nodes.items()]))
        return
    with waiting() as show:
        fetch(plan, options.connections, stop, show)
    if options.nodes:
        with lending(plan.directory, plan.manifest) as lender, nodes.running(lender), waiting() as show:
            nodes.wait(lambda: show([here, *nodes.items()]))


def make_plan(options: Options, stop: threading.Event, show: Show) -> Plan:
    """Asks the hub what there is; fetches of `--dense` the shards' headers, and nothing else. Raises UsageError for a
    directory that holds something else."""
    if options.dense and (options.include or options.exclude):
        raise UsageError("--dense says itself which files it makes: --include and --exclude are for whole files")
    show([Item("asking", options.repository)])
    begun = read_manifest(options.directory)
    repository = _pinned(options, begun, stop)
    if options.dense and not options.lent:
        targets = wanted.dense(repository, lambda files: _headers(repository, files, options.connections, stop, show))
        left_out = wanted.left_out_bytes(repository, targets)
    else:
        targets, left_out = wanted.whole(repository, options.include, options.exclude), 0
    targets = _with_sums(targets, options.sums, repository)
    manifest = begun or Manifest(repository.name, repository.commit, options.revision, options.kind)
    repository.tries = PATIENT_TRIES
    plan = Plan(repository, targets, manifest, options.directory, left_out, options.verify)
    plan.look()
    return plan


def fetch(plan: Plan, connections: int, stop: threading.Event, show: Show) -> None:
    """Brings what is missing. Raises DataError, UnavailableError; what came by then stays."""
    plan.manifest.complete = False
    write_manifest(plan.directory, plan.manifest)
    progress, lock, written_s = Progress(plan), threading.Lock(), time.monotonic()

    def bring(target: Target) -> None:
        path = plan.directory / target.name

        def keep(entry: Entry) -> None:
            nonlocal written_s
            with lock:
                plan.manifest.files[target.name] = entry
                # Of a file that is published another call finds out by itself whether it is here.
                if not target.is_published or time.monotonic() - written_s >= KEEP_EVERY_S:
                    write_manifest(plan.directory, plan.manifest)
                    written_s = time.monotonic()

        found = _as_it_was(plan, target, stop, progress) if path.is_file() else None
        if found:
            keep(found)
        else:
            transfer(plan.repository, target, path, stop, progress.came, keep)
        plan.here.add(target.name)

    jobs = [lambda target=target: bring(target) for target in plan.missing]
    try:
        for _ in in_parallel(jobs, connections, stop, lambda: show(progress.items())):
            pass
        plan.manifest.complete = True
    except Stopped as error:  # only after somebody else's failure, which is raised before it
        raise UnavailableError("the fetch was stopped", where=str(plan.directory)) from error
    finally:
        with lock:
            write_manifest(plan.directory, plan.manifest)


def _as_it_was(plan: Plan, target: Target, stop: threading.Event, progress: "Progress") -> Entry | None:
    """The entry of a file that has all the bytes that it should: by the hub's word, or by its own sum of when it was
    made here."""
    before, path = plan.manifest.files.get(target.name), plan.directory / target.name
    if target.is_published or before is None:
        return adopted(path, target.published, stop, progress.came)
    found = adopted(path, target.published._replace(sha256=before.sha256), stop, progress.came)
    return found and msgspec.structs.replace(found, by="")


class Progress:
    """Bytes that are here, and how fast they come."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lock = plan, threading.Lock()
        whole = sum(target.nbytes for target in plan.targets if target.name in plan.here)
        self._done = whole + sum(plan.part_bytes(target) for target in plan.missing)
        self._seen: deque[tuple[float, int, int]] = deque()

    def came(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    @property
    def _fetched(self) -> int:
        return self._plan.repository.fetched_bytes

    def items(self) -> list[Item]:
        """For the screen. The rate is of what comes over the network: files that are read again here are none of it."""
        now_s, fetched, done, total = time.monotonic(), self._fetched, self._done, self._plan.total_bytes
        self._seen.append((now_s, fetched, done))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        since_s, before, done_before = self._seen[0]
        rate = (fetched - before) / (now_s - since_s) if now_s > since_s else 0.0
        how = "comparing what is here" if fetched == before and done > done_before else speed(rate, total - done)
        detail = f"{len(self._plan.here)} of {len(self._plan.targets)} files, {how}"
        state = f"{size(done)} of {size(total)}"
        return [Item("fetching", state, detail=detail, done=done >> 20, total=max(2, total >> 20))]


def speed(rate: float, left_bytes: int) -> str:
    """No time is told where nothing comes: it would be a lie."""
    if rate < 1:
        return "nothing comes at the moment"
    left_s = left_bytes / rate
    left = (
        f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min" if left_s < 7200 else f"{left_s / 3600:.1f} h"
    )
    return f"{rate / 1e6:.1f} MB/s, {left} left"


def refuse_shortage(plan: Plan) -> None:
    """Raises UnavailableError where the file system cannot hold what is left."""
    room.refuse_shortage(str(plan.directory), plan.left_bytes, free_bytes(plan.directory))


def _pinned(options: Options, begun: Manifest | None, stop: threading.Event) -> Repository:
    """A directory stays with the commit that it began with: files of two are no checkpoint."""
    if begun and (begun.repository, begun.kind) != (options.repository, options.kind):
        what = f"holds {begun.repository} ({begun.kind}), begun at commit {begun.commit[:12]}"
        raise UsageError(f"{options.directory} {what}", hint="name another directory with --to")
    name, revision = options.repository, options.revision or (begun.revision if begun else "")
    newest = f"{name}@{revision}" if revision else name
    if begun is None:
        return Repository.listed(newest, stop.wait)
    if not options.revision:
        with suppress(TideError):  # what the newest is does not matter, nor whether that branch is still there
            if (now := Repository.listed(newest, stop.wait).commit) != begun.commit:
                say(f"{name} is at {now[:12]} by now; this directory stays with {begun.commit[:12]}")
        return Repository.listed(f"{name}@{begun.commit}", stop.wait)
    found = Repository.listed(newest, stop.wait)
    if found.commit != begun.commit:
        raise UsageError(
            f"{options.directory} holds commit {begun.commit[:12]}, and {revision} is {found.commit[:12]}",
            hint="name another directory with --to, or leave --revision out to go on with the first",
        )
    return found


def _headers(
    repository: Repository, files: Sequence[str], connections: int, stop: threading.Event, show: Show
) -> Iterator[Shard]:
    found, jobs = 0, [lambda file=file: repository.shard(file) for file in files]

    def tell() -> None:
        show([Item("reading headers", f"{found} of {len(files)} files", done=found, total=len(files))])

    for shard in in_parallel(jobs, connections, stop, tell):
        found += 1
        yield shard


def _with_sums(targets: list[Target], sums: Sequence[str], repository: Repository) -> list[Target]:
    """The user's own sums stand beside the hub's. Raises UsageError, and DataError where the two differ."""
    given = dict(_sum(text) for text in sums)
    if unknown := given.keys() - {target.name for target in targets}:
        raise UsageError(f"--sha256: {min(unknown)} is not among the files to fetch")
    found = []
    for target in targets:
        sum_, said = given.get(target.name, ""), target.published
        if sum_ and said.sha256 and sum_ != said.sha256:
            raise DataError(f"its sha256 is {said.sha256}, not {sum_}", where=f"{repository.name}/{target.name}")
        found.append(replace(target, published=said._replace(sha256=sum_)) if sum_ else target)
    return found


def _sum(text: str) -> tuple[str, str]:
    name, _, digest = text.rpartition("=")
    if not name or not SHA256.fullmatch(digest):
        raise UsageError(f"--sha256 {text}: not NAME=SHA256, 64 hexadecimal digits")
    return name, digest


def _is_here(plan: Plan, target: Target) -> bool:
    entry = plan.manifest.files.get(target.name)
    path = plan.directory / target.name
    if entry is None or entry.bytes != target.nbytes or path.is_symlink() or not is_untouched(path, entry):
        return False
    return not target.published.sha256 or target.published.sha256 == entry.sha256


def _refuse_others_files(plan: Plan) -> None:
    """A file that no fetch of ours brought is replaced where it may be a damaged copy, by its size; else it is
    somebody's. So is a link, whose file may lie where no loader goes."""
    strange = [
        target.name
        for target in plan.missing
        if (plan.directory / target.name).is_symlink()
        or (
            target.name not in plan.manifest.files
            and _size(plan.directory / target.name) is not None
            and not plan.may_be(target)
        )
    ]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise UsageError(
            f"{plan.directory} holds {strange[0]}{more}, which is not the repository's",
            hint="name another directory with --to, or move it away: it would be overwritten",
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One fetch at a time into a directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UnavailableError(f"cannot be made or used ({error.strerror})", where=str(directory)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UnavailableError("another fetch writes here", where=str(directory), hint="wait for it") from error
    finally:
        os.close(lock)


def _again(options: Options, plan: Plan) -> str:
    nodes = [part for node in options.nodes for part in ("--to-node", node)] + ["--from-hub"] * options.from_hub
    where = ("--profile", options.profile) if options.profile else ("--to", str(options.directory))
    return shlex.join([*options.command(plan.repository.commit, *where), *nodes])


def _headline(plan: Plan) -> str:
    what = f"{plan.repository.name} at {plan.repository.commit[:12]}"
    come = plan.total_bytes - plan.left_bytes
    here = f", {size(come)} of them here" if come else ""
    return f"{what}: {len(plan.targets)} files, {size(plan.total_bytes)}{here}, to {plan.directory}"


def _tell_plan(options: Options, plan: Plan, there: Sequence[There], as_json: bool) -> None:
    files = [
        {
            "name": target.name,
            "bytes": target.nbytes,
            "here_bytes": target.nbytes if target.name in plan.here else plan.come_bytes(target),
            "sha256": target.published.sha256 or None,
        }
        for target in plan.targets
    ]
    free = free_bytes(plan.directory)
    if as_json:
        more: dict[str, Any] = {"total_bytes": plan.total_bytes, "left_bytes": plan.left_bytes, "free_bytes": free}
        others = [
            {"node": name, "path": found.directory, "left_bytes": found.left_bytes, "free_bytes": found.free_bytes}
            for name, found in there
        ]
        more |= {"left_out_bytes": plan.left_out_bytes, "files": files, "nodes": others}
        emit("fetch-plan/1", {**_about(plan), **more})
        return
    for one in files:
        here = "here" if one["here_bytes"] == one["bytes"] else f"{one['here_bytes']} here" if one["here_bytes"] else ""
        print(f"{one['bytes']:>15,}  {one['name']}  {here}".rstrip())
    sys.stdout.flush()
    say(_headline(plan))
    if options.dense:
        say(f"left out: {size(plan.left_out_bytes)} of routed experts")
    say(f"to come: {size(plan.left_bytes)}; free there: {size(free)}")
    how = "from the hub by itself" if options.from_hub else "from here through ssh"
    for name, found in there:
        say(f"then on {name}, {how}, to {found.directory}: {size(found.left_bytes)}; free: {size(found.free_bytes)}")


def _about(plan: Plan) -> dict[str, Any]:
    return {
        "repository": plan.repository.name,
        "commit": plan.repository.commit,
        "kind": plan.manifest.kind,
        "path": str(plan.directory),
    }


def _report(plan: Plan, nodes: Sequence[Node], as_json: bool) -> None:
    fetched = plan.repository.fetched_bytes
    if as_json:
        others = [{"node": node.name, "commit": plan.repository.commit} for node in nodes]
        more = {"files": len(plan.targets), "bytes": plan.total_bytes, "fetched_bytes": fetched, "nodes": others}
        emit("fetch/1", {**_about(plan), **more})
        return
    own = sum(not plan.manifest.files[target.name].by for target in plan.targets)
    checked = f"{len(plan.targets) - own} as the hub published them" + (f", {own} put together here" if own else "")
    say(f"{plan.directory}: {len(plan.targets)} files, {size(plan.total_bytes)}, whole ({checked})")
    for node in nodes:
        say(f"{node.name}: the same")
