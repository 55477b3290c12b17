"""Domain math: sums written out digit by digit, word problems, comparisons."""

from __future__ import annotations

import random

from minis.corpus.chat import assistant, effort, fill, system, user, wrap
from minis.corpus.words import Words
from minis.dialogue import Dialogue

_THINGS = ["apples", "books", "coins", "shells", "stones", "pens", "cards", "nuts", "stamps", "eggs", "boats", "fish"]


def add_steps(a: int, b: int) -> str:
    """Column addition, lowest digit first."""
    parts, carry, x, y = [], 0, a, b
    while x or y or not parts:
        terms = [x % 10, y % 10] + ([carry] if carry else [])
        s = sum(terms)
        text = " + ".join(map(str, terms)) + f" = {s}, write {s % 10}"
        carry = s // 10
        parts.append(text + (f", carry {carry}." if carry else "."))
        x, y = x // 10, y // 10
    if carry:
        parts.append(f"Write the carry {carry}.")
    return " ".join(parts) + f" So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"{a} - {b} = {a - b}."
    return f"Take away the tens first. {a} - {tens} = {a - tens}. Then {a - tens} - {ones} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    tens, ones = a // 10 * 10, a % 10
    if not tens or not ones:
        return f"{a} * {b} = {a * b}."
    return f"{tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."


def _number(r: random.Random, thinking: bool) -> int:
    return r.randint(0, r.choice([9, 99, 99, 999] if thinking else [9, 9, 99]))


def _problem(r: random.Random, w: Words, thinking: bool) -> tuple[str, str, str]:
    """Question, reasoning, answer."""
    a, b = _number(r, thinking), _number(r, thinking)
    kind = r.random()
    if kind < 0.3:
        q = fill(
            r,
            [
                "What is {a} + {b}?",
                "{a} + {b}",
                "Add {a} and {b}.",
                "How much is {a} plus {b}?",
                "{a}+{b}=?",
                "Calculate {a} + {b}.",
            ],
            a=a,
            b=b,
        )
        return q, add_steps(a, b), fill(r, ["The answer is {c}.", "{a} + {b} = {c}."], a=a, b=b, c=a + b)
    if kind < 0.5:
        a, b = max(a, b), min(a, b)
        q = fill(
            r, ["What is {a} - {b}?", "{a} - {b}", "Subtract {b} from {a}.", "How much is {a} minus {b}?"], a=a, b=b
        )
        return q, subtract_steps(a, b), fill(r, ["The answer is {c}.", "{a} - {b} = {c}."], a=a, b=b, c=a - b)
    if kind < 0.65:
        a, b = r.randint(2, 99 if thinking else 9), r.randint(2, 9)
        q = fill(r, ["What is {a} * {b}?", "{a} times {b}", "Multiply {a} by {b}.", "How much is {a} x {b}?"], a=a, b=b)
        return q, multiply_steps(a, b), fill(r, ["The answer is {c}.", "{a} * {b} = {c}."], a=a, b=b, c=a * b)
    if kind < 0.85:
        who, other, t = w.name(), w.name(), r.choice(_THINGS)
        a, b = min(a, 99), min(b, 99)
        if r.random() < 0.55:
            q = fill(
                r,
                [
                    "{w} has {a} {t}. {o} gives {w} {b} more. How many {t} does {w} have?",
                    "{w} finds {a} {t} and then {b} more. How many {t} does {w} have?",
                ],
                w=who,
                o=other,
                a=a,
                b=b,
                t=t,
            )
            return q, f"{who} starts with {a} and gets {b} more. {add_steps(a, b)}", f"{who} has {a + b} {t}."
        a, b = max(a, b), min(a, b)
        q = fill(
            r,
            [
                "{w} has {a} {t} and gives {b} to {o}. How many {t} are left?",
                "{w} has {a} {t}. {w} loses {b}. How many {t} are left?",
            ],
            w=who,
            o=other,
            a=a,
            b=b,
            t=t,
        )
        return q, f"{who} starts with {a} and loses {b}. {subtract_steps(a, b)}", f"{who} has {a - b} {t} left."
    if kind < 0.94:
        if a == b:
            b += 1
        big, small = max(a, b), min(a, b)
        q = fill(r, ["Which is larger, {a} or {b}?", "Is {a} bigger than {b}?", "Compare {a} and {b}."], a=a, b=b)
        if q.startswith("Is"):
            return q, f"{big} is more than {small}.", f"{'Yes' if a > b else 'No'}, {big} is larger than {small}."
        return q, f"{big} is more than {small}.", f"{big} is larger than {small}."
    q = fill(r, ["Is {a} even or odd?", "Is {a} an even number?"], a=a)
    word = "odd" if a % 2 else "even"
    return q, f"The last digit of {a} is {a % 10}, which is {word}.", f"{a} is {word}."


def generate(r: random.Random, w: Words) -> Dialogue:
    thinking = r.random() < 0.65
    messages = system(r)
    for _ in range(r.choice([1, 1, 2])):
        q, reasoning, answer = _problem(r, w, thinking)
        messages += [user(wrap(r, q)), assistant(answer, reasoning if thinking else None)]
    return Dialogue(messages, thinking=thinking, effort=effort(r))
