"""What EXL3 and residency cost the mini GLM on the same held-out answers, in nats a token: the weights as they were
trained, as they are stored, and with a part of the experts' bytes in memory.

    python bench/glm_loss.py [profiles/mini-glm.toml] [--trained FILE] [--held 67] [--tokens 48]
        [--longest 24] [--json]

    trained         every expert, in bf16: the parameters that a training run left (`minis.glm53.train`), by its own
                    forward pass with hard top-k. They are not bundled; what they said of every held-out answer is
                    (`minis.glm53.heldout`), and its row is left out for a checkpoint of other parameters
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from minis.glm53 import heldout
from tidectl.evals.texts import Text, read
from tided.errors import TideError
from tided.profile import load

TRAINED = Path(__file__).parents[1] / "minis/results/glm/trained.json"
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


def by_training(path: Path, texts: dict[str, list[Text]], found: heldout.Trained) -> list[Answer]:
    whole = {
        (text.row, text.prompt_tokens): text for of_domain in read(path, MOST_TOKENS).values() for text in of_domain
    }
    answers = []
    for text in (text for of_domain in texts.values() for text in of_domain):
        scored = found.of(whole[text.row, text.prompt_tokens], text.answer_tokens)
        hits = [place not in scored.unlikely for place in range(text.answer_tokens)]
        answers.append(Answer(text.domain, losses=scored.losses, hits=hits))
    return answers


def by_engine(settings: Any, held: float, variant: Variant, texts: dict[str, list[Text]]) -> list[Answer]:
    with serving(settings, held, variant) as server:
        return [server.answer(text) for of_domain in texts.values() for text in of_domain]


def row(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    losses = losses_of(answers)
    domains = {domain: round(sum(each) / len(each), 4) for domain, each in losses.items()}
    found: dict[str, Any] = {"row": name, "loss": domains, "mean": round(sum(domains.values()) / len(domains), 4)}
    hits = [hit for answer in answers for hit in answer.hits]
    found["top1"] = round(sum(hits) / len(hits), 4)
    seen = [part for answer in answers for part in answer.seen]
    if weight := sum(part.weight for part in seen):
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
    found = heldout.read_trained(options.trained)
    if found.checkpoint == heldout.mark(path):
        yield row("trained", by_training(path, texts, found))
    else:
        print(f"trained: {options.trained} is of other parameters than {path}", file=sys.stderr)
    runs = (("as stored", 100.0, FROZEN), *((one.name, options.held, one) for one in (FROZEN, READS, EXACT)))
    whole: list[str] = []
    for name, held, variant in runs:
        answers = by_engine(settings, held, variant, texts)
        found = row(name, answers)
        digests = found.pop("digests")
        whole = whole or digests
        yield found | {"answers": len(digests), "equal": sum(a == b for a, b in zip(digests, whole, strict=True))}


def show(found: dict[str, Any], first: bool) -> None:
    if first:
        print("| | " + " | ".join((*found["loss"], "mean", "top-1", "missed", "equal to as stored")) + " |")
        print("|---" * (len(found["loss"]) + 5) + "|")
    cells = [f"{loss:.4f}" for loss in (*found["loss"].values(), found["mean"])]
    cells.append(f"{found['top1']:.1%}")
    if "missed" in found:
        cells += [f"{found['missed']:.1%}", f"{found['equal']} of {found['answers']}"]
    else:
        cells += ["", ""]
    print(f"| {found['row']} | " + " | ".join(cells) + " |", flush=True)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", default=Path(__file__).parents[1] / "profiles/mini-glm.toml")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="what `minis.glm53.heldout` wrote")
    parser.add_argument("--held", type=float, default=67.0, help="percent of the experts' bytes")
    parser.add_argument("--tokens", type=int, default=48, help="of answers, a domain")
    parser.add_argument("--longest", type=int, default=24, help="tokens of an answer; the rest of it is left out")
    parser.add_argument("--domains", default="", help="default: all")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    options = arguments(given)
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
