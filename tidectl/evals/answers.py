"""Free answers, looked at for degeneration: whether they repeat themselves, go round in circles, leave tags open."""

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidectl import http
from tidectl.evals.targets import Server
from tidectl.waiting import Item, Show
from tided.engine.types import Fidelity
from tided.errors import TideError

PROMPTS = (
    "Write a long story about a lighthouse keeper who finds a message in a bottle.",
    "Explain, step by step and with examples, how a hash table works.",
    "Write an HTML page with a table of the planets, their diameters and their moons.",
    "Write a Python module with a class for matrices: addition, product, transpose, and tests.",
    "List the countries of Europe with their capitals as a JSON array of objects.",
    "Describe a week in the life of a harbour, day by day.",
)
TEMPERATURE = 0.6
NGRAMS = (1, 2, 3, 4)
WORDS = re.compile(r"\w+|[^\w\s]")
TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)\b[^<>]*?(/?)>")
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}  # HTML has no end of these
CODE = re.compile(r"^(`{3,}|~{3,})", re.MULTILINE)
LEAST_REPEATS, LONGEST_CYCLE = 8, 64  # words


class Look(NamedTuple):
    """One answer. `distinct`: of its n-grams of words, the share that occurs once or for the first time; `loops`: its
    end repeats itself; `open_`: tags and code blocks that are not balanced, of an answer that ended by itself."""

    distinct: dict[int, float]
    loops: bool
    open_: list[str]


class Checks(NamedTuple):
    rows: list[dict[str, Any]]
    temperature: float
    seed: int

    def report(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "rows": self.rows}


def check_answers(
    server: Server, fidelities: Sequence[Fidelity], count: int, tokens: int, seed: int, progress: Show
) -> Checks:
    """The same prompts and seeds in every fidelity."""
    rows = []
    for fidelity in fidelities:
        looks, told = [], []
        for at in range(count):
            progress([Item(f"answers, {fidelity}", f"{at + 1} of {count}", done=at, total=count)])
            answer = _ask(server, PROMPTS[at % len(PROMPTS)], fidelity, tokens, seed + at)
            choice = answer["choices"][0]
            message = choice["message"]
            text = (message.get("reasoning_content") or "") + "\n" + (message.get("content") or "")
            ended = choice["finish_reason"] == "stop"
            looped = bool((answer.get("x_engine_stats") or {}).get("loop_break"))
            found = look(text, ended and not looped)
            looks.append(found._replace(loops=found.loops or looped))
            told.append((answer["usage"]["completion_tokens"], ended and not looped))
        rows.append(
            {
                "fidelity": fidelity,
                "answers": count,
                "tokens": sum(one for one, _ in told),
                "distinct": {str(n): statistics.fmean(one.distinct[n] for one in looks) for n in NGRAMS},
                "loops": sum(one.loops for one in looks),
                "unbalanced": sum(bool(one.open_) for one in looks),
                "ended": sum(ended for _, ended in told),
            }
        )
    return Checks(rows, TEMPERATURE, seed)


def _ask(server: Server, prompt: str, fidelity: Fidelity, tokens: int, seed: int) -> Any:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": min(tokens, server.context_tokens - 512),
        "temperature": TEMPERATURE,
        "seed": seed,
        "fidelity": fidelity,
    }
    found = http.answer(server.url, server.key, body)
    if not isinstance(found, dict) or not found.get("choices"):
        raise TideError("the server gave no answer", where=server.url)
    return found


def look(text: str, ended: bool) -> Look:
    words = WORDS.findall(text)
    return Look({n: distinct(words, n) for n in NGRAMS}, repeats(words), unbalanced(text) if ended else [])


def distinct(words: Sequence[str], n: int) -> float:
    """Of all n-grams, the share of different ones; 1 where there is none."""
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repeats(words: Sequence[str]) -> bool:
    """Whether the end is a cycle of up to `LONGEST_CYCLE` words that came `LEAST_REPEATS` times in a row."""
    for size in range(1, LONGEST_CYCLE + 1):
        tail = words[-size * LEAST_REPEATS :]
        if len(tail) == size * LEAST_REPEATS and all(tail[at] == tail[at % size] for at in range(len(tail))):
            return True
    return False


def unbalanced(text: str) -> list[str]:
    """Names of tags that are opened and not closed, or closed and not opened, and "```" for a code block without an
    end. What stands in lines of code counts like text: HTML is written there."""
    found: list[str] = []
    open_: list[str] = []
    for closes, name, alone in TAG.findall(text):
        if alone or name.lower() in VOID:
            continue
        if not closes:
            open_.append(name)
        elif name in open_:
            while (last := open_.pop()) != name:
                found.append(last)
        else:
            found.append(name)
    fences = len(CODE.findall(text))
    return found + open_ + (["```"] if fences % 2 else [])
