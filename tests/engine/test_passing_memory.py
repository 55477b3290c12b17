"""What a prefill chunk takes in passing is foreseen: not less than it takes, and not many times as much."""

import ctypes
import gc
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("name", ["mini-deepseek", "mini-glm"])
def test_a_chunk_takes_what_was_foreseen(name):
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
    try:
        with torch.inference_mode():
            lane = rank.model.open_lane(0)
            rank.model.prefill(lane, ids[:chunk], "last")
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            try:
                CLEAR.write_text("5")  # the most that was held counts anew
            except OSError as error:
                pytest.skip(f"the kernel does not tell the most that was held: {error}")
            before = of_process("VmRSS")
            for part in torch.split(ids[chunk:], chunk):
                rank.model.prefill(lane, part, "last")
            taken = of_process("VmHWM") - before
    finally:
        rank.close()
    assert 0.25 * passing_bytes(model) < taken < passing_bytes(model)
