"""What EXL3 and residency cost the mini GLM on the same held-out answers, in nats a token: the weights as they were
trained, as they are stored, and with a part of the experts' bytes in memory.

    python bench/glm_loss.py [profiles/mini-glm.toml] [--masters FILE] [--held 67] [--tokens 48] [--longest 24] [--json]

    trained         every expert, in bf16: the parameters that a training run left (`minis.glm53.train`), by its own
                    forward pass with hard top-k. They are not bundled; without --masters the row is left out
    as stored       every expert, by the engine: EXL3 experts, FP8 attention
    substitution    a part of the experts' bytes, the seed's set; every missing expert is substituted
    + reads         the same set; of each step the heaviest misses are read before use (`balanced`)
    exact           the same set; every miss is read before use

Answers are forced token by token through the engine of one rank, the first tokens of each; the set never changes.
`missed`: the share of routing weight that was not resident when it was wanted, prompts included.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from residency_engine import FROZEN, Variant, serving
from residency_report import Answer
from safetensors.torch import load_file
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from minis.glm53 import model as trained
from tidectl.evals.texts import Text, read
from tided.errors import TideError
from tided.models.glm53.config import Config, read_config
from tided.profile import load

MOST_TOKENS = 640  # of a prompt and its answer
READS = Variant("+ reads", fidelity="balanced")
EXACT = Variant("exact", fidelity="exact")
Losses = dict[str, list[float]]  # by domain


def chosen(texts: dict[str, list[Text]], tokens: int, longest: int) -> dict[str, list[Text]]:
    """The first of each domain, `tokens` of their answers together."""
    found: dict[str, list[Text]] = {}
    for domain, of_domain in texts.items():
        left = tokens
        for text in of_domain:
            if left > 0:
                found.setdefault(domain, []).append(text.cut(min(longest, left)))
                left -= found[domain][-1].answer_tokens
    return found


@torch.no_grad()
def by_training(config: Config, masters: dict[str, torch.Tensor], texts: dict[str, list[Text]]) -> Losses:
    """masters: parameters as training has them, experts stacked."""
    p = {name: weight.bfloat16().float() for name, weight in masters.items()}
    mode = trained.Mode(select=True)
    packed, frequency = trained.pack_all(p, config, mode.dtype), trained.frequencies(config, torch.device("cpu"))
    losses: Losses = {}
    for domain, text in ((domain, text) for domain, of_domain in texts.items() for text in of_domain):
        ids = torch.tensor([text.ids])
        state = trained.trunk(p, config, trained.make_layout(ids, config, frequency), packed, mode).state[0]
        rows = trained.logits(p, state[text.prompt_tokens - 1 : -1])
        each = F.cross_entropy(rows, ids[0, text.prompt_tokens :], reduction="none")
        losses.setdefault(domain, []).extend(each.tolist())
    return losses


def by_engine(settings: Any, held: float, variant: Variant, texts: dict[str, list[Text]]) -> list[Answer]:
    with serving(settings, held, variant) as server:
        return [server.answer(text) for of_domain in texts.values() for text in of_domain]


def row(name: str, losses: Losses, answers: Sequence[Answer] = ()) -> dict[str, Any]:
    domains = {domain: round(sum(each) / len(each), 4) for domain, each in losses.items()}
    found: dict[str, Any] = {"row": name, "loss": domains, "mean": round(sum(domains.values()) / len(domains), 4)}
    seen = [part for answer in answers for part in answer.seen]
    if weight := sum(part.weight for part in seen):
        hits = [hit for answer in answers for hit in answer.hits]
        found["top1"] = round(sum(hits) / len(hits), 4)
        found["missed"] = round(sum(part.missed for part in seen) / weight, 4)
        found["digests"] = [answer.digest for answer in answers]
    return found


def losses_of(answers: Sequence[Answer]) -> Losses:
    found: Losses = {}
    for answer in answers:
        found.setdefault(answer.domain, []).extend(answer.losses)
    return found


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    settings = load(options.profile)
    settings = replace(
        settings,
        engine=replace(settings.engine, lanes=1, threads=1, device="cpu", draft="off"),
        parallel=replace(settings.parallel, ranks=1, hosts=()),
    )
    path = Path(settings.model.path)
    texts = chosen(read(path, MOST_TOKENS), options.tokens, options.longest)
    texts = {domain: texts[domain] for domain in options.domains.split(",") if domain} or texts
    if options.masters:
        config = read_config(json.loads((path / "config.json").read_text("utf-8")))
        yield row("trained", by_training(config, load_file(options.masters), texts))
    runs = (("as stored", 100.0, FROZEN), *((one.name, options.held, one) for one in (FROZEN, READS, EXACT)))
    whole: list[str] = []
    for name, held, variant in runs:
        answers = by_engine(settings, held, variant, texts)
        found = row(name, losses_of(answers), answers)
        digests = found.pop("digests")
        whole = whole or digests
        yield found | {"answers": len(digests), "equal": sum(a == b for a, b in zip(digests, whole, strict=True))}


def show(found: dict[str, Any], first: bool) -> None:
    if first:
        print("| | " + " | ".join((*found["loss"], "mean", "top-1", "missed", "equal to as stored")) + " |")
        print("|---" * (len(found["loss"]) + 5) + "|")
    cells = [f"{loss:.4f}" for loss in (*found["loss"].values(), found["mean"])]
    if "top1" in found:
        equal = f"{found['equal']} of {found['answers']}"
        cells += [f"{found['top1']:.1%}", f"{found['missed']:.1%}", equal]
    print(f"| {found['row']} | " + " | ".join(cells) + " |", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", default=Path(__file__).parents[1] / "profiles/mini-glm.toml")
    parser.add_argument("--masters", type=Path, help="what training left: masters.safetensors")
    parser.add_argument("--held", type=float, default=67.0, help="percent of the experts' bytes")
    parser.add_argument("--tokens", type=int, default=48, help="of answers, a domain")
    parser.add_argument("--longest", type=int, default=24, help="tokens of an answer; the rest of it is left out")
    parser.add_argument("--domains", default="", help="default: all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        for number, found in enumerate(rows(options)):
            print(json.dumps(found), flush=True) if options.json else show(found, number == 0)
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
