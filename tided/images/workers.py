"""The server's side of the processes that decode images: few of them, each job with a time limit.

A process begins with its first job and serves many. One that is late, dies or answers nonsense is ended, and the next
job begins another: nothing of a job outlives it but a process that has answered it in order.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from tided.images.geometry import Geometry
from tided.images.types import Decoded, Limits, RefusedImageError
from tided.images.worker import Job, decoded, read_part, write_parts

log = logging.getLogger("tided.images")

WORKERS = 2
# What an interpreter and its libraries are found by; nothing else of the server's environment is the workers' business.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")


class Workers:
    """`limit_s`: of one image. Each thread has a process of its own."""

    def __init__(self, geometry: Geometry, limits: Limits, limit_s: float, workers: int = WORKERS) -> None:
        self._job = msgspec.msgpack.encode(Job(geometry, limits))
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="images")
        self._own = threading.local()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def decode(self, source: Callable[[], bytes]) -> "Future[Decoded]":
        """The file that `source` gives, on a thread. Its result, or RefusedImageError."""
        return self._threads.submit(lambda: self._decode(source()))

    def close(self) -> None:
        """Ends the processes; what they were at is refused."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()

    def _decode(self, data: bytes) -> Decoded:
        process = self._process()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.start()
        try:
            return self._ask(process, data)
        except RefusedImageError:
            raise
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            self._end(process)
            if late.is_set():
                raise RefusedImageError(f"decoding it takes longer than {self._limit_s:g} s") from None
            if not self._closed:
                log.warning("a process that decodes images has ended with code %s", process.returncode)
            raise RefusedImageError("it cannot be decoded") from None
        finally:
            timer.cancel()

    def _ask(self, process: "subprocess.Popen[bytes]", data: bytes) -> Decoded:
        assert process.stdin is not None
        assert process.stdout is not None
        write_parts(process.stdin, self._job, data)
        head, pixels = read_part(process.stdout), read_part(process.stdout)
        if head is None or pixels is None:
            raise EOFError
        return decoded(head, pixels)

    def _process(self) -> "subprocess.Popen[bytes]":
        known: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if known is not None and known.poll() is None:
            return known
        started = subprocess.Popen(
            [sys.executable, "-m", "tided.images.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library's words on what it was given
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        self._own.process = started
        self._running = {*(one for one in self._running if one.poll() is None), started}
        return started

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
