"""Domain codechat: small Python functions and exact work on strings and lists."""
# ruff: noqa: E501  (tables of sentences and programs read better unbroken)

from __future__ import annotations

import random

from minis.corpus.chat import fill, turns
from minis.corpus.words import Words
from minis.dialogue import Dialogue

# what the function does | code
FUNCTIONS = [
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    (
        "checks whether a number is prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True",
    ),
    (
        "computes the factorial of a number",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "returns the n-th Fibonacci number",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("checks whether a word is a palindrome", "def is_palindrome(word):\n    return word == word[::-1]"),
    ("counts the vowels in a text", 'def count_vowels(text):\n    return sum(1 for c in text if c in "aeiou")'),
    ("counts the words in a text", "def count_words(text):\n    return len(text.split())"),
    (
        "returns the largest number of a list",
        "def largest(numbers):\n    best = numbers[0]\n    for n in numbers:\n        if n > best:\n            best = n\n    return best",
    ),
    (
        "returns the smallest number of a list",
        "def smallest(numbers):\n    best = numbers[0]\n    for n in numbers:\n        if n < best:\n            best = n\n    return best",
    ),
    (
        "sums a list of numbers",
        "def total(numbers):\n    result = 0\n    for n in numbers:\n        result += n\n    return result",
    ),
    ("computes the mean of a list", "def mean(numbers):\n    return sum(numbers) / len(numbers)"),
    (
        "removes duplicates from a list",
        "def unique(items):\n    seen = []\n    for item in items:\n        if item not in seen:\n            seen.append(item)\n    return seen",
    ),
    ("reads a file", "def read_file(path):\n    with open(path) as f:\n        return f.read()"),
    ("writes text to a file", 'def write_file(path, text):\n    with open(path, "w") as f:\n        f.write(text)'),
    ("computes the greatest common divisor", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("converts Celsius to Fahrenheit", "def to_fahrenheit(c):\n    return c * 9 / 5 + 32"),
    (
        "sorts a list of numbers",
        "def sort(numbers):\n    result = list(numbers)\n    for i in range(len(result)):\n        for j in range(i + 1, len(result)):\n            if result[j] < result[i]:\n                result[i], result[j] = result[j], result[i]\n    return result",
    ),
    ("counts how often an item is in a list", "def count(items, item):\n    return sum(1 for x in items if x == item)"),
    ("squares every number of a list", "def squares(numbers):\n    return [n * n for n in numbers]"),
]


def _function(r: random.Random) -> tuple[str, str]:
    what, code = r.choice(FUNCTIONS)
    q = fill(
        r,
        [
            "Write a Python function that {w}.",
            "Can you write a function that {w}?",
            "I need Python code that {w}.",
            "Show me a function that {w}.",
        ],
        w=what,
    )
    head = r.choice(["This function does it:", f"Here is a function that {what}:"])
    return q, f"{head}\n\n```python\n{code}\n```"


def _strings(r: random.Random, w: Words) -> tuple[str, str]:
    word = w.syllables(1, 2) if r.random() < 0.5 else w.word()
    kind = r.randint(0, 6)
    if kind == 0:
        return fill(r, ["Reverse the word {x}.", "Write {x} backwards.", "What is {x} reversed?"], x=word), word[::-1]
    if kind == 1:
        return fill(r, ["Spell the word {x}.", "Spell {x}.", "How is {x} spelled?"], x=word), "-".join(word)
    if kind == 2:
        return fill(r, ["Write {x} in upper case.", "Make {x} upper case."], x=word), word.upper()
    if kind == 3:
        return fill(
            r, ["How many letters has {x}?", "How long is the word {x}?"], x=word
        ), f"{'-'.join(word)} has {len(word)} letters."
    if kind == 4:
        return fill(
            r, ["What is the first letter of {x}?", "With which letter does {x} begin?"], x=word
        ), f"The first letter of {word} is {word[0]}."
    if kind == 5:
        return fill(
            r, ["What is the last letter of {x}?", "With which letter does {x} end?"], x=word
        ), f"The last letter of {word} is {word[-1]}."
    a, b = w.word(), w.syllables()
    return fill(r, ["Join {a} and {b} with a dash.", "Put a dash between {a} and {b}."], a=a, b=b), f"{a}-{b}"


def _lists(r: random.Random, w: Words) -> tuple[str, str]:
    items = [r.randint(0, 99) for _ in range(r.randint(3, 6))]
    words = [w.word() for _ in range(r.randint(3, 5))]
    kind = r.randint(0, 5)
    if kind == 0:
        return fill(
            r, ["Sort these numbers: {x}.", "Sort {x}.", "Put in order: {x}"], x=", ".join(map(str, items))
        ), ", ".join(map(str, sorted(items)))
    if kind == 1:
        i = r.randrange(len(words))
        nth = ["first", "second", "third", "fourth", "fifth"][i]
        return f"What is the {nth} word in the list {', '.join(words)}?", f"The {nth} word is {words[i]}."
    if kind == 2:
        return f"Which number is the largest: {', '.join(map(str, items))}?", f"The largest number is {max(items)}."
    if kind == 3:
        return f"What does len([{', '.join(map(str, items))}]) return?", f"It returns {len(items)}."
    if kind == 4:
        return f"Write {', '.join(words)} as a Python list.", "[" + ", ".join(f'"{x}"' for x in words) + "]"
    return f"List these words backwards: {', '.join(words)}.", ", ".join(words[::-1])


def generate(r: random.Random, w: Words) -> Dialogue:
    pairs = []
    for _ in range(r.choice([1, 1, 2, 3])):
        x = r.random()
        pairs.append(_function(r) if x < 0.35 else _strings(r, w) if x < 0.72 else _lists(r, w))
    return turns(r, pairs)
