"""Asks a hub which files there are, at which commit: a plan."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from packers import wanted
from packers.headers import Shard
from packers.hub import SHA256, Repository
from packers.manifest import Manifest, read_manifest
from packers.transfer import in_parallel
from packers.wanted import Target
from tidectl.fetch.options import Options
from tidectl.fetch.plan import Plan
from tidectl.output import say
from tidectl.waiting import Item, Show
from tided.errors import DataError, TideError, UsageError

MODEL = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
PATIENT_TRIES = 40  # a router that starts anew takes minutes, and nobody watches for hours: a quarter of an hour


def make_plan(options: Options, stop: threading.Event, show: Show) -> Plan:
    """Asks the hub what there is; fetches of `--dense` the shards' headers, and nothing else. Raises UsageError for a
    directory that holds something else."""
    if options.dense and (options.include or options.exclude):
        raise UsageError("--dense says itself which files it makes: --include and --exclude are for whole files")
    if not MODEL.fullmatch(options.repository):
        where = f"{options.repository}: " if options.repository.isprintable() else ""
        raise UsageError(f"{where}is no repository", hint="owner/model of a hub; a commit or branch with --revision")
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
