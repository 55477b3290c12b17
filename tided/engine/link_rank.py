"""One rank that meets the others on the data plane, measures how fast they add, and ends: `python -m
tided.engine.link_rank RANK`, with the settings as JSON on stdin. For `tidectl doctor`, which starts one a rank."""

import sys

import msgspec
import torch

from tided.engine.dataplane import TorchGroup
from tided.engine.devices import use_device
from tided.engine.link_probe import measure
from tided.errors import TideError
from tided.settings import Settings

MAX_BYTES = 1 << 20


def main() -> int:
    """The figures as one JSON line on stdout; an error of ours in one line on stderr, with its exit code."""
    torch.set_num_threads(1)
    try:
        rank = int(sys.argv[1])
        settings = msgspec.json.decode(sys.stdin.buffer.read(MAX_BYTES), type=Settings)
        use_device(settings, rank)
        group = TorchGroup(settings, rank)
        try:
            speed = measure(group, torch.device(settings.engine.device))
        finally:
            group.close()
    except TideError as error:
        sys.stderr.write(f"{str(error).replace(chr(10), ' ')}\n")
        return error.exit_code
    about = {**speed.about(), "backend": "nccl" if settings.engine.device == "cuda" else "gloo"}
    sys.stdout.write(msgspec.json.encode(about).decode() + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
