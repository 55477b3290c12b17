"""Stands in for `python -m tided.daemon`: writes its state, answers /health, ends on SIGTERM. `FAKE_DAEMON` says how a
rank misbehaves: `RANK:die`, `RANK:hang` (never ready), `RANK:deaf` (ignores SIGTERM), `RANK:drain` (closes its port on
SIGTERM, and ends when there is a file `go` in the state directory)."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tided.control.state import StateFile
from tided.profile import load


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {
            "status": "ok",
            "model": "mini",
            "residents": 312,
            "experts": 480,
            "generation": 3,
            "lanes": {"total": 2, "busy": 1},
            "queue": 4,
            "tide": {"moving": False, "last_plan": {"reason": "prompt", "swaps": 12, "done": 9, "age_s": 200.4}},
            "engine_policy": {"tide": {"sensitivity": "high", "hot_ring_slots": 0}},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--profile", "--rank", "--state-dir"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    rank, port = int(given.rank), load(given.profile).server.port
    fault = dict(part.split(":") for part in os.environ.get("FAKE_DAEMON", "").split(",") if part).get(str(rank))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if fault == "deaf" else ended.set())
    state = StateFile(Path(given.state_dir), rank)
    state.enter("loading", "experts: 3 of 8", done=3, total=8)
    print(f"rank {rank} loads", flush=True)
    if fault == "die":
        print("what went wrong, in full", flush=True)
        print("ERROR daemon the shard is truncated", flush=True)
        state.enter("failed", "the shard is truncated", exit_code=65)
        return 65
    if rank == 0:
        server = ThreadingHTTPServer(("127.0.0.1", port), Health)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    if fault != "hang":
        state.enter("ready", port=port if rank == 0 else 0)
    ended.wait(60)
    if fault == "drain":
        if rank == 0:
            server.shutdown()
            server.server_close()
        state.enter("draining")
        deadline = time.monotonic() + 60
        while not (Path(given.state_dir) / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    print(f"rank {rank} ends", flush=True)
    state.enter("stopped", exit_code=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
