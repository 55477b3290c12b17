"""What a context costs in fidelity that is kept otherwise: GLM-5.3's latents in FP8, and shared by ranks, against BF16
on one rank that keeps all.

    python bench/cache_kl.py PROFILE | CHECKPOINT [--tokens N] [--texts N] [--file FILE | --ids FILE]
        [--ranks 2] [--numerics native|fp32] [--most-kl 0.005] [--json]

The long held-out text: held-out conversations (--file: the bundled ones, `tidectl/evals/heldout.jsonl`, or what
`bench/heldout/draw.py` drew), domains in turns, one after the other in the model's format, in texts of --tokens, none
of them in two texts; all, unless --texts says how many.
Teacher-forced with every expert resident. Texts should not be longer than the model is good for: its loss tells. By
row, of the distributions of the next token:

    KL          of the form from BF16, in nats: mean with the 95 % interval of a bootstrap over texts, 99th percentile,
                largest
    same        rows whose likeliest token is the same
    loss        of the text's own next tokens, and what it is more than BF16's

Fails where the mean KL of FP8 exceeds --most-kl, and says whether its interval stays within. Without rounding (fp32) it
is FP8's alone; with it, streams in bf16 that differ in a last bit choose other experts and tokens now and then, as the
ranks' rows show.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
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

BASE, DRAWS = "bf16", 2000


@dataclass(frozen=True)
class Row:
    form: str
    tokens: int
    texts: int
    kl_mean: float
    kl_low: float
    kl_high: float
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
    by_text = [_kl(*rows) for rows in zip(base, found, strict=True)]
    kl, (low, high) = torch.cat(by_text), _interval([float(one.mean()) for one in by_text])
    loss, before = (_loss(of, texts) for of in (found, base))
    same = torch.cat([one.argmax(1) == other.argmax(1) for one, other in zip(found, base, strict=True)])
    p99 = float(torch.quantile(kl, 0.99))
    mean, most, equal = float(kl.mean()), float(kl.max()), float(same.float().mean())
    return Row(form, len(kl), len(texts), mean, low, high, p99, most, equal, loss, loss - before)


def _interval(means: list[float]) -> tuple[float, float]:
    """Of their mean, 95 %, by drawing as many again."""
    values = torch.tensor(means, dtype=torch.float64)
    drawn = torch.randint(len(means), (DRAWS, len(means)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(values[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


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


def long_texts(settings: Settings, tokens: int, most: int, file: Path) -> list[list[int]]:
    """The held-out conversations, domains in turns, one after the other in the model's own format, cut into texts of so
    many tokens: no conversation is in two of them. `most` 0: all there are."""
    by_domain: dict[str, list[list[Message]]] = {}
    for row in rows(file):
        if row.messages and not row.tools and row.messages[0].role == "user":
            by_domain.setdefault(row.domain, []).append(list(map(message_of, row.messages)))
    turns = [messages for group in zip_longest(*by_domain.values()) for messages in group if messages]
    checkpoint = open_checkpoint(settings.model)
    encode = chat.family_of(checkpoint.config).encode_prompt
    tokenizer, texts, held = Tokenizer.open(checkpoint.path), list[list[int]](), list[Message]()
    for messages in turns:
        held += messages
        whole = Conversation(messages=tuple(held), tools=(), thinking=False, effort=0, open_turn=False)
        ids = tokenizer.encode(encode(whole).segments)
        if len(ids) >= tokens and not 0 < most <= len(texts):
            texts.append(ids[:tokens])
            held = []
    return texts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="FP8 and shared contexts against BF16")
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=0, help="default: all")
    parser.add_argument("--file", type=Path, default=FILE, help="held-out conversations")
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
        texts = given or long_texts(settings, asked.tokens, asked.texts, asked.file)
        rows = list(shown(measure(settings, texts, asked.ranks), asked.json))
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    judged = [row for row in rows if row.form.startswith("fp8")]
    for row in judged:
        print(verdict(row, asked.most_kl), file=sys.stderr if asked.json else sys.stdout)
    return int(any(row.kl_mean > asked.most_kl for row in judged))


def verdict(row: Row, most: float) -> str:
    mean, high = ("within" if value <= most else "beyond" for value in (row.kl_mean, row.kl_high))
    return f"{row.form}: the mean KL is {mean} {most:g}, the upper end of its interval ({row.kl_high:.2e}) {high} it"


def shown(found: Iterator[Row], as_json: bool) -> Iterator[Row]:
    heads = ("tokens", "texts", "KL mean", "low", "high", "p99", "largest", "same", "loss", "more")
    if not as_json:
        print(f"{'':22}" + "".join(f"{head:>11}" for head in heads))
    for row in found:
        if as_json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            kl = "".join(f"{one:11.2e}" for one in (row.kl_mean, row.kl_low, row.kl_high, row.kl_p99, row.kl_most))
            rest = f"{row.same:11.2%}{row.loss:11.4f}{row.loss_more:+11.5f}"
            print(f"{row.form:22}{row.tokens:11}{row.texts:11}{kl}{rest}", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
