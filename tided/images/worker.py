"""A process that decodes images, one after another: `python -m tided.images.worker` reads jobs and writes answers.

    job      4 bytes length, msgpack Job;  4 bytes length, the file
    answer   4 bytes length, msgpack Answer;  4 bytes length, the pixels

It holds no key, opens no file, and may take so much memory and no more. It ends with its standard input.
"""

import sys

import msgspec

from tided.images.geometry import Geometry, Size
from tided.images.types import Decoded, Limits, RefusedImageError
from tided.processes import confine, read_part, write_parts

MEMORY_BYTES = 3 << 30  # three copies of the largest image that a profile allows by default, and its file


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

    confine(MEMORY_BYTES)
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


def decoded(head: bytes, pixels: bytes) -> Decoded:
    """An answer as its sender had it. Raises RefusedImageError; msgspec's errors for what is no answer."""
    answer = msgspec.msgpack.decode(head, type=Answer)
    if answer.refused:
        raise RefusedImageError(answer.refused)
    return Decoded(Size(answer.height, answer.width), pixels, answer.digest)


if __name__ == "__main__":
    main()
