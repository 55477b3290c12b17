"""Prompts that begin like earlier ones, through the whole engine, on a model whose logits tell every token of a lane:
an answer that is right began with the right context."""

import hashlib
import random

import pytest
import torch
from engine_fakes import LIMITS, VOCAB, Bench, FakeModel
from engine_fakes import request as some_request
from msgspec.structs import replace

from tided.engine.caching import CachePlan, Caching
from tided.engine.scheduler import Limits
from tided.engine.types import Request


class Quick(FakeModel):
    """Long prompts at once: logits are made where they are looked at."""

    def _logits(self, lane) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(repr(lane.ids).encode()).digest()[:6])
        return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def _extend(self, lane, ids) -> None:
        lane.ids += ids
        lane.position += len(ids)

    def prefill(self, lane, token_ids, logits, pictured=None):
        self._extend(lane, token_ids.tolist())
        self.calls.append(("prefill", len(token_ids)))
        return None if logits == "none" else self._logits(lane)

    def decode(self, lanes, token_ids, counts=None):
        for lane, token in zip(lanes, token_ids.tolist(), strict=True):
            self._extend(lane, [token])
        return torch.cat([self._logits(lane) for lane in lanes])


def bench(monkeypatch, chunk: int, folder=None, ram: int = 0, disk: int = 0, context: int = 20_000) -> Bench:
    """With a prompt cache of so many bytes; without any where both are 0."""
    monkeypatch.setattr("engine_fakes.FakeModel", Quick)
    names = {name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__}
    sizes = {"context_tokens": context, "pool_tokens": 2 * context, "page_tokens": 4, "chunk_tokens": chunk}
    found = Bench(limits=Limits(**(names | sizes | {"snapshots": bool(ram or disk), "lanes": 2, "queue": 8})))
    if ram or disk:
        plan = CachePlan(seed="s", chunk_tokens=chunk, ram_bytes=ram, disk_bytes=disk, folder=folder)
        found.engine.executor.caching = Caching(found.model, plan)
    return found


def answered(found: Bench, request: Request) -> tuple[int, list[int]]:
    """Tokens that were not computed, and the answer."""
    found.submit(request)
    found.finish()
    assert found.engine.executor.caching.background.flush(30)
    assert found.faults == []
    return found.end(request.request_id).stats["cached_tokens"], found.tokens(request.request_id)


def asking(name: str, prompt: list[int], answer: int = 3) -> Request:
    return replace(some_request(name, max_tokens=answer), prompt_ids=prompt)


CHANGES = {
    "a time stamp five tokens before the end": lambda prompt: [*prompt[:-5], 1, *prompt[-4:]],
    "another last line": lambda prompt: [*prompt[:-60], *([2, 3] * 40)],
    "a longer conversation": lambda prompt: [*prompt[:-1], *([4] * 500)],
    "a shorter last line": lambda prompt: prompt[:-300],
}


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("chunk", [512, 1024])
@pytest.mark.parametrize("change", CHANGES)
def test_case_15_another_end_of_a_14k_prompt_reuses_85_percent(monkeypatch, tmp_path, change, chunk, kind):
    prompt = random.Random(15).choices(range(VOCAB), k=14_336)
    other = CHANGES[change](prompt)
    budget = {"ram": 1 << 28} if kind == "memory" else {"disk": 1 << 28, "folder": tmp_path / "cache"}
    found = bench(monkeypatch, chunk, **budget)
    assert answered(found, asking("first", prompt))[0] == 0
    cached, answer = answered(found, asking("other", other))
    assert 0.85 * len(other) <= cached < len(other)
    assert answer == answered(bench(monkeypatch, chunk), asking("other", other))[1]
    assert sum(count for kind, count in found.model.calls if kind == "prefill") == len(prompt) + len(other) - cached


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_case_18_more_snapshots_than_there_is_room_for(monkeypatch, tmp_path, kind):
    """Prompts of a few beginnings, every third cancelled on its way; room for a handful of snapshots. Whatever an entry
    held before, a hit is the context of the tokens that it names."""
    draw = random.Random(18)
    starts = [draw.choices(range(VOCAB), k=40) for _ in range(4)]
    room = 4_000 if kind == "memory" else 16_000
    budget = {"ram": room} if kind == "memory" else {"disk": room, "folder": tmp_path / "cache"}
    found, plain = bench(monkeypatch, 8, context=100, **budget), bench(monkeypatch, 8, context=100)
    prefixes = found.engine.executor.caching.prefixes
    hits, seen = 0, set()
    for number in range(90):
        start = draw.choice(starts)
        prompt = start[: draw.choice((16, 24, 33, 40))] + draw.choices(range(VOCAB), k=draw.randrange(9))
        one = asking(str(number), prompt)
        if number % 3 == 2:
            found.submit(one)
            found.turn(draw.randrange(1, 4))
            found.cancel(one.request_id)
            found.finish()
            assert found.engine.executor.caching.background.flush(30)
        else:
            cached, answer = answered(found, one)
            assert answer == answered(plain, one)[1], f"{number} began with a wrong context of {cached} tokens"
            hits += cached > 0
        prefixes.check()
        seen |= set(prefixes._states) | prefixes._written
    assert hits >= 20
    assert len(seen) > 2 * len(set(prefixes._states) | prefixes._written)  # most had to go
    found.engine.executor.check()
