"""Writing packs: resumable after a kill at any point, whole or not there under their names.

A pack grows under a temporary name: header page (marked as partial), then records, each batch of them flushed to the
device before its checksums are entered into the index. A later run keeps the longest run of records that agree with
their checksums, whatever order the device wrote them in, and goes on behind it. When all are there, index and final
header are flushed and the file gets its name.

A few experts are under way at once: threads read and cut them, and each pack has a thread of its own that writes its
records one after the other, so that the disk has something to do while anything is cut or checked.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from packers.pack_header import PackHeader
from packers.pack_writer import END_TIMEOUT_S, PackWriter
from packers.packs import Pack, Progress
from packers.pool import Pool
from tided.errors import DataError, PermissionError_, UnavailableError

STEP_TIMEOUT_S = 120.0  # for reading one expert, or writing it: a disk is gone
READERS = 4
WRITES = 2  # of each pack: one that is written, one behind it
AT_ONCE = READERS + WRITES  # at most so many experts in a row are being read or written

# (layer, expert) -> the record of each pack, in the order of the packs. READERS threads call it; what it gave is needed
# until it is asked for the expert AT_ONCE behind.
ReadRecords = Callable[[int, int], Sequence[memoryview]]


def pack(directory: Path, headers: Sequence[PackHeader], read: ReadRecords, progress: Progress) -> list[Path]:
    """Writes the packs in one pass over the source; those that exist are left as they are. `progress` counts experts.

    Raises DataError for a file in the way that is not this pack, UnavailableError when there is no room."""
    paths = [directory / header.file_name for header in headers]
    with _failures(directory), ExitStack() as stack:
        directory.mkdir(parents=True, exist_ok=True)
        missing = [not _is_there(path, header) for path, header in zip(paths, headers, strict=True)]
        pairs = zip(paths, headers, missing, strict=True)
        writers = [stack.enter_context(PackWriter(path, header)) if absent else None for path, header, absent in pairs]
        active = [writer for writer in writers if writer is not None]
        check_room(directory, active)
        _copy(writers, headers[0], read, progress)
        for writer in active:
            writer.finish()
    return paths


def check_room(directory: Path, writers: Sequence[PackWriter]) -> None:
    """Raises UnavailableError unless the rest of the packs fits."""
    found = os.statvfs(directory)
    room, needed = found.f_bavail * found.f_frsize, sum(writer.missing_bytes for writer in writers)
    if needed > room:
        raise UnavailableError(
            f"the packs need {needed / 1e9:.2f} GB more, there are {room / 1e9:.2f}",
            where=str(directory),
            hint="make room, or choose another directory with --out",
        )


def _is_there(path: Path, header: PackHeader) -> bool:
    """Raises DataError for a file that is another pack, a damaged one, or none."""
    if not path.exists() and not path.is_symlink():
        return False
    if replace(Pack.open(path).header, index="") != header:
        raise DataError(
            "is a pack of another checkpoint or layout, and stays as it is",
            where=str(path),
            hint="delete it, or choose another directory with --out",
        )
    return True


def _copy(writers: Sequence[PackWriter | None], header: PackHeader, read: ReadRecords, progress: Progress) -> None:
    active = [(place, writer, writer.done) for place, writer in enumerate(writers) if writer is not None]
    done = min((begin for _, _, begin in active), default=header.records)
    coming, writing = iter(range(done, header.records)), deque[list[Future[None]]]()
    progress(done, header.records)
    with _reading() as (pool, reading):
        while done < header.records:
            numbers = islice(coming, AT_ONCE - len(reading) - len(writing))
            reading.extend(pool.submit(read, *divmod(number, header.experts)) for number in numbers)
            if reading:
                records, number = reading.popleft().result(STEP_TIMEOUT_S), done + len(writing)
                # A pack may be ahead of another, by an earlier run.
                writing.append([w.send(number, records[place]) for place, w, begin in active if begin <= number])
            if len(writing) == WRITES or not reading:
                for written in writing.popleft():
                    written.result(STEP_TIMEOUT_S)
                done += 1
                progress(done, header.records)


@contextmanager
def _reading() -> Iterator[tuple[Pool, deque[Future[Sequence[memoryview]]]]]:
    """Threads, and what they are asked for. In the end they are let go, with a little patience: their source is closed
    behind them."""
    pool, asked = Pool(READERS, "pack-reader"), deque[Future[Sequence[memoryview]]]()
    try:
        yield pool, asked
    finally:
        pool.end(END_TIMEOUT_S)


@contextmanager
def _failures(directory: Path) -> Iterator[None]:
    """What the system says of the target, as errors of ours."""
    try:
        yield
    except PermissionError as e:
        raise PermissionError_("this user may not write there", where=e.filename or str(directory)) from e
    except TimeoutError as e:
        what = f"no expert could be read or written for {STEP_TIMEOUT_S:.0f} s"
        raise UnavailableError(what, where=str(directory), hint="check the disks") from e
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UnavailableError(
            "the file system is full" if full else f"the pack cannot be written ({e.strerror})",
            where=str(directory),
            hint="make room and run the command again: it goes on where it stopped" if full else "",
        ) from e
