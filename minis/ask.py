"""The questions of `minis.check`, put to a running server over its API: any mini, as its clients see it.

tidectl start mini-glm
python -m minis.ask --url http://127.0.0.1:8000 --report minis/results/glm/check.json
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from minis.check import CALLS, DIFFERENCES, QUESTIONS, SUMS, call_dialogue
from minis.dialogue import Dialogue, Message

TIMEOUT_S = 120
STORIES = ("Tell me a short story about a fox.", "Tell me about Japan.", "¿De qué color es el cielo?")


def ask(url: str, d: Dialogue, limit: int, **fields: Any) -> Message:
    """The greedy answer as a message of the chat completions API."""
    body = {"messages": d.messages, "max_tokens": limit, "temperature": 0, "enable_thinking": d.thinking, **fields}
    body |= {"tools": d.tools} if d.tools else {}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        message: Message = json.load(reply)["choices"][0]["message"]
    return message


def called(message: Message) -> tuple[str, Any] | None:
    """Name and arguments of the only call, None where there is another number of them."""
    calls = message.get("tool_calls") or []
    return (calls[0]["function"]["name"], json.loads(calls[0]["function"]["arguments"])) if len(calls) == 1 else None


def told(message: Message) -> str:
    """All of a message in one line."""
    reasoning = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
    calls = [c["function"] for c in message.get("tool_calls") or []]
    return reasoning + (message.get("content") or "") + "".join(f" [{c['name']} {c['arguments']}]" for c in calls)


def question(text: str) -> Dialogue:
    return Dialogue([{"role": "user", "content": text}])


def run(url: str, **fields: Any) -> dict[str, Any]:
    parts: dict[str, list[tuple[str, str, bool]]] = {}
    for q, wanted in QUESTIONS:
        m = ask(url, question(q), 60, **fields)
        parts.setdefault("questions", []).append((q, told(m), wanted.lower() in (m.get("content") or "").lower()))
    sums = [(f"What is {a} + {b}?", a + b) for a, b in SUMS] + [(f"What is {a} - {b}?", a - b) for a, b in DIFFERENCES]
    for q, value in sums:
        m = ask(url, Dialogue(question(q).messages, thinking=True), 160, **fields)
        parts.setdefault("sums", []).append((q, told(m), str(value) in (m.get("content") or "")))
    for at, (name, q, arguments) in enumerate(CALLS):
        m = ask(url, call_dialogue(name, q), 120, **fields)
        kind = "calls_seen" if at < 6 else "calls_unseen"
        parts.setdefault(kind, []).append((q, told(m), called(m) == (name, arguments)))
    return {k: {"right": sum(r[2] for r in rows), "of": len(rows), "rows": rows} for k, rows in parts.items()}


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--url", default="http://127.0.0.1:8000")
    args.add_argument("--report", type=Path, help="JSON file for all answers")
    args.add_argument("--fidelity", help="of all requests; the profile's if not given")
    a = args.parse_args()
    fields = {"fidelity": a.fidelity} if a.fidelity else {}
    result = run(a.url, **fields)
    for key, part in result.items():
        print(f"{key}: {part['right']} of {part['of']}")
        for q, text, right in part["rows"]:
            print("  ", "ok   " if right else "WRONG", q, "->", repr(text))
    for q in STORIES:
        print(q, "->", told(ask(a.url, question(q), 120, **fields)))
    if a.report:
        a.report.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
