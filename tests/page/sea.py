"""An engine of nothing but a map: what the page shows, set by a test, behind the real server."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tided.api.app import build_app
from tided.api.context import CONTEXT
from tided.api.door import Door
from tided.api.viewers import Viewers
from tided.chat.families import DEEPSEEK_V41
from tided.chat.tokenizer import Tokenizer
from tided.settings import Cache, Experts, Model, Server, Settings

MINI = Path(__file__).parents[2] / "minis" / "deepseek"
MISSING, RESIDENT, HOT, LOADING = range(4)


class Sea:
    """`states`, `heat` [layers, experts]: changed in place by who owns it. Budgets differ by layer. `viewers`: of the
    server before it."""

    viewers: Viewers

    def __init__(self, layers: int, experts: int, seed: int = 1) -> None:
        dice = np.random.default_rng(seed)
        self.heat = dice.permuted(np.arange(layers * experts) * 10 // (layers * experts)).reshape(layers, experts)
        self.states = np.zeros((layers, experts), dtype=np.uint8)
        for layer, share in enumerate(np.linspace(0.35, 0.8, layers)):
            wanted = np.argsort(-(self.heat[layer] + dice.normal(0, 2, experts)))
            self.states[layer, wanted[: round(share * experts)]] = RESIDENT
        self.state, self.lanes = "ready", list[dict[str, Any]]()
        self.counters: dict[str, Any] = {
            "weight": 100.0, "missed_weight": 3.0, "substituted_weight": 2.0, "swaps": 4, "reads_hot_issued": 2,
            "reads_hot_used": 1, "reads_nbytes": 42_000_000, "reads_failed": 0, "answer_tokens": 90, "drafted": 40,
            "accepted": 30, "kv_tokens_used": 512, "kv_tokens_capacity": 8192, "arena_bytes": 71 << 30,
            "device_bytes": 0, "available_bytes": {0: 9 << 30, 1: 11 << 30},
        }  # fmt: skip

    def place(self, layer: int, expert: int, state: int) -> None:
        self.states[layer, expert] = state

    def first(self, layer: int, state: int) -> int:
        """Of a layer: an expert in this state, or 0."""
        return int(np.argmax(self.states[layer] == state))

    def lane(self, number: int, **changed: Any) -> dict[str, Any]:
        return {
            "lane": number, "phase": "answer", "admitted_s": 1.0, "prompt_tokens": 900, "computed_tokens": 900,
            "answer_tokens": 10, "drafted": 8, "accepted": 6, "fidelity": "fast",
        } | changed  # fmt: skip

    # What the API asks of an engine

    def shape(self) -> tuple[int, int]:
        layers, experts = self.states.shape
        return layers, experts

    def cells(self) -> bytes | None:
        return (self.states * 16 + self.heat).astype(np.uint8).tobytes()

    def held(self) -> float | None:
        return 0.9

    def figures(self) -> dict[str, Any]:
        return self.counters | {"lanes": self.lanes}

    def health(self) -> dict[str, Any]:
        lanes = {"total": 2, "busy": len(self.lanes)}
        return {"state": self.state, "fault": "", "lanes": lanes, "queue": 0, "busy": bool(self.lanes)}


@asynccontextmanager
async def served(sea: Sea, port: int = 0, key_file: str = "") -> AsyncIterator[str]:
    """Its address, until the end of the block."""
    settings = Settings(
        model=Model(path=str(MINI), served_name="the sea"),
        experts=Experts(resident=4),
        cache=Cache(context_tokens=4096, pool_tokens=8192),
        server=Server(api_keys_file=key_file),
    )
    app = build_app(sea, Tokenizer.open(MINI), DEEPSEEK_V41, settings)  # type: ignore[arg-type]
    sea.viewers = app[CONTEXT].viewers
    listener = socket.create_server(("127.0.0.1", port))
    door = await Door.open(app, listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await door.close()
