"""An HTTP server of canned answers, in the shapes of the daemon's API."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from typer.testing import Result

Tidectl = Callable[..., Result]

STATS = {
    "ttft_s": 0.25,
    "decode_tok_s": 31.26,
    "substituted_weight_share": 0.0321,
    "experts": {"resident": 312, "total": 480},
}
# Of a config.json: what is judged without torch.
MODEL = {
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "hidden_size": 128,
    "vocab_size": 256,
}
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}


class Canned:
    """What the server answers, and what it was asked: `requests` holds (path, headers, body)."""

    def __init__(self) -> None:
        self.status = 200
        self.body: Any = {}
        self.events: list[Any] | None = None
        self.cut = False
        self.answers_when: Callable[[], object] = lambda: None  # returns when the answer may begin
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
        self.traces: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""

    @staticmethod
    def chunks(*deltas: dict[str, Any], finish_reason: str = "stop") -> list[Any]:
        """A streamed answer as the server sends it: deltas, the last chunk with statistics, usage."""
        made = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None} for delta in deltas]
        last = {
            "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}],
            "x_engine_stats": STATS,
            "usage": None,
        }
        return [*made, last, {"choices": [], "usage": USAGE}]


def handler_of(canned: Canned) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = canned.health
            if self.path.startswith("/v1/requests/"):
                canned.requests.append((self.path, dict(self.headers), None))
                found = canned.traces.get(self.path.split("/")[3])
                status, body = (200, found) if found else (404, {"error": {"message": "no such request"}})
            self._reply(status, "application/json", json.dumps(body).encode())

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            canned.requests.append((self.path, dict(self.headers), json.loads(self.rfile.read(length))))
            if canned.events is None:
                self._reply(canned.status, "application/json", json.dumps(canned.body).encode())
                return
            canned.answers_when()
            lines = [": ok\n\n", *(f"data: {json.dumps(event)}\n\n: keep-alive\n\n" for event in canned.events)]
            end = "" if canned.cut else "data: [DONE]\n\n"
            self._reply(canned.status, "text/event-stream", ("".join(lines) + end).encode())

        def _reply(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
