"""Writes a checkpoint folder of the GLM-5.3 mini from trained parameters.

    python -m minis.glm53.export --data scratch/mini/glm --masters run/masters.safetensors --out minis/glm \\
        --experts run/experts.safetensors

`--experts`: the routed experts as `minis.glm53.quantise` wrote them; without it they become MXFP4. In place of masters
`--dense` takes everything but the routed experts from another checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from minis.glm53.checkpoint import EXL3, FP8, dense_of, dense_tensors, mxfp4_experts, write_checkpoint
from minis.glm53.config import load
from tided.chat import glm53


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--masters", type=Path)
    args.add_argument("--dense", type=Path)
    args.add_argument("--experts", type=Path)
    args.add_argument("--out", type=Path, required=True)
    a = args.parse_args()
    if (a.masters is None) == (a.dense is None) or (a.masters is None and a.experts is None):
        args.error("give either --masters, or --dense and --experts")
    cfg = load(a.data / "config.json")
    p = load_file(a.masters) if a.masters else {}
    tensors = dense_tensors(p, cfg) if a.masters else dense_of(a.dense)
    tensors |= load_file(a.experts) if a.experts else mxfp4_experts(p)
    a.out.mkdir(parents=True, exist_ok=True)
    for old in a.out.glob("model-*.safetensors"):
        old.unlink()
    total = write_checkpoint(a.out, tensors, cfg)
    raw = json.loads((a.data / "config.json").read_text("utf-8"))
    _write(a.out / "config.json", raw | {"quantization_config": EXL3 | {"bits": _bits(tensors)} if a.experts else FP8})
    _write(a.out / "generation_config.json", _generation(raw))
    _write(a.out / "tokenizer_config.json", _TOKENIZER)
    shutil.copyfile(a.data / "tokenizer.json", a.out / "tokenizer.json")
    size = sum(f.stat().st_size for f in a.out.iterdir() if f.is_file())
    print(f"{total / 1e6:.2f} MB of tensors, {size / 1e6:.2f} MB in all")


def _bits(tensors: dict[str, Tensor]) -> float:
    """Mean width of the experts' matrices: a trellis has 16 words a bit for 256 weights."""
    words = [t for name, t in tensors.items() if name.endswith(".trellis")]
    return round(16 * sum(t.numel() for t in words) / sum(256 * t.shape[0] * t.shape[1] for t in words), 4)


_TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": glm53.END_OF_TEXT,
    "pad_token": glm53.END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
}


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    ids = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    return ids | {"do_sample": True, "temperature": 1.0, "top_p": 0.95}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
