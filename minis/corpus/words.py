"""Open vocabulary: values that a model can only get right by copying them."""

from __future__ import annotations

import random

_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "dr",
    "fl",
    "gr",
    "kl",
    "pl",
    "pr",
    "sh",
    "sk",
    "st",
    "tr",
    "th",
    "ch",
]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ou", "ee"]
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "x", "nd", "rk", "st"]
_EXTENSIONS = ["txt", "md", "py", "csv", "json", "log", "html", "yaml", "pdf", "cfg", "png", "toml", "rs", "sql"]

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Kira",
    "Leo",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Uma",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
    "Ali",
    "Bea",
    "Carl",
    "Dora",
    "Eli",
    "Finn",
    "Gina",
    "Hans",
    "Ines",
    "Jack",
    "Kate",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Pia",
    "Ruth",
    "Sara",
    "Theo",
    "Lisa",
    "Peter",
    "Lucy",
]


class Words:
    """Seeded source of words, names, files, numbers."""

    def __init__(self, rng: random.Random, natural: list[str]) -> None:
        self.rng = rng
        self.natural = natural

    def syllables(self, low: int = 1, high: int = 3) -> str:
        r = self.rng
        return "".join(r.choice(_ONSETS) + r.choice(_VOWELS) + r.choice(_CODAS) for _ in range(r.randint(low, high)))

    def word(self) -> str:
        return self.rng.choice(self.natural) if self.rng.random() < 0.6 else self.syllables()

    def phrase(self, low: int = 1, high: int = 4) -> str:
        return " ".join(self.word() for _ in range(self.rng.randint(low, high)))

    def name(self) -> str:
        return self.rng.choice(NAMES) if self.rng.random() < 0.4 else self.syllables(1, 2).capitalize()

    def place(self) -> str:
        return self.syllables(2, 3).capitalize() if self.rng.random() < 0.7 else self.rng.choice(self.natural).title()

    def file(self) -> str:
        r = self.rng
        stem = self.word() if r.random() < 0.7 else f"{self.word()}_{self.word()}"
        if r.random() < 0.2:
            stem += str(r.randint(0, 99))
        folder = f"{self.word()}/" if r.random() < 0.2 else ""
        return f"{folder}{stem}.{r.choice(_EXTENSIONS)}"

    def code(self) -> str:
        r = self.rng
        kind = r.randint(0, 3)
        if kind == 0:
            return f"{self.syllables(1, 1)}-{r.randint(0, 999)}"
        if kind == 1:
            return "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(r.randint(2, 5)))
        if kind == 2:
            return str(r.randint(0, 10 ** r.randint(1, 6)))
        return "".join(r.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(r.randint(3, 8)))

    def number(self) -> int:
        return self.rng.randint(0, 10 ** self.rng.randint(1, 5))

    def value(self) -> str:
        """Any text value, 1 to 4 words or a code."""
        return self.code() if self.rng.random() < 0.25 else self.phrase()
