"""Requests to any server that speaks OpenAI's chat completions, and what a clock on this side says of them."""

import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from packers.transfer import in_parallel
from tidectl import http
from tidectl.answers import Part, read_part
from tidectl.bench.cases import Ask
from tidectl.bench.receipt import Group, Measured
from tided.errors import UnavailableError

STATS = ("fidelity", "substituted_weight_share", "nvme_gb", "spec", "experts", "prefix", "ttft_s", "decode_tok_s")


class Target(NamedTuple):
    """`model`: the name to ask for; empty: none is sent. `fidelity`: of our servers alone; empty: theirs."""

    url: str
    key: str
    model: str = ""
    temperature: float = 0.6
    fidelity: str = ""
    thinking: bool | None = None


class _Heard:
    """What one stream has brought."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.chunks = 0
        self.finish_reason = ""
        self.usage: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.text = hashlib.sha256()

    def take(self, part: Part, now_s: float) -> None:
        self.usage, self.stats = part.usage or self.usage, part.x_engine_stats or self.stats
        for choice in part.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if text := choice.delta.thought + (choice.delta.content or ""):
                self.first_s, self.last_s = self.first_s or now_s, now_s
                self.chunks += 1
                self.text.update(text.encode(errors="surrogatepass"))


def one(target: Target, ask: Ask) -> tuple[Measured, float, float]:
    """What was measured, when it was sent, when its last token came. Raises UnavailableError for an empty answer."""
    heard, sent_s = _Heard(), time.monotonic()
    with closing(http.stream(target.url, target.key, body(target, ask))) as parts:
        for raw in parts:
            heard.take(read_part(raw, target.url), time.monotonic())
    if not heard.chunks:
        raise UnavailableError("the answer had no text: nothing can be measured", where=target.url)
    return _measured(heard, sent_s), sent_s, heard.last_s


def _measured(heard: _Heard, sent_s: float) -> Measured:
    said = heard.usage.get("completion_tokens")
    tokens, decode_s = said if isinstance(said, int) else heard.chunks, heard.last_s - heard.first_s
    details = heard.usage.get("prompt_tokens_details")
    return Measured(
        prompt_tokens=_count(heard.usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else 0),
        tokens=tokens,
        counted=isinstance(said, int),
        ttft_s=round(heard.first_s - sent_s, 6),
        decode_s=round(decode_s, 6),
        tok_s=round((tokens - 1) / decode_s, 4) if tokens > 1 and decode_s > 0 else 0.0,
        finish_reason=heard.finish_reason,
        sha256=heard.text.hexdigest(),
        stats={name: heard.stats[name] for name in STATS if name in heard.stats},
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def body(target: Target, ask: Ask) -> dict[str, Any]:
    """Answers go on to their longest: `ignore_eos`, which vLLM and SGLang know too; others end where they end."""
    found: dict[str, Any] = {
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.most_tokens,
        "temperature": target.temperature,
        "seed": ask.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.model:
        found["model"] = target.model
    if target.fidelity:
        found["fidelity"] = target.fidelity
    if target.thinking is not None:
        found["thinking"] = {"type": "enabled" if target.thinking else "disabled"}
    return found


def group(target: Target, asks: Sequence[Ask]) -> Group:
    """All of them at once, each in a thread of its own. The first error is raised, and a Ctrl-C, without waiting for
    the others' answers."""
    jobs = [lambda place=place, ask=ask: (place, one(target, ask)) for place, ask in enumerate(asks)]
    came = dict(in_parallel(jobs, len(jobs), threading.Event(), lambda: None))
    ended = [came[place] for place in range(len(asks))]
    wall_s = max(last for _, _, last in ended) - min(sent for _, sent, _ in ended)
    return Group([measured for measured, _, _ in ended], round(wall_s, 6))
