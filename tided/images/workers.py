"""The server's side of the processes that decode images: few of them, each file with a time limit."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

import msgspec

from tided.images.geometry import Geometry
from tided.images.types import Decoded, Limits, RefusedImageError
from tided.images.worker import Job, decoded
from tided.processes import FailedJobError, Processes, read_part

log = logging.getLogger("tided.images")

WORKERS = 2


class Workers:
    """`limit_s`: of one image. A thread for each process."""

    def __init__(self, geometry: Geometry, limits: Limits, limit_s: float, workers: int = WORKERS) -> None:
        self._job = msgspec.msgpack.encode(Job(geometry, limits))
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="images")
        self._processes = Processes("tided.images.worker", workers)

    def decode(self, source: Callable[[], bytes]) -> "Future[Decoded]":
        """The file that `source` gives, on a thread. Its result, or RefusedImageError."""
        return self._threads.submit(lambda: self._decode(source()))

    def close(self) -> None:
        """Ends the processes; what they were at is refused."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _decode(self, data: bytes) -> Decoded:
        try:
            found = self._processes.ask((self._job, data), _read, self._limit_s)
        except FailedJobError as failed:
            if failed.late:
                raise RefusedImageError(f"decoding it takes longer than {self._limit_s:g} s") from None
            if not self._processes.closed:
                log.warning("a process that decodes images has ended with code %s", failed.code)
            raise RefusedImageError("it cannot be decoded") from None
        if isinstance(found, RefusedImageError):
            raise found
        return found


def _read(file: IO[bytes]) -> Decoded | RefusedImageError:
    head, pixels = read_part(file), read_part(file)
    if head is None or pixels is None:
        raise EOFError
    try:
        return decoded(head, pixels)
    except RefusedImageError as refused:
        return refused
