"""`tidectl why` against a server of canned answers."""

import json

import pytest

from tests.tidectl.canned import Canned, Tidectl

TRACE = {
    "request_id": "chatcmpl-7",
    "ended": "stop",
    "first_step": 11,
    "last_step": 19,
    "ms": 2500.0,
    "pairs_wanted": 3,
    "pairs_missed": 1,
    "missed_weight": 1.5,
    "pairs_read": 1,
    "read_weight": 0.5,
    "pairs": [
        {"layer": 3, "expert": 17, "picks": 4, "missed_weight": 1.5, "read_weight": 0.5},
        {"layer": 0, "expert": 2, "picks": 9, "missed_weight": 0.0, "read_weight": 0.0},
    ],
    "movements": [
        {"step": 12, "ms": 210.0, "what": "asked", "layer": 3, "expert": 17, "out": [3, 1], "why": "prompt"},
        {"step": 14, "ms": 390.0, "what": "routable", "layer": 3, "expert": 17, "out": [3, 1], "why": "prompt"},
    ],
    "movements_of_others": 2,
}


def test_each_expert_is_told_with_what_happened_to_it(tidectl: Tidectl, server: Canned) -> None:
    server.traces = {"latest": TRACE}
    ran = tidectl("why", "--url", server.url)
    assert ran.exit_code == 0
    [head, first, second] = ran.stdout.splitlines()
    assert head.split() == ["layer", "expert", "picks", "missed", "weight", "read", "before", "use", "what", "happened"]
    assert first.split()[:5] == ["3", "17", "4", "1.50", "0.50"]
    assert "read began at 0.21 s, step 12 (prompt, for 3/1); routable at 0.39 s, step 14" in first
    assert second.split() == ["0", "2", "9"]
    [_, wanted, moved, left] = ran.stderr.splitlines()
    missed = "3 experts wanted, 1 of them missed at least once (routing weight 1.5), "
    assert wanted == missed + "1 read before use (0.5 of that weight)"
    assert moved == "beside the steps: 1 read of them began; 2 movements of experts that it did not want"
    assert left.startswith("1 more")


def test_as_json_it_is_what_the_server_said(tidectl: Tidectl, server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_API_KEY", "secret")
    server.traces = {"chatcmpl-7": TRACE}
    ran = tidectl("why", "chatcmpl-7", "--json", "--url", server.url)
    assert json.loads(ran.stdout) == {"schema": "tidectl.why/1", **TRACE}
    [(path, headers, _)] = server.requests
    assert path == "/v1/requests/chatcmpl-7/residency"
    assert headers["Authorization"] == "Bearer secret"


def test_an_unknown_request_is_told_with_the_next_step(tidectl: Tidectl, server: Canned) -> None:
    ran = tidectl("why", "chatcmpl-8", "--url", server.url)
    assert ran.exit_code == 1
    assert "nothing is known of the request chatcmpl-8" in ran.stderr
    assert "the last requests alone are kept" in ran.stderr


def test_that_no_request_has_ended_is_told(tidectl: Tidectl, server: Canned) -> None:
    ran = tidectl("why", "--url", server.url)
    assert ran.exit_code == 1
    assert "no request has ended yet, or this is no TideLM server" in ran.stderr
    assert "latest" not in ran.stderr
