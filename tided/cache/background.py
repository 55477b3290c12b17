"""Two threads beside the steps: one writes, one reads what a lane waits for; what they do on the disk has its turn.

What waits to be written lies in memory: it is bounded in bytes, and whoever is refused does without."""

import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("cache")

Job = Callable[[], None]
MOST_PENDING_BYTES = 512 << 20
MOST_READS = 256
LEFT_FREE_BYTES = 1 << 30  # of a disk: never filled to its end
CLOSE_S = 10.0


Run = Callable[[Job, float], None]  # does a piece of work on the disk in its turn, at the latest after so many seconds
READ_PATIENCE_S = 0.1  # for each piece of a file: a lane waits for it
WRITE_PATIENCE_S = 1.0  # what waits to be written holds memory


def at_once(work: Job, patience_s: float) -> None:
    work()


class Background:
    """Used by the engine's thread alone; jobs run on the threads, what they do on the disk by `run`, piece by piece.
    The threads begin at once: where memory has run out a thread may fail to begin, and whoever starts it waits for it
    without end."""

    def __init__(self, run: Run = at_once) -> None:
        self._run_piece = run
        self._writes: queue.Queue[tuple[int, Job] | None] = queue.Queue()  # bounded in bytes
        self._reads: queue.Queue[Job | None] = queue.Queue(MOST_READS)
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True)
            for name, loop in (("cache-writes", self._write_loop), ("cache-reads", self._read_loop))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, nbytes: int, job: Job, *, must: bool = False) -> bool:
        """Whether the job will run; not when too much waits already, unless it `must`."""
        with self._lock:
            if self._closed.is_set() or (not must and self._pending_bytes + nbytes > MOST_PENDING_BYTES):
                return False
            self._pending_bytes += nbytes
        self._writes.put((nbytes, job))
        return True

    def read(self, job: Job) -> None:
        self._reads.put(job, timeout=CLOSE_S)

    def turn_to_read(self, work: Job) -> None:
        self._run_piece(work, READ_PATIENCE_S)

    def turn_to_write(self, work: Job) -> None:
        self._run_piece(work, WRITE_PATIENCE_S)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything handed in is written, and read, whoever asked for it; for tests and benches."""
        written, read = threading.Event(), threading.Event()
        self.write(0, written.set, must=True)
        self.read(read.set)
        return written.wait(timeout_s) and read.wait(timeout_s)

    def close(self) -> None:
        """The job in hand ends, the others do not begin."""
        self._closed.set()
        self._writes.put(None)
        with suppress(queue.Full):
            self._reads.put(None, timeout=CLOSE_S)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _write_loop(self) -> None:
        while (item := self._writes.get()) is not None and not self._closed.is_set():
            nbytes, job = item
            _run(job)
            with self._lock:
                self._pending_bytes -= nbytes

    def _read_loop(self) -> None:
        while (job := self._reads.get()) is not None and not self._closed.is_set():
            _run(job)


def _run(job: Job) -> None:
    try:
        job()
    except Exception:  # a cache that fails costs time, never the rank
        log.exception("a job of the caches failed")


def private_folder(path: Path) -> Path:
    """Made if it is not there, 0700. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def free_bytes(folder: Path) -> int:
    """What may still be written there; 0 where the system does not tell."""
    with suppress(OSError):
        return max(0, shutil.disk_usage(folder).free - LEFT_FREE_BYTES)
    return 0


def remove_files(folder: Path) -> None:
    """Everything in a folder of ours; it holds files alone."""
    for entry in os.scandir(folder):
        with suppress(OSError):
            Path(entry.path).unlink()
