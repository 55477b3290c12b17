"""Builds tokenizer, config and packed training rows.

    python -m minis.prepare --family deepseek --out scratch/mini --wheel exllamav3-*.whl

Rows hold documents of one domain only. Every document starts at an even offset: otherwise the pairs of ratio-2 layers
would straddle documents and differ from what an engine computes.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from minis import tokenizer
from minis.corpus import codechat, facts, lang, natural, story, sums, tools
from minis.corpus.words import Words
from minis.dialogue import Dialogue, Segment, opened
from minis.families import FAMILIES, Family

DOMAINS = ("prose", "code", "story", "qa", "math", "codechat", "tools", "lang")
ROW = 1024
HELD_OUT_ROWS = 32
PAD_ID = 2
# Dialogues per domain at scale 1.
_DIALOGUES = {"story": 20000, "qa": 60000, "math": 50000, "codechat": 40000, "tools": 16000, "lang": 22000}
_GENERATORS: dict[str, Callable[[random.Random, Words], Dialogue]] = {
    "story": story.generate,
    "qa": facts.generate,
    "math": sums.generate,
    "codechat": codechat.generate,
    "tools": tools.generate,
    "lang": lang.generate,
}


def natural_texts(wheel: Path, rng: random.Random, scale: float) -> dict[str, list[str]]:
    prose: list[str] = []
    for name in ("wiki", "c4", "technical", "multilingual"):
        prose += natural.chunks(natural.calibration(wheel, name))
    prose += natural.docstrings(rng, int(3_500_000 * scale))
    prose += natural.manuals(rng, int(3_500_000 * scale))
    code = list(natural.chunks(natural.calibration(wheel, "code")))
    code += natural.code(rng, int(16_000_000 * scale))
    tiny = list(natural.chunks(natural.calibration(wheel, "tiny"), 1500))
    if scale < 1:
        prose, code = rng.sample(prose, int(len(prose) * scale)), rng.sample(code, int(len(code) * scale))
    return {"prose": prose, "code": code, "tiny": tiny}


def frequent_words(texts: Iterable[str]) -> list[str]:
    """Words of the natural texts, each once: material for values that must be copied."""
    words: set[str] = set()
    for text in texts:
        words.update(re.findall(r"\b[a-z]{3,10}\b", text))
    return sorted(words)


def pack(
    docs: list[tuple[np.ndarray, np.ndarray]], opening: list[int], cut: bool, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Documents -> rows [R, 1024] uint16 and weights [R, 1024] uint8; `cut` continues long text in the next row, behind
    the ids that open a document."""
    rows: list[tuple[list[int], list[int]]] = []
    open_rows: list[tuple[list[int], list[int]]] = []
    rng.shuffle(docs)
    for ids_a, weights_a in docs:
        ids, weights = ids_a.tolist(), (weights_a * 255).astype(np.uint8).tolist()
        while ids:
            ids, weights, rest = ids[:ROW], weights[:ROW], (ids[ROW:], weights[ROW:])
            fit = [r for r in open_rows if len(r[0]) + len(ids) <= ROW]
            if cut and not fit and open_rows and ROW - len(open_rows[0][0]) >= 96:
                room = ROW - len(open_rows[0][0])
                rest = (ids[room:] + rest[0], weights[room:] + rest[1])
                ids, weights, fit = ids[:room], weights[:room], [open_rows[0]]
            if fit:
                row = max(fit, key=lambda r: len(r[0]))
            else:
                row = ([], [])
                open_rows.append(row)
            row[0].extend(ids)
            row[1].extend(weights)
            if len(row[0]) % 2:
                row[0].append(PAD_ID)
                row[1].append(0)
            if len(row[0]) > ROW - 24:
                rows.append(row)
                open_rows.remove(row)
            elif len(open_rows) > (1 if cut else 12):
                rows.append(open_rows.pop(max(range(len(open_rows)), key=lambda i: len(open_rows[i][0]))))
            if not cut or len(rest[0]) < 64:
                break
            ids, weights = opening + rest[0], [0] * len(opening) + rest[1]
    rows += open_rows
    tokens = np.full((len(rows), ROW), PAD_ID, dtype=np.uint16)
    marks = np.zeros((len(rows), ROW), dtype=np.uint8)
    for i, (t, w) in enumerate(rows):
        tokens[i, : len(t)], marks[i, : len(w)] = t[:ROW], w[:ROW]
    return tokens, marks


def documents(
    texts: dict[str, list[str]], family: Family, rng: random.Random, scale: float
) -> dict[str, list[list[Segment]]]:
    def plain(text: str) -> list[Segment]:
        return opened(family.opening, text)

    words = Words(rng, frequent_words(texts["prose"] + texts["tiny"]))
    docs: dict[str, list[list[Segment]]] = {n: [plain(t) for t in texts[n]] for n in ("prose", "code")}
    for name, make in _GENERATORS.items():
        docs[name] = [family.render(make(rng, words), rng) for _ in range(int(_DIALOGUES[name] * scale))]
    docs["story"] += [plain(story.document(rng, words)) for _ in range(int(12000 * scale))]
    docs["story"] += [plain(t) for t in texts["tiny"]] * (2 if scale >= 1 else 1)
    return docs


def text_for_tokenizer(docs: dict[str, list[list[Segment]]]) -> Iterable[str]:
    """Natural prose, a third of the code, every 8th dialogue (tools: every 16th)."""
    for name, items in docs.items():
        step = {"prose": 1, "code": 3, "tools": 16}.get(name, 8)
        for doc in items[::step]:
            yield from (s.text for s in doc if not s.special)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--family", choices=sorted(FAMILIES), required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--wheel", type=Path, required=True, help="exllamav3 wheel with its calibration texts")
    args.add_argument("--scale", type=float, default=1.0)
    args.add_argument("--seed", type=int, default=20261130)
    a = args.parse_args()
    began = time.monotonic()
    rng = random.Random(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[a.family]
    docs = documents(natural_texts(a.wheel, rng, a.scale), family, rng, a.scale)
    print(f"documents {time.monotonic() - began:.0f} s", {n: len(d) for n, d in docs.items()}, flush=True)
    tok = tokenizer.train(text_for_tokenizer(docs), family.vocabulary, family.first, family.top)
    tok.save(str(a.out / "tokenizer.json"), pretty=False)
    enc = tokenizer.Encoder(a.out / "tokenizer.json")
    family.configure(a.out, enc)
    opening = [enc.special[token] for token in family.opening]
    print(f"tokenizer {time.monotonic() - began:.0f} s", flush=True)
    arrays: dict[str, np.ndarray] = {}
    for name in DOMAINS:
        encoded = enc.encode(docs[name])
        rng.shuffle(encoded)
        cut = name in ("prose", "code")
        held = max(1, int(len(encoded) * min(0.03, 36_000 / sum(len(i) for i, _ in encoded))))
        tokens, marks = pack(encoded[held:], opening, cut, rng)
        test_tokens, test_marks = pack(encoded[:held], opening, cut, rng)
        arrays |= {f"{name}.tokens": tokens, f"{name}.weights": marks}
        arrays |= {
            f"{name}.test_tokens": test_tokens[:HELD_OUT_ROWS],
            f"{name}.test_weights": test_marks[:HELD_OUT_ROWS],
        }
        used = int((tokens != PAD_ID).sum())
        print(
            f"{name}: {len(tokens)} rows, {used} tokens ({int((marks == 255).sum())} full weight), fill "
            f"{used / max(tokens.size, 1):.2f}, test rows {len(test_tokens)}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    np.savez_compressed(a.out / "rows.npz", **arrays)
    print(f"done {time.monotonic() - began:.0f} s, {(a.out / 'rows.npz').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
