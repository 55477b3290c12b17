"""Which texts of a file are scored: so many of each domain, drawn by a seed, and what is told where there are fewer."""

import random
from typing import Any, NamedTuple

from tidectl.evals.texts import Text


class Drawn(NamedTuple):
    """Of a domain. `too_long`: texts that were left out because their prompt alone is."""

    texts: list[Text]
    too_long: int

    def as_data(self) -> dict[str, Any]:
        return {"texts": len(self.texts), "too_long": self.too_long}


def draw(found: dict[str, list[Text]], wanted: int, most_tokens: int, seed: int) -> dict[str, Drawn]:
    """By domain, those without a text too. Longer texts lose their end, longer prompts are left out."""
    rng, drawn = random.Random(seed), {}
    for domain, texts in found.items():
        fitting = [text.cut(most_tokens - text.prompt_tokens) for text in texts if text.prompt_tokens < most_tokens]
        drawn[domain] = Drawn(rng.sample(fitting, min(wanted, len(fitting))), len(texts) - len(fitting))
    return drawn


def shortages(drawn: dict[str, Drawn], wanted: int, most_tokens: int) -> list[str]:
    """A line for each domain that has fewer texts than were wanted: its figures are of those, or there are none."""
    return [
        f"{domain}: {_count(one, wanted)} ({_why(one, most_tokens)})"
        for domain, one in drawn.items()
        if len(one.texts) < wanted
    ]


def _count(one: Drawn, wanted: int) -> str:
    return f"{len(one.texts)} of {wanted} texts" if one.texts else "no text, so it is in no figure"


def _why(one: Drawn, most_tokens: int) -> str:
    if one.too_long:
        return f"left out, with prompts of {most_tokens} tokens and more: {one.too_long}; see --longest"
    return "the file has no more" if one.texts else "no line of it has an answer"
