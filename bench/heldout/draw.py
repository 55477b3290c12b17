"""Draws the held-out texts of `tidectl eval` and `bench/residency.py`.

    python bench/heldout/draw.py > tidectl/evals/heldout.jsonl
    python bench/heldout/draw.py --conversations --seed 11 --each 240 > more.jsonl

Conversations come from the generators of the mini's training data, from a seed that training never used: others from
the same small worlds. One that occurs word for word in one of DRAWINGS drawings as large as training's is rejected, and
another drawn; single answers occur in training all the same, of `lang` and `qa` most (`seen.py` counts them). Prose and
code are from this repository, which training never saw. A line is a conversation as a client would send it, or a plain
text. Half a minute of one core.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.heldout.seen import Pair, drawn_for_training, pairs  # noqa: E402
from minis.corpus import codechat, facts, lang, story, sums, tools  # noqa: E402
from minis.corpus.words import Words  # noqa: E402
from minis.encoding import Dialogue  # noqa: E402
from tidectl.evals.texts import FILE, rows  # noqa: E402

SEED, DRAWINGS = 7_310_551, 8
MOST_TRIES = 50  # for each conversation
GENERATORS: dict[str, Callable[[random.Random, Words], Dialogue]] = {
    "story": story.generate,
    "qa": facts.generate,
    "math": sums.generate,
    "codechat": codechat.generate,
    "tools": tools.generate,
    "lang": lang.generate,
}
SOURCES = {"prose": ("docs/*.md", "README.md", "minis/README.md"), "code": ("tided/*/*.py", "kernels/*.py")}
LEAST_CHARACTERS, MOST_CHARACTERS = 300, 700  # of a plain text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=48, help="texts of a domain")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--conversations", action="store_true", help="nothing else: the same while this repository's texts change"
    )
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.conversations:
        prose = [row.text or "" for row in rows(FILE) if row.domain == "prose"]
    else:
        plain = {domain: list(passages(patterns)) for domain, patterns in SOURCES.items()}
        for domain, texts in plain.items():
            for text in rng.sample(texts, min(options.each, len(texts))):
                show({"domain": domain, "text": text})
        prose = plain["prose"]
    words = Words(rng, sorted(set(re.findall(r"\b[a-z]{3,10}\b", " ".join(prose)))))
    for domain, generate in GENERATORS.items():
        others = random.Random(SEED + 1)  # `seen.py` counts by another
        seen = set[tuple[Pair, ...]]().union(
            *(drawn_for_training(domain, generate, others, words) for _ in range(DRAWINGS))
        )
        for one in unseen(lambda generate=generate: generate(rng, words), seen, options.each):
            show({"domain": domain, **conversation(one)})


def unseen(draw: Callable[[], Dialogue], seen: AbstractSet[tuple[Pair, ...]], count: int) -> Iterator[Dialogue]:
    """`count` conversations that are not among those of training, nor twice here. Raises RuntimeError where the world
    is too small for that."""
    taken = set(seen)
    for wanted in range(count, 0, -1):
        one = next((one for one in (draw() for _ in range(MOST_TRIES)) if pairs(one.messages) not in taken), None)
        if one is None:
            raise RuntimeError(f"{wanted} more conversations that training has not seen cannot be drawn")
        taken.add(pairs(one.messages))
        yield one


def conversation(drawn: Dialogue) -> dict[str, Any]:
    given = {"messages": drawn.messages, "thinking": drawn.thinking, "effort": drawn.effort}
    return given | ({"tools": drawn.tools} if drawn.tools else {})


def passages(patterns: tuple[str, ...]) -> Iterator[str]:
    """Neighbouring paragraphs without tables and listings of figures, cut to size."""
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        text = ""
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            text += "" if paragraph.lstrip().startswith("|") else f"{paragraph}\n\n"
            if len(text) >= LEAST_CHARACTERS:
                yield text[:MOST_CHARACTERS].rstrip()
                text = ""


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
