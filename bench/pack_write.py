"""Packs EXL3 experts of GLM-5.3's shapes, or MXFP4 ones of DeepSeek-V4.1-Flash's, next to `cp` of as many bytes as the
packs have: from and to the same disk, in turns, the page cache emptied of both before each.

    python bench/pack_write.py [--experts exl3|mxfp4] [--gb 2] [--rounds 3] [--dir DIR]

`all`: the packs of two ranks in one pass; `one`: that of rank 0 alone, for which most of the checkpoint is read too.
`share` is our rate over cp's, the median of the rounds. Rates are of bytes written, flushed to the device. cp reads as
many; for one of two ranks five thirds of them must be read (of MXFP4 four thirds), so where the disk is the limit the
share is 75 % at best (86 %).
`moved` is the share by bytes read and written together.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kernels.exl3_record import Exl3Record
from kernels.record import ExpertRecord
from minis.config import mini_config
from tided.engine.packing import pack_checkpoint
from tided.errors import TideError

HIDDEN, INNER, LAYERS, RANKS = 6144, 2048, 1, 2
DEEPSEEK_HIDDEN, DEEPSEEK_INNER = 5120, 2304
WIDTHS = [(4, 4, 4), (4, 4, 6), (6, 6, 6), (6, 6, 8), (8, 8, 8)]  # half bits of gate, up and down, in turns
CONFIG = {
    "model_type": "glm_moe_dsa", "vocab_size": 128, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "intermediate_size": 128, "moe_intermediate_size": INNER, "first_k_dense_replace": 0, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "hidden_act": "silu", "num_attention_heads": 2, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_parameters": {"rope_theta": 10000.0}, "rms_norm_eps": 1e-5, "index_n_heads": 2, "index_head_dim": 128,
    "index_topk": 64, "max_position_embeddings": 4096, "eos_token_id": [1],
}  # fmt: skip


Stored = tuple[str, str, list[int], int]  # name, dtype, shape, bytes


def exl3(gb: float) -> tuple[dict[str, Any], list[Stored]]:
    """As the converter writes experts: the markers between the trellises, nothing aligned."""
    mean = sum(Exl3Record(HIDDEN, INNER, 1).trellis_bytes(sum(widths)) for widths in WIDTHS) / len(WIDTHS)
    experts, tensors = max(8, round(gb * 1e9 / mean)), list[Stored]()
    for expert in range(experts):
        for part, bits in zip(("gate", "up", "down"), WIDTHS[expert % len(WIDTHS)], strict=True):
            k, n = (INNER, HIDDEN) if part == "down" else (HIDDEN, INNER)
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj"
            tensors += [(f"{name}.suh", "F16", [k], 2 * k), (f"{name}.svh", "F16", [n], 2 * n)]
            tensors.append((f"{name}.mcg", "I32", [], 4))
            tensors.append((f"{name}.trellis", "I16", [k // 16, n // 16, 8 * bits], k * n * bits // 16))
    return CONFIG | {"n_routed_experts": experts}, tensors


def mxfp4(gb: float) -> tuple[dict[str, Any], list[Stored]]:
    """As they are released: codes of all experts, and then their scales."""
    whole = ExpertRecord(DEEPSEEK_HIDDEN, DEEPSEEK_INNER, 1)
    config = mini_config(1, [0, 0], {"noise": 1, "image": 1})
    layers = config["text_config"]["num_hidden_layers"]
    experts = max(8, round(gb * 1e9 / (layers * whole.nbytes)))
    sizes = {"hidden_size": DEEPSEEK_HIDDEN, "moe_intermediate_size": DEEPSEEK_INNER, "n_routed_experts": experts}
    config["text_config"] |= sizes
    tensors = list[Stored]()
    for kind, dtype, shapes in (("weight", "I8", whole.shapes[:3]), ("scale", "F8_E8M0", whole.shapes[3:])):
        for layer in range(layers):
            for expert in range(experts):
                parts = zip(("w1", "w3", "w2"), shapes, strict=True)
                name = f"layers.{layer}.ffn.experts.{expert}"
                tensors += [(f"{name}.{part}.{kind}", dtype, [*shape], prod(shape)) for part, shape in parts]
    return config, tensors


def checkpoint(directory: Path, config: dict[str, Any], tensors: list[Stored]) -> Path:
    """Of random bytes."""
    entries, at = {}, 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    header, noise = json.dumps(entries).encode(), np.random.default_rng(0).bytes(64 << 20)
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for begin in range(0, at, len(noise)):
            file.write(noise[: at - begin])
        file.flush()
        os.fsync(file.fileno())
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def forget(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(act: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def packed(source: Path, out: Path, rank: int | None) -> tuple[int, int, float]:
    """(bytes of the packs, bytes read from the device, seconds)."""
    forget(source / "model.safetensors")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    seconds = timed(lambda: pack_checkpoint(source, RANKS, rank, out, lambda *_: None))  # type: ignore[func-returns-value]
    read = 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before)
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    return nbytes, read, seconds


def copied(source: Path, out: Path, nbytes: int) -> float:
    """Seconds that cp and a flush take for a file of so many bytes, which is made before."""
    part = source / "part"
    if not part.exists() or part.stat().st_size != nbytes:
        with part.open("wb") as file, (source / "model.safetensors").open("rb") as whole:
            while (left := nbytes - file.tell()) > 0:
                file.write(whole.read(min(left, 64 << 20)) or bytes(min(left, 64 << 20)))
            file.flush()
            os.fsync(file.fileno())
    forget(part)

    def act() -> None:
        subprocess.run(["cp", str(part), str(out)], check=True)
        fd = os.open(out, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    seconds = timed(act)
    out.unlink()
    return seconds


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        source = checkpoint(folder / "checkpoint", *(exl3 if options.experts == "exl3" else mxfp4)(options.gb))
        for title, rank in (("all", None), ("one", 0)):
            shares, moved = [], []
            for _ in range(options.rounds):
                nbytes, read, ours_s = packed(source, folder / "packs", rank)
                cp_s = copied(source, folder / "copy", nbytes)
                shares.append(cp_s / ours_s)
                moved.append((nbytes + read) / (2 * nbytes) * cp_s / ours_s)
                ours, theirs = (f"{nbytes / seconds / 1e9:.2f} GB/s" for seconds in (ours_s, cp_s))
                print(f"{title}: {nbytes / 1e9:.2f} GB, packing {ours}, cp {theirs}", flush=True)
            print(f"{title}: share {statistics.median(shares):.2f}, moved {statistics.median(moved):.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", choices=["exl3", "mxfp4"], default="exl3")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    try:
        main(parser.parse_args())
    except TideError as error:
        sys.exit(str(error))
