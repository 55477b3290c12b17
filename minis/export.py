"""Turns trained parameters into a checkpoint folder of the released layout.

python -m minis.export --data scratch/mini/full --masters /tmp/mini/masters.safetensors --out minis/deepseek
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from minis.checkpoint import quantise_all, write_checkpoint
from minis.config import load
from minis.encoding import BOS, EOS, PAD

_GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 0.95,
}


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--masters", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    a = args.parse_args()
    cfg = load(a.data / "config.json")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = {n: w.to(device) for n, w in load_file(a.masters).items()}
    # Router bias serves both kinds of positions; image positions were not trained apart.
    for name in [n for n in p if n.endswith(".gate.bias")]:
        p[f"{name}_vl"] = p[name].clone()
    a.out.mkdir(parents=True, exist_ok=True)
    for old in a.out.glob("model-*.safetensors"):
        old.unlink()
    total = write_checkpoint(a.out, quantise_all(p), cfg)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(a.data / name, a.out / name)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    for name, value in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", _GENERATION)):
        (a.out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
    size = sum(f.stat().st_size for f in a.out.iterdir() if f.is_file())
    print(f"{total / 1e6:.2f} MB of tensors, {size / 1e6:.2f} MB in all")


if __name__ == "__main__":
    main()
