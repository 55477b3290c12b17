"""What prefill chunks of a mini take in passing, in a process of its own: bytes that were taken, bytes foreseen.

python -m tests.engine.passing_case mini-deepseek
"""

import ctypes
import gc
import sys
from pathlib import Path

import torch
from msgspec.structs import replace

from tided.engine.build import build_rank, open_model
from tided.engine.memory import passing_bytes
from tided.engine.offline import first_pairs
from tided.models.parallel import Alone
from tided.profile import load

PROFILES = Path(__file__).parents[2] / "profiles"
CLEAR = Path("/proc/self/clear_refs")


def of_process(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def main(name: str) -> None:
    settings = load(PROFILES / f"{name}.toml")
    settings = replace(
        settings,
        parallel=replace(settings.parallel, ranks=1),
        vision=replace(settings.vision, rank=-1),
        engine=replace(settings.engine, draft="off"),
    )
    model = open_model(settings)
    rank, chunk = build_rank(model, Alone(), first_pairs(model), lambda *_: None), settings.model.prefill_chunk_tokens
    ids = (torch.arange(3 * chunk) * 37) % 400
    with torch.inference_mode():
        lane = rank.model.open_lane(0)
        rank.model.prefill(lane, ids[:chunk], "last")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")  # the most that was held counts anew
        before = of_process("VmRSS")
        for part in torch.split(ids[chunk:], chunk):
            rank.model.prefill(lane, part, "last")
        print(of_process("VmHWM") - before, passing_bytes(model))
    rank.close()


if __name__ == "__main__":
    main(sys.argv[1])
