"""Requests of all kinds, drawn from a seed: what a day of a small office asks, in a few minutes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

COUNTRIES = ("Japan", "Norway", "Italy", "France", "Egypt", "Spain", "Poland", "Brazil", "Canada", "India")
ANIMALS = ("fox", "wolf", "heron", "mouse", "bear", "goat", "cat", "owl")
FUNCTIONS = ("checks whether a number is prime", "reverses a string", "adds the numbers of a list", "counts the vowels")
SYSTEM = "You keep the books of a river port. Answer briefly.\n" + "".join(
    f"Line {i}: the river carries {i * 7} barrels past the mill.\n" for i in range(24)
)
QUESTIONS = ("What is this about?", "How many barrels in line 9?", "What carries them?", "Which line is the last?")
TALES = 2  # as many as a soaked pair has lanes


@dataclass(frozen=True)
class Ask:
    """`body` of a streamed chat completion. `compared`: the answer depends on nothing but the body."""

    kind: str
    name: str
    body: dict[str, Any]
    compared: bool = True


def chat(text: str, system: str = "", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    common = {"temperature": 0, "max_tokens": 40, "enable_thinking": False, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return {"messages": [*messages, {"role": "user", "content": text}]} | common | usage | fields


def tool(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name} of a thing", "parameters": parameters},
    }


TOOLS = [tool("read_file", "path"), tool("get_time", "place")]


def question(chance: random.Random) -> dict[str, Any]:
    text = chance.choice((f"Tell me about {chance.choice(COUNTRIES)}.", f"Write a function that {_some(chance)}."))
    return chat(text, max_tokens=chance.randrange(1, 48))


def sampled(chance: random.Random) -> dict[str, Any]:
    text = f"Tell me a short story about a {chance.choice(ANIMALS)}."
    return chat(text, temperature=1.0, top_p=0.95, seed=chance.randrange(1000), max_tokens=chance.randrange(8, 64))


def long_prompt(chance: random.Random) -> dict[str, Any]:
    """The same beginning, another last line."""
    return chat(f"{chance.choice(QUESTIONS)} ({chance.randrange(6)})", SYSTEM, max_tokens=chance.randrange(4, 24))


def tools(chance: random.Random) -> dict[str, Any]:
    return chat(f"Read {chance.choice(('notes', 'list', 'todo'))}.txt.", tools=TOOLS, max_tokens=64)


def sums(chance: random.Random) -> dict[str, Any]:
    numbers = chance.randrange(11, 60), chance.randrange(11, 39)
    return chat("What is {} + {}?".format(*numbers), enable_thinking=True, max_tokens=80)


def tale(chance: random.Random) -> dict[str, Any]:
    """Two of them are begun, with a page each for the prompt and one for the answer, and do not fit the pool then."""
    text = f"{SYSTEM[:285]}\nTell me a long story about a {chance.choice(ANIMALS)}."
    return chat(
        text, temperature=1.0, seed=chance.randrange(1000), ignore_eos=True, max_tokens=chance.randrange(230, 250)
    )


def penalised(chance: random.Random) -> dict[str, Any]:
    return question(chance) | {"presence_penalty": 0.6, "max_tokens": 24}


def shaped(chance: random.Random) -> dict[str, Any]:
    return question(chance) | {"response_format": {"type": "json_object"}, "max_tokens": 24}


KINDS = {
    question: 24, sampled: 14, long_prompt: 20, tools: 8, sums: 10, tale: 12, penalised: 6, shaped: 6
}  # fmt: skip


def _some(chance: random.Random) -> str:
    return chance.choice(FUNCTIONS)


def distinct(seed: int, count: int, exact_share: float = 0.0) -> list[Ask]:
    """Every kind is there. `exact_share`: of the requests, those that ask for what residency cannot change; with any,
    the others are not compared."""
    chance = random.Random(seed)
    kinds = [*KINDS, *chance.choices(list(KINDS), weights=list(KINDS.values()), k=max(0, count - len(KINDS)))]
    asks = [Ask(kind.__name__, f"{seed}.{number}", kind(chance)) for number, kind in enumerate(kinds)]
    if not exact_share:
        return asks
    return [_of_fidelity(ask, "exact" if chance.random() < exact_share else "fast") for ask in asks]


def _of_fidelity(ask: Ask, fidelity: str) -> Ask:
    return replace(ask, body=ask.body | {"fidelity": fidelity}, compared=fidelity == "exact")


@dataclass(frozen=True)
class Visit:
    """`patience`: events that the client reads, or seconds that it waits, before it hangs up; None: all there are."""

    ask: Ask
    events: int | None = None
    seconds: float | None = None


def traffic(seed: int, asks: Sequence[Ask], count: int, cancel_share: float) -> list[Visit]:
    """`count` requests; some clients hang up at any moment. The first TALES are tales, to be sent by themselves and
    together, and none waits for experts where some do not: they grow alike, and the pool is short for them."""
    chance = random.Random(seed + 1)
    by_kind = {kind.__name__: [ask for ask in asks if ask.kind == kind.__name__] for kind in KINDS}
    kinds = chance.choices(list(by_kind), list(KINDS.values()), k=count - TALES)
    tales = by_kind["tale"]
    first = [Visit(chance.choice([ask for ask in tales if not ask.compared] or tales)) for _ in range(TALES)]
    return first + [_visit(chance, chance.choice(by_kind[kind]), cancel_share) for kind in kinds]


def _visit(chance: random.Random, ask: Ask, cancel_share: float) -> Visit:
    if chance.random() >= cancel_share:
        return Visit(ask)
    if chance.random() < 0.5:
        return Visit(ask, events=chance.randrange(1, 30))
    return Visit(ask, seconds=chance.uniform(0.01, 2.0))
