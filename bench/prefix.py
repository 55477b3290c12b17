"""A prompt from the disk against the same prompt computed: seconds of both, on the bundled mini with room for more
positions (its weights, its chunks; what it says there does not matter).

    python bench/prefix.py [--tokens 8000] [--rounds 5] [--threads N] [--dir DIR] [--out FILE]

Both ways end with the whole prompt in the pool and its last logits. `computed` runs the chunks; `restored` looks for
the keys, reads and checks the files, which the page cache was told to forget, and copies them into the pool. `parked`:
the same context copied out of the pool, and what a step waits for that. In turns, after one that does not count.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from tided.control.messages import Recall, Restore
from tided.engine.build import Rank, build_rank, open_model
from tided.engine.offline import first_pairs, settings_of
from tided.engine.types import Request, Sampling
from tided.models.base import LaneState
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Settings

MINI = Path(__file__).parents[1] / "minis" / "deepseek"
WAIT_S = 60.0


def longer(checkpoint: Path, directory: Path, positions: int) -> Path:
    """A copy of the checkpoint whose configuration allows so many positions."""
    for path in checkpoint.iterdir():
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    config["text_config"]["max_position_embeddings"] = positions
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def settings_for(checkpoint: Path, tokens: int, threads: int) -> Settings:
    found = settings_of(checkpoint)
    room = tokens + 512
    return replace(
        found,
        model=replace(found.model, prefill_chunk_tokens=256),
        cache=Cache(context_tokens=room, pool_tokens=room, prefix_disk_bytes=1 << 32),
        engine=Engine(threads=threads),
    )


def computed(rank: Rank, prompt: list[int], chunk: int) -> tuple[LaneState, torch.Tensor, float]:
    lane, began = rank.model.open_lane(0), time.perf_counter()
    for first in range(0, len(prompt), chunk):
        ids = torch.tensor(prompt[first : first + chunk])
        logits = rank.model.prefill(lane, ids, "last" if first + chunk >= len(prompt) else "none")
    assert logits is not None
    return lane, logits, time.perf_counter() - began


def restored(rank: Rank, keys: list[str], tokens: int) -> tuple[LaneState, torch.Tensor, float]:
    caching, began = rank.executor.caching, time.perf_counter()
    caching.recall(Recall(1, keys))
    while not (answers := caching.answers()) and time.perf_counter() - began < WAIT_S:
        time.sleep(0.0005)
    assert answers[0].loaded == 0, "the snapshot is not there"
    lane, logits = caching.restore(0, Restore(1, tokens))
    assert logits is not None
    return lane, logits, time.perf_counter() - began


def forget(folder: Path) -> int:
    """Bytes of the folder's files, which the page cache drops."""
    total = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


@torch.inference_mode()
def measure(directory: Path, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    settings = settings_for(longer(MINI, checkpoint, tokens + 1024), tokens, threads)
    opened, chunk = open_model(settings), settings.model.prefill_chunk_tokens
    torch.set_num_threads(threads)
    prompt = torch.randint(3, opened.shape.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request(request_id="b", prompt_ids=prompt, sampling=Sampling(), max_tokens=1, stop_ids=())
    times: dict[str, list[float]] = {"computed_s": [], "restored_s": [], "parked_s": []}
    with closing(build_rank(opened, Alone(), first_pairs(opened), lambda *_: None, directory / "cache")) as rank:
        caching = rank.executor.caching
        keys = caching.chain(request, 0)
        for _ in range(rounds + 1):
            lane, logits, seconds = computed(rank, prompt, chunk)
            times["computed_s"].append(seconds)
            if not caching.prefixes.holds(keys.whole):
                caching.save(lane, keys, logits)
                assert caching.background.flush(WAIT_S)
            rank.model.close_lane(lane)
            nbytes = forget(directory / "cache" / "prefix")
            lane, again, seconds = restored(rank, [keys.whole], tokens)
            times["restored_s"].append(seconds)
            assert torch.equal(logits, again)
            began = time.perf_counter()
            caching.park(lane)
            times["parked_s"].append(time.perf_counter() - began)
            caching.parked.drop(0)
    kept = {name: values[1:] for name, values in times.items()}
    ratios = [a / b for a, b in zip(kept["computed_s"], kept["restored_s"], strict=True)]
    return {
        "tokens": tokens,
        "threads": threads,
        "disk_bytes": nbytes,
        **{name: spread(values) for name, values in kept.items()},
        "computed_over_restored": spread(ratios),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="tidelm-prefix-") as directory:
        result = json.dumps(measure(Path(directory), asked.tokens, asked.rounds, asked.threads), indent=1)
    print(result)
    if asked.out:
        asked.out.write_text(result + "\n", "utf-8")


if __name__ == "__main__":
    main()
