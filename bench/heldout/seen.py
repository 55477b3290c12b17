"""How much of the held-out conversations occurs in as many conversations as the minis were trained on.

    python bench/heldout/seen.py [--seed 1]

The generators are drawn as often as training drew them, from another seed: a training of the same size that never saw
the held-out seed. By domain: what is answered to what (thoughts aside, calls included), and whole conversations, that
are word for word among those. One core, about half a minute.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from minis.corpus.words import Words  # noqa: E402
from minis.encoding import Dialogue  # noqa: E402
from minis.prepare import _DIALOGUES, _GENERATORS  # noqa: E402

Pair = tuple[str, str]
FILE = ROOT / "tidectl" / "evals" / "heldout.jsonl"


def pairs(messages: list[dict[str, Any]]) -> tuple[Pair, ...]:
    """(what came before, the answer) for each answer."""
    found, before = [], ""
    for message in messages:
        if message["role"] == "assistant":
            calls = [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
            ]
            found.append((before, json.dumps([message.get("content"), calls])))
        else:
            before = message.get("content") or ""
    return tuple(found)


def drawn_for_training(
    domain: str, generate: Callable[[random.Random, Words], Dialogue], rng: random.Random, words: Words
) -> set[tuple[Pair, ...]]:
    """Conversations, as many as training drew of the domain."""
    return {pairs(generate(rng, words).messages) for _ in range(_DIALOGUES[domain])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    rng = random.Random(parser.parse_args().seed)
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    prose = " ".join(row["text"] for row in rows if row["domain"] == "prose")
    words = Words(rng, sorted(set(re.findall(r"\b[a-z]{3,10}\b", prose))))
    print("domain    drawn  answers  seen  whole  seen")
    for domain, generate in _GENERATORS.items():
        drawn = drawn_for_training(domain, generate, rng, words)
        seen = {pair for whole in drawn for pair in whole}
        held = [pairs(row["messages"]) for row in rows if row["domain"] == domain]
        single = [pair for whole in held for pair in whole]
        told = (len(single), sum(pair in seen for pair in single), len(held), sum(whole in drawn for whole in held))
        print(f"{domain:8}{_DIALOGUES[domain]:7}" + "{:9}{:6}{:7}{:6}".format(*told), flush=True)


if __name__ == "__main__":
    main()
