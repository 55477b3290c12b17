"""How far past its training length a checkpoint stays usable: one conversation of facts, read at several depths.

python -m minis.long_context --model minis/deepseek --report minis/results/long_context.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch

from minis import layout, model
from minis.corpus import facts
from minis.dialogue import Dialogue, Message
from minis.encoding import render
from minis.generate import Speaker
from minis.layout import Mode

EDGES = (0, 512, 1024, 1536, 2048, 3072, 4096)


def conversation(rng: random.Random, tokens: int, s: Speaker) -> list[Message]:
    """Questions about countries until the prompt has about `tokens` tokens; it begins with a name to remember."""
    messages: list[Message] = [
        {"role": "user", "content": "My name is Tomrin."},
        {"role": "assistant", "content": "Nice to meet you, Tomrin!"},
    ]
    while True:
        q, a = facts._country(rng)
        messages += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
        if len(messages) % 20 == 0 and len(s.encoder.ids(render(Dialogue(messages)))) >= tokens:
            return messages


@torch.no_grad()
def by_position(s: Speaker, messages: list[Message]) -> dict[str, float]:
    """Share of greedy choices that are right, by position, over the tokens of the answers."""
    (ids, weights) = s.encoder.encode([render(Dialogue(messages))])[0]
    ids, weights = ids[: EDGES[-1]].astype("int64"), weights[: EDGES[-1]]
    tokens = torch.from_numpy(ids).unsqueeze(0).to(s.device)
    out = model.trunk(s.p, s.cfg, layout.make_layout(tokens, s.cfg, s.hasher), s.packed, s.mode)
    right = (model.logits(s.p, out.x, s.cfg).argmax(-1)[0, :-1] == tokens[0, 1:]).float().cpu()
    full = torch.from_numpy(weights[1:]) == 1.0
    result = {}
    for low, high in itertools.pairwise(EDGES):
        part = right[low:high][full[low:high]]
        if len(part):
            result[f"{low}..{high}"] = round(float(part.mean()), 3)
    return result


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--report", type=Path, required=True)
    a = args.parse_args()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    result: dict[str, Any] = {}
    for name, select in (("hard top-k", True), ("every row visible", False)):
        s = Speaker(a.model, Mode(round_kv=True, select=select, sparse=not gpu), device)
        rng = random.Random(9)
        result[name] = by_position(s, conversation(rng, EDGES[-1], s))
        for depth in (200, 900, 1800):
            messages = conversation(rng, depth, s)
            for q in ("What is the capital of Italy?", "What is my name?"):
                dialogue = Dialogue([*messages, {"role": "user", "content": q}])
                result[f"{name}, {depth}: {q}"] = s.answer([dialogue], 12)[0]
    print(json.dumps(result, indent=1))
    a.report.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
