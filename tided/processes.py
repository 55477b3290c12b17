"""Processes for work on foreign input that cannot be ended in the server's own: a time limit for each job, limits of
memory for each process.

A process begins with its first job and serves many. One that is late, dies or answers nonsense is ended, and the next
job begins another: nothing of a job outlives it but a process that has answered it in order.

    job, answer   parts of 4 bytes length and their bytes, on standard input and output
"""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")

MOST_PART_BYTES = 1 << 30
# What an interpreter and its libraries are found by; nothing else of the server's environment is the workers' business.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
_START_S = 30.0  # of a process's first job, where that is not the caller's
_WAIT_S = 0.1  # between looks at whether anyone still waits for a process


class FailedJobError(Exception):
    """No answer. `late`: not within its time; else the process ended (`code`), or what it said is no answer."""

    def __init__(self, late: bool, code: int | None) -> None:
        super().__init__("late" if late else f"ended with code {code}")
        self.late, self.code = late, code


class Processes:
    """At most `most` processes of `module`, for any number of threads. `first`: the parts of a job that each new
    process does before any other, with time of its own: what starting takes is then not the caller's."""

    def __init__(self, module: str, most: int, first: tuple[bytes, ...] = ()) -> None:
        self._module, self._first = module, first
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self.closed = False

    def ask(
        self,
        parts: tuple[bytes, ...],
        read: Callable[[IO[bytes]], T],
        limit_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> T:
        """What `read` makes of the answer; for what is none it raises OSError, EOFError, ValueError or msgspec's
        errors. `alive` ends the wait for a process by raising. Raises FailedJobError."""
        with self._place(alive):
            process = self._taken(read)
            answer = _answer(process, parts, read, limit_s)
            with self._lock:
                self._idle.append(process)
            return answer

    def close(self) -> None:
        """Ends the processes; what they were at fails."""
        with self._lock:
            self.closed = True
            for process in self._running:
                process.kill()

    @contextmanager
    def _place(self, alive: Callable[[], None]) -> Iterator[None]:
        while not self._places.acquire(timeout=_WAIT_S):
            alive()
        try:
            yield
        finally:
            self._places.release()

    def _taken(self, read: Callable[[IO[bytes]], T]) -> "subprocess.Popen[bytes]":
        with self._lock:
            while self._idle:
                if (known := self._idle.pop()).poll() is None:
                    return known
                _end(known)
            if self.closed:
                raise FailedJobError(late=False, code=None)
            started = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a library's words on what it was given
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
            self._running = {*(one for one in self._running if one.poll() is None), started}
        if self._first:
            _answer(started, self._first, read, _START_S)
        return started


def _answer(
    process: "subprocess.Popen[bytes]", parts: tuple[bytes, ...], read: Callable[[IO[bytes]], T], limit_s: float
) -> T:
    """Ends the process where it raises FailedJobError."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        write_parts(process.stdin, *parts)
        return read(process.stdout)
    except (OSError, EOFError, ValueError, msgspec.MsgspecError):
        _end(process)
        raise FailedJobError(late.is_set(), process.returncode) from None
    finally:
        timer.cancel()
        if late.is_set():  # perhaps just behind its answer: nobody shall be given it
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def confine(memory_bytes: int) -> None:
    """For the process itself: so much memory, no file of any size, no core; an interrupt is the server's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def read_part(file: IO[bytes]) -> bytes | None:
    """None at the end. Raises EOFError inside a part, or for one that is too long to be one."""
    head = file.read(4)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if len(head) < 4 or length > MOST_PART_BYTES:
        raise EOFError
    part = file.read(length)
    if len(part) < length:
        raise EOFError
    return part


def write_parts(file: IO[bytes], *parts: bytes) -> None:
    for part in parts:
        file.write(len(part).to_bytes(4, "little"))
        file.write(part)
    file.flush()
