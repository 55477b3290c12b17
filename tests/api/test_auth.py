"""Where keys come from, that they are looked at again, and who may be served without one."""

import os

import pytest

from tided.api import auth
from tided.api.auth import KeyRing, key_file, read_keys
from tided.errors import ConfigError, RequestError
from tided.settings import Server

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n")
    return file


def opens(ring: KeyRing, key: str) -> bool:
    try:
        ring.check({"x-api-key": key})
    except RequestError:
        return False
    return True


def replace(path, text: str) -> None:
    """As editors and deployments do it."""
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def test_keys_are_read_again_when_the_file_changes(path, caplog):
    ring = KeyRing.load(str(path))
    assert (opens(ring, "one"), opens(ring, "two")) == (True, False)
    replace(path, "two\nthree\n")
    with caplog.at_level("INFO", "tided.api"):
        assert [opens(ring, key) for key in ("one", "two", "three")] == [False, True, True]
    assert "2 API keys are read again" in caplog.text
    assert "three" not in caplog.text


@pytest.mark.parametrize("text", ["", "# nothing\n", "a key with blanks\n", "\udcff\udcfe"], ids=repr)
def test_a_bad_file_leaves_the_keys_and_is_told_of_once(path, caplog, text):
    ring = KeyRing.load(str(path))
    path.with_name("new").write_bytes(text.encode("utf-8", "surrogateescape"))
    path.with_name("new").replace(path)
    for _ in range(3):
        assert (opens(ring, "one"), opens(ring, "a")) == (True, False)
    assert [record.levelname for record in caplog.records if "stay as they are" in record.getMessage()] == ["ERROR"]
    replace(path, "two\n")
    assert (opens(ring, "one"), opens(ring, "two")) == (False, True)


def test_a_file_that_is_gone_leaves_the_keys(path):
    ring = KeyRing.load(str(path))
    path.unlink()
    assert (opens(ring, "one"), ring.open) == (True, False)
    path.write_text("two\n")
    assert (opens(ring, "one"), opens(ring, "two")) == (False, True)


def test_the_file_is_looked_at_once_a_second(path, monkeypatch):
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 1.0)
    looks = []
    monkeypatch.setattr(auth, "_stamp", lambda file: looks.append(file))
    ring = KeyRing.load(str(path))
    looks.clear()
    for _ in range(50):
        opens(ring, "one")
    assert len(looks) <= 1


async def test_a_running_server_takes_new_keys(serve, path):
    server = await serve(api_keys_file=str(path))

    async def status(key: str) -> int:
        async with server.session.get("/v1/models", headers={"x-api-key": key}) as response:
            return response.status

    assert [await status(key) for key in ("one", "two")] == [200, 401]
    replace(path, "one\ntwo\n")
    assert [await status(key) for key in ("one", "two")] == [200, 200]


def test_keys_as_a_credential(path, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    assert read_keys(auth.Path(key_file(Server(api_keys_credential="keys")))) == ("one",)
    for given in ("../keys", "a/b"):
        with pytest.raises(ConfigError, match="no credential"):
            key_file(Server(api_keys_credential=given))
    with pytest.raises(ConfigError, match="both set"):
        key_file(Server(api_keys_credential="keys", api_keys_file=str(path)))
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(ConfigError, match="LoadCredential"):
        key_file(Server(api_keys_credential="keys"))
    assert key_file(Server()) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "box"])
async def test_a_wider_address_without_a_key_is_refused_unless_told(serve, path, caplog, host):
    with pytest.raises(ConfigError, match="anyone who reaches") as refusal:
        await serve(host=host)
    assert "server.allow_open" in refusal.value.hint
    await serve(host=host, api_keys_file=str(path))
    assert "anyone" not in caplog.text
    await serve(host=host, allow_open=True)
    assert "anyone who reaches" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_this_machine_needs_no_key(serve, caplog, host):
    await serve(host=host)
    assert "anyone" not in caplog.text


OPEN = ["/", "/health", "/health/", "/api/hello", "/api/hello/", "/expert-map"]
CLOSED = ["/v1/models", "/v1/models/deepseek", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"]
CLOSED += ["/metrics", "/v1/expert-map", "/v1/requests/latest/residency", "/nothing", "/v1//health", "/health/x"]


async def test_every_route_but_the_probes_and_the_page_needs_a_key(serve, path):
    """Of the routes as they are registered: one that is added later is in this test without a word."""
    server = await serve(api_keys_file=str(path))
    known = {route.resource.canonical for route in server.app.router.routes()}
    for route in sorted({*known, *OPEN, *CLOSED}):
        url = route.replace("{id}", "latest")
        expected = 200 if (url.rstrip("/") or "/") in ("/", "/health", "/api/hello", "/expert-map") else 401
        for method in ("GET", "HEAD"):
            async with server.session.request(method, url, params={"follow": "0"}) as response:
                assert response.status == expected, (method, url)
        async with server.session.post(url, data=b"{}") as response:
            assert response.status == 401, url


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read(path):
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.load(str(path))
