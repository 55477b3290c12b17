"""Brings what a plan lacks, file by file, and keeps in the manifest what is whole."""

import threading
import time

import msgspec

from packers.manifest import Entry, write_manifest
from packers.transfer import Stopped, adopted, in_parallel, transfer
from packers.wanted import Target
from tidectl.fetch.plan import Plan
from tidectl.fetch.progress import Progress
from tidectl.waiting import Show
from tided.errors import UnavailableError

KEEP_EVERY_S = 1.0  # the manifest, in a repository of many small files


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


def _as_it_was(plan: Plan, target: Target, stop: threading.Event, progress: Progress) -> Entry | None:
    """The entry of a file that has all the bytes that it should: by the hub's word, or by its own sum of when it was
    made here."""
    before, path = plan.manifest.files.get(target.name), plan.directory / target.name
    if target.is_published or before is None:
        return adopted(path, target.published, stop, progress.came)
    found = adopted(path, target.published._replace(sha256=before.sha256), stop, progress.came)
    return found and msgspec.structs.replace(found, by="")
