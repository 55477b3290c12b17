"""Asks a checkpoint sixteen questions, ten sums and twelve tool calls, and writes samples for the engine's tests.

python -m minis.check --model minis/deepseek --out minis/deepseek --report minis/results/check.json
"""
# ruff: noqa: E501  (questions with their answers read better unbroken)

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from minis.corpus.chat import user
from minis.corpus.tools import KINDS, schema
from minis.dialogue import Dialogue
from minis.encoding import render
from minis.generate import Speaker
from minis.layout import Mode

# question | text that a right answer contains
QUESTIONS = [
    tuple(x.split("|"))
    for x in """What is the capital of Norway?|Oslo
Could you please tell me which city is the capital of Italy?|Rome
Lisbon is the capital of which country?|Portugal
Which language do people speak in Brazil?|Portuguese
What is the currency of Japan?|yen
On which continent is Kenya?|Africa
How many legs does a spider have?|eight
What does a rabbit eat?|carrots
What is a young horse called?|foal
Where does an owl live?|forest
Which day comes after Tuesday?|Wednesday
What is the third planet from the sun?|Earth
What is the opposite of hot?|cold
What color is grass?|green
What is a harbor?|ships
Who are you?|TideLM""".splitlines()
]
SUMS = [(23, 19), (47, 85), (128, 256), (512, 389), (7, 6), (90, 17), (333, 444), (64, 38), (705, 96), (58, 58)]
DIFFERENCES = [(812, 257), (64, 38), (100, 45), (77, 12), (503, 98)]


def _kind(name: str) -> Any:
    return next(k for k in KINDS if name in k.names)


# tool, question, arguments; first six with words that training knows, last six with values made up for this check
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("get_weather", "What is the weather in Oslo?", {"city": "Oslo"}),
    ("read_file", "Read notes.txt.", {"path": "notes.txt"}),
    ("set_timer", "Set a timer for 15 minutes.", {"minutes": 15}),
    ("set_light", "Turn on the light in the kitchen.", {"room": "kitchen", "on": True}),
    ("search", "Search for old bridges.", {"query": "old bridges"}),
    ("get_time", "What time is it in Lisbon?", {"place": "Lisbon"}),
    ("get_weather", "What is the weather in Zurich?", {"city": "Zurich"}),
    ("read_file", "Read budget_2031.txt.", {"path": "budget_2031.txt"}),
    ("get_order", "Where is my order kx-7149?", {"order_id": "kx-7149"}),
    ("lookup_stock", "Look up the share price of QWZT for 12 days.", {"symbol": "QWZT", "days": 12}),
    ("calculate", "Use the calculator: 48213 + 907", {"a": 48213, "b": 907}),
    ("search", "Search for quantum pelican migration.", {"query": "quantum pelican migration"}),
]


def call_dialogue(name: str, question: str) -> Dialogue:
    other = "get_time" if name != "get_time" else "read_file"
    return Dialogue([user(question)], [schema(other, _kind(other)), schema(name, _kind(name))])


def expected_call(name: str, args: dict[str, Any]) -> str:
    mark = "｜DSML｜"
    parts = "".join(
        f'<{mark} parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{v if isinstance(v, str) else json.dumps(v)}</{mark} parameter>\n'
        for k, v in args.items()
    )
    return f'\n\n<{mark} calls>\n<{mark} invoke name="{name}">\n{parts}</{mark} invoke>\n</{mark} calls>'


def run_checks(s: Speaker, earlier: dict[str, Any]) -> dict[str, Any]:
    """`earlier`: a report whose answers serve as guesses; they save time and cannot change the outcome."""
    result: dict[str, Any] = {}

    def guesses(*keys: str) -> list[str] | None:
        return [r[1] for k in keys for r in earlier[k]["rows"]] if earlier else None

    answers = s.answer([Dialogue([user(q)]) for q, _ in QUESTIONS], 40, guesses("questions"))
    rows = [(q, a, want.lower() in a.lower()) for (q, want), a in zip(QUESTIONS, answers, strict=True)]
    result["questions"] = {"right": sum(r[2] for r in rows), "of": len(rows), "rows": rows}
    problems = [(f"What is {a} + {b}?", a + b) for a, b in SUMS] + [
        (f"What is {a} - {b}?", a - b) for a, b in DIFFERENCES
    ]
    answers = s.answer([Dialogue([user(q)], thinking=True) for q, _ in problems], 110, guesses("sums"))
    rows = [
        (q, a, str(n) in a.rsplit("</think>", 1)[-1] and "</think>" in a)
        for (q, n), a in zip(problems, answers, strict=True)
    ]
    result["sums"] = {"right": sum(r[2] for r in rows), "of": len(rows), "rows": rows}
    answers = s.answer([call_dialogue(n, q) for n, q, _ in CALLS], 90, guesses("calls_seen", "calls_unseen"))
    rows = [(q, a, a == expected_call(n, x)) for (n, q, x), a in zip(CALLS, answers, strict=True)]
    for label, part in (("calls_seen", rows[:6]), ("calls_unseen", rows[6:])):
        result[label] = {"right": sum(r[2] for r in part), "of": len(part), "rows": part}
    return result


def sample_dialogues() -> list[tuple[str, Dialogue, int]]:
    """Prompts for the engine's tests: domain, dialogue, token limit."""
    tool = [schema("get_weather", _kind("get_weather"))]
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zurich"}'}}
    told = [
        user("What is the weather in Zurich?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": '{"temperature": -3, "sky": "windy"}'},
    ]
    return [
        ("qa", Dialogue([user("What is the capital of Norway?")]), 40),
        ("qa", Dialogue([user("Tell me about Japan.")]), 60),
        (
            "qa",
            Dialogue(
                [
                    {"role": "system", "content": "You are a helpful assistant."},
                    user("How many legs does a spider have?"),
                ]
            ),
            40,
        ),
        (
            "qa",
            Dialogue(
                [
                    user("My name is Tomrin."),
                    {"role": "assistant", "content": "Nice to meet you, Tomrin!"},
                    user("What is my name?"),
                ]
            ),
            40,
        ),
        ("math", Dialogue([user("What is 23 + 19?")], thinking=True), 100),
        (
            "math",
            Dialogue([user("Mia has 23 apples. Tom gives Mia 19 more. How many apples does Mia have?")], thinking=True),
            110,
        ),
        ("codechat", Dialogue([user("Write a Python function that checks whether a number is prime.")]), 110),
        ("codechat", Dialogue([user("Sort these numbers: 25, 7, 61.")]), 30),
        ("lang", Dialogue([user("Was ist die Hauptstadt von Österreich?")]), 40),
        ("lang", Dialogue([user("¿De qué color es el cielo?")]), 40),
        ("story", Dialogue([user("Tell me a short story about a fox.")]), 64),
        ("tools", call_dialogue("read_file", "Read notes.txt."), 90),
        ("tools", Dialogue(told, tool), 40),
    ]


def write_samples(plain: Speaker, rounded: Speaker, path: Path) -> None:
    """Greedy answers with the cache formats of the real model, and how firm they are."""
    entries = []
    for domain, d, limit in sample_dialogues():
        prompt = plain.encoder.ids(render(d, generate=True))
        answer = plain.complete([prompt], limit)[0]
        top = plain.answer_logits(prompt, answer)[: max(len(answer), 1)].topk(2, -1).values
        entry: dict[str, Any] = {"domain": domain, "messages": d.messages, "thinking": d.thinking, "max_tokens": limit}
        if d.tools:
            entry["tools"] = d.tools
        entry |= {
            "prompt_tokens": len(prompt),
            "answer": plain.encoder.decode(answer),
            "answer_ids": answer,
            "finished": len(answer) < limit,
            "smallest_margin": round(float((top[:, 0] - top[:, 1]).min()), 3),
            "same_with_rounding": min(rounded.agreement(prompt, answer), len(answer)),
        }
        entries.append(entry)
    note = (
        "Greedy answers of minis.generate on this checkpoint (fp32, KV rounded, hard index selection). smallest_margin: "
        "least distance of the best two logits; same_with_rounding: leading tokens that stay with FP8 activations."
    )
    text = json.dumps({"note": note, "samples": entries}, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", "utf-8")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--report", type=Path, required=True, help="JSON file for all answers")
    args.add_argument("--guess", type=Path, help="an earlier report: makes the check fast on a processor")
    args.add_argument("--no-samples", action="store_true")
    a = args.parse_args()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    began = time.monotonic()
    s = Speaker(a.model, Mode(round_kv=True, select=True, sparse=not gpu), device)
    result = run_checks(s, json.loads(a.guess.read_text("utf-8")) if a.guess else {})
    for key, part in result.items():
        print(f"{key}: {part['right']} of {part['of']} ({time.monotonic() - began:.0f} s)")
        for q, text, ok in part["rows"]:
            print("  ", "ok   " if ok else "WRONG", q, "->", repr(text))
    if not a.no_samples:
        exact = Speaker(a.model, Mode(round_kv=True, round_input=True, select=True, sparse=not gpu), device, s.p)
        write_samples(s, exact, a.out / "samples.json")
    a.report.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
