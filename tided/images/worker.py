"""A process that decodes images, one after another: `python -m tided.images.worker` reads jobs and writes answers.

    job      4 bytes length, msgpack Job;  4 bytes length, the file
    answer   4 bytes length, msgpack Answer;  4 bytes length, the pixels

It holds no key, opens no file, and may take so much memory and no more. It ends with its standard input.
"""

import resource
import signal
import sys
from typing import IO

import msgspec

from tided.images.geometry import Geometry, Size
from tided.images.types import Decoded, Limits, RefusedImageError

MEMORY_BYTES = 3 << 30  # three copies of the largest image that a profile allows by default, and its file
MOST_BYTES = 1 << 30


class Job(msgspec.Struct, frozen=True):
    geometry: Geometry
    limits: Limits


class Answer(msgspec.Struct, frozen=True):
    """`refused`: why there are no pixels; empty where there are."""

    refused: str = ""
    height: int = 0
    width: int = 0
    digest: bytes = b""


def main() -> None:
    from tided.images.decode import decode  # here alone: the server reads this file too, and decodes nothing

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's business
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while (head := read_part(jobs)) is not None:
        data = read_part(jobs)
        if data is None:
            return
        job = msgspec.msgpack.decode(head, type=Job)
        try:
            found = decode(data, job.geometry, job.limits)
        except RefusedImageError as error:
            write_parts(answers, msgspec.msgpack.encode(Answer(str(error))), b"")
        else:
            answer = Answer("", found.size.height, found.size.width, found.digest)
            write_parts(answers, msgspec.msgpack.encode(answer), found.pixels)


def read_part(file: IO[bytes]) -> bytes | None:
    """None at the end. Raises EOFError inside a part, or for one that is too long to be one."""
    head = file.read(4)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if len(head) < 4 or length > MOST_BYTES:
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


def decoded(head: bytes, pixels: bytes) -> Decoded:
    """An answer as its sender had it. Raises RefusedImageError; msgspec's errors for what is no answer."""
    answer = msgspec.msgpack.decode(head, type=Answer)
    if answer.refused:
        raise RefusedImageError(answer.refused)
    return Decoded(Size(answer.height, answer.width), pixels, answer.digest)


if __name__ == "__main__":
    main()
