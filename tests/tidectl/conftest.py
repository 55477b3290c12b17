"""A server of canned answers, and `tidectl` called in this process with a state directory of its own."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tidectl.canned import Canned, Tidectl, handler_of
from tidectl.main import app


@pytest.fixture
def server() -> Iterator[Canned]:
    canned = Canned()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(canned))
    canned.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield canned
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of this test."""
    path = tmp_path / "state"
    monkeypatch.setenv("TIDE_STATE_DIR", str(path))
    return path


@pytest.fixture
def tidectl(state: Path, monkeypatch: pytest.MonkeyPatch) -> Tidectl:
    monkeypatch.delenv("TIDE_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run
