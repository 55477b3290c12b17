"""`tidectl audit` against a server of canned answers."""

import json

import pytest

from tests.tidectl.canned import Canned, Tidectl

ONE = {"at": 2, "token_id": 5, "exact_id": 6, "rank": 3, "logprob": -2.5, "text": " cat", "exact_text": " dog"}
FOUND = {
    "request_id": "chatcmpl-7", "fidelity": "fast", "tokens": 40, "exact_loss": 0.51, "exact_top1": 0.9,
    "resident_loss": 0.62, "residency_loss": 0.11, "substituted_weight_share": 0.125, "reads": 12,
    "read_bytes": 3_400_000, "seconds": 1.25, "tries": 1, "differ": 3, "differences": [ONE, ONE | {"at": 7}],
    "ends_alike": False,
}  # fmt: skip


def test_what_would_be_others_is_shown(tidectl: Tidectl, server: Canned) -> None:
    server.body = FOUND
    ran = tidectl("audit", "--top", "1", "--url", server.url)
    assert ran.exit_code == 0
    [_, row] = ran.stdout.splitlines()
    assert row.split() == ["2", "'", "cat'", "'", "dog'", "3", "-2.500"]
    for told in (
        "chatcmpl-7 (fast): 40 tokens, 3 would be others with every expert",
        "it would go on where it ended",
        "loss 0.5100 nats a token with every expert, 0.6200 with those that are resident now (+0.1100, 12.5 % of",
        "12 experts read, 3 MB, 1.2 s",
        "2 more",
    ):
        assert told in ran.stderr
    assert server.requests[0][0] == "/v1/requests/latest/audit"


@pytest.mark.parametrize(
    ("changes", "told"), [({"differ": 0}, "all as with every expert"), ({"differ": None}, "held to a grammar")]
)
def test_without_differences_there_is_no_table(tidectl: Tidectl, server: Canned, changes: dict, told: str) -> None:
    server.body = FOUND | {"differences": [], "ends_alike": None} | changes
    ran = tidectl("audit", "chatcmpl-7", "--url", server.url)
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert told in ran.stderr


def test_as_json_it_is_what_the_server_said(tidectl: Tidectl, server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_API_KEY", "secret")
    server.body = FOUND
    ran = tidectl("audit", "chatcmpl/7", "--json", "--url", server.url)
    assert json.loads(ran.stdout) == {"schema": "tidectl.audit/1", **FOUND}
    [(path, headers, _)] = server.requests
    assert path == "/v1/requests/chatcmpl%2F7/audit"
    assert headers["Authorization"] == "Bearer secret"


def test_a_refusal_names_the_settings(tidectl: Tidectl, server: Canned) -> None:
    server.status, server.body = 404, {"error": {"message": "No such answer is remembered."}}
    ran = tidectl("audit", "other", "--url", server.url)
    assert ran.exit_code == 1
    assert "No such answer is remembered. (status 404)" in ran.stderr
    assert "audit.remember_tokens" in ran.stderr
