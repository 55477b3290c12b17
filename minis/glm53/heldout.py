"""What the bundled held-out answers cost the parameters that a training run left, in bf16, token by token.

    python -m minis.glm53.heldout --model minis/glm --masters run/masters.safetensors \\
        --out minis/results/glm/trained.json

Parameters take 260 MB and are not bundled; this file is, and `bench/glm_loss.py` prints its row beside the engine's. It
names the checkpoint that was made of the same parameters, by what both hold bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from minis.glm53 import model
from minis.glm53.config import load
from minis.glm53.model import Mode, Params
from packers.shards import Checkpoint
from tidectl.evals.texts import Text, read
from tided.errors import DataError
from tided.models.glm53.config import Config

MOST_TOKENS = 1024  # of a prompt and its answer: as long as training's rows
PAD, BATCH = 2, 32
ALIGNED = 16  # tokens: what a GPU's attention wants of a mask
SAME = ("lm_head.weight", "model.norm.weight")  # a checkpoint has them in bf16, rounded from the parameters


class Scored(msgspec.Struct, frozen=True):
    """An answer: what its tokens cost in nats, and the places of those that are not the likeliest."""

    domain: str
    losses: list[float]
    unlikely: list[int]


class Trained(msgspec.Struct, frozen=True):
    """`checkpoint`: see `mark`. `answers`: by the key of the whole text."""

    checkpoint: str
    answers: dict[str, Scored]

    def of(self, whole: Text, answer_tokens: int) -> Scored:
        """Of the first tokens of an answer. Raises DataError for a text that was not scored."""
        try:
            found = self.answers[whole.key]
        except KeyError:
            raise DataError(f"no losses of a held-out answer of {whole.domain}", hint="score the texts anew") from None
        within = [place for place in found.unlikely if place < answer_tokens]
        return Scored(found.domain, found.losses[:answer_tokens], within)


def read_trained(file: Path) -> Trained:
    """Raises DataError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Trained)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"no losses of a training run: {error}", where=str(file)) from error


def mark(checkpoint: Path) -> str:
    """Names the parameters that a checkpoint was made of."""
    opened = Checkpoint.open(checkpoint)
    return _mark(opened.read(name) for name in SAME)


def mark_of(p: Params) -> str:
    return _mark(p[name].bfloat16() for name in SAME)


def _mark(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def scored(config: Config, masters: Params, texts: Iterable[Text]) -> Iterator[tuple[Text, Scored]]:
    """The parameters rounded to bf16, sums in fp32, hard top-k. Texts of like length share a pass."""
    p = {name: weight.bfloat16().float() for name, weight in masters.items()}
    device = p["lm_head.weight"].device
    mode = Mode(select=True, sparse=device.type == "cpu")
    packed, frequency = model.pack_all(p, config, mode.dtype), model.frequencies(config, device)
    ordered = sorted(texts, key=lambda text: len(text.ids))
    for at in range(0, len(ordered), BATCH):
        some = ordered[at : at + BATCH]
        longest = -(-len(some[-1].ids) // ALIGNED) * ALIGNED
        ids = torch.tensor([[*text.ids, *[PAD] * (longest - len(text.ids))] for text in some], device=device)
        state = model.trunk(p, config, model.make_layout(ids, config, frequency), packed, mode).state
        for text, row, of_text in zip(some, ids, state, strict=True):
            end, rows = len(text.ids), model.logits(p, of_text[text.prompt_tokens - 1 : len(text.ids) - 1])
            wanted = row[text.prompt_tokens : end]
            losses = F.cross_entropy(rows, wanted, reduction="none").tolist()
            unlikely = (rows.argmax(-1) != wanted).nonzero().flatten().tolist()
            yield text, Scored(text.domain, [round(loss, 5) for loss in losses], unlikely)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", type=Path, required=True, help="a checkpoint of these parameters")
    args.add_argument("--masters", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    a = args.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    p = {name: weight.to(device) for name, weight in load_file(a.masters).items()}
    if (of := mark(a.model)) != mark_of(p):
        sys.exit(f"{a.model} was not made of {a.masters}")
    texts = [text for of_domain in read(a.model, MOST_TOKENS).values() for text in of_domain]
    found = Trained(of, {text.key: answer for text, answer in scored(load(a.model / "config.json"), p, texts)})
    a.out.write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{len(found.answers)} answers, {sum(len(one.losses) for one in found.answers.values())} tokens", end=", ")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
