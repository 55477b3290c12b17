"""What a context costs in fidelity that is kept otherwise: GLM-5.3's latents in FP8, and shared by ranks, against BF16
on one rank that keeps all.

    python bench/cache_kl.py PROFILE | CHECKPOINT [--tokens N] [--texts N] [--ids FILE] [--ranks 2]
        [--numerics native|fp32] [--most-kl 0.005] [--json]

Long texts, each the held-out conversations one after the other in another order (or the ids of a JSON file), are
teacher-forced with every expert resident. They should not be longer than the model is good for: its loss tells. By row,
of the distributions of the next token:

    KL          of the form from BF16, in nats: mean, 99th percentile, largest
    same        rows whose likeliest token is the same
    loss        of the text's own next tokens, and what it is more than BF16's

Fails where the mean KL of FP8 exceeds --most-kl. Without rounding (fp32) it is FP8's alone; with it, streams in bf16
that differ in a last bit choose other experts and tokens now and then, as the ranks' rows show.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import cross_entropy

from tidectl.evals.texts import FILE, message_of, rows
from tided.chat import families as chat
from tided.chat.messages import Conversation, Message
from tided.chat.tokenizer import Tokenizer
from tided.engine.offline import logits, settings_of
from tided.errors import TideError
from tided.models.families import family_of, open_checkpoint
from tided.profile import load
from tided.settings import Settings

BASE = "bf16"


@dataclass(frozen=True)
class Row:
    form: str
    tokens: int
    kl_mean: float
    kl_p99: float
    kl_most: float
    same: float
    loss: float
    loss_more: float


def forms(settings: Settings, ranks: int) -> Iterator[tuple[str, Settings, int]]:
    for split in (False, True) if ranks > 1 else (False,):
        for dtype in ("bf16", "fp8"):
            cache = replace(settings.cache, dtype=dtype, split=split)
            yield (
                f"{dtype}, over {ranks} ranks" if split else dtype,
                replace(settings, cache=cache),
                ranks if split else 1,
            )


def compared(form: str, found: list[Tensor], base: list[Tensor], texts: list[list[int]]) -> Row:
    """found, base [tokens, V] fp32 of each text; row i is of token i + 1."""
    kl = torch.cat([_kl(*rows) for rows in zip(base, found, strict=True)])
    loss, before = (_loss(of, texts) for of in (found, base))
    same = torch.cat([one.argmax(1) == other.argmax(1) for one, other in zip(found, base, strict=True)])
    p99 = float(torch.quantile(kl, 0.99))
    return Row(form, len(kl), float(kl.mean()), p99, float(kl.max()), float(same.float().mean()), loss, loss - before)


def _loss(rows: list[Tensor], texts: list[list[int]]) -> float:
    each = [
        cross_entropy(of[:-1], torch.tensor(ids[1:]), reduction="none") for of, ids in zip(rows, texts, strict=True)
    ]
    return float(torch.cat(each).mean())


def _kl(base: Tensor, found: Tensor) -> Tensor:
    """[n, V] each -> [n]"""
    p, q = (torch.log_softmax(rows.double(), 1) for rows in (base, found))
    return (p.exp() * (p - q)).sum(1)


def measure(settings: Settings, texts: list[list[int]], ranks: int) -> Iterator[Row]:
    config = open_checkpoint(settings.model).config
    shape = family_of(config).shape(config)
    every, base = shape.moe_layers * shape.experts_per_layer, None
    for form, asked, over in forms(settings, ranks):
        found = [logits(asked, ids, ranks=over, resident=every) for ids in texts]
        base = found if base is None else base
        yield compared(form, found, base, texts)


def long_texts(settings: Settings, tokens: int, count: int) -> list[list[int]]:
    """The held-out conversations, domain by domain in turns, as long ones in the model's own format: each begins with
    others."""
    by_domain: dict[str, list[list[Message]]] = {}
    for row in rows(FILE):
        if row.messages and not row.tools and row.messages[0].role == "user":
            by_domain.setdefault(row.domain, []).append(list(map(message_of, row.messages)))
    turns = [messages for group in zip(*by_domain.values(), strict=False) for messages in group]
    checkpoint = open_checkpoint(settings.model)
    encode = chat.family_of(checkpoint.config).encode_prompt
    tokenizer, texts = Tokenizer.open(checkpoint.path), []
    for number in range(count):
        first = number * len(turns) // count
        messages = tuple(message for turn in turns[first:] + turns[:first] for message in turn)
        whole = Conversation(messages=messages, tools=(), thinking=False, effort=0, open_turn=False)
        texts.append(tokenizer.encode(encode(whole).segments)[:tokens])
    return texts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="FP8 and shared contexts against BF16")
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numerics", choices=["native", "fp32"], default="native")
    parser.add_argument("--most-kl", type=float, default=0.005)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        settings = load(asked.target) if asked.target.is_file() else settings_of(asked.target)
        settings = replace(settings, model=replace(settings.model, numerics=asked.numerics))
        given = [json.loads(asked.ids.read_text())[: asked.tokens]] if asked.ids else None
        texts = given or long_texts(settings, asked.tokens, asked.texts)
        rows = list(shown(measure(settings, texts, asked.ranks), asked.json))
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return int(any(row.kl_mean > asked.most_kl for row in rows if row.form.startswith("fp8")))


def shown(rows: Iterator[Row], as_json: bool) -> Iterator[Row]:
    if not as_json:
        print(f"{'':22}{'tokens':>8}{'KL mean':>12}{'p99':>12}{'largest':>12}{'same':>9}{'loss':>10}{'more':>11}")
    for row in rows:
        if as_json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            kl = f"{row.kl_mean:12.2e}{row.kl_p99:12.2e}{row.kl_most:12.2e}"
            print(f"{row.form:22}{row.tokens:8}{kl}{row.same:9.2%}{row.loss:10.4f}{row.loss_more:+11.5f}", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
