"""Data URLs, and images by URL: from whom, how much, for how long. No test here connects to another machine."""

import asyncio
import base64
import contextlib
import gzip
import socket
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from tided.images.fetch import Fetcher, is_public
from tided.images.source import from_data_url, is_data_url
from tided.images.types import RefusedImageError

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


def data_refusal(url: str, most_bytes: int = 1000) -> str:
    with pytest.raises(RefusedImageError) as refused:
        from_data_url(url, most_bytes)
    return str(refused.value)


@pytest.mark.parametrize("head", ["data:image/png;base64", "data:;base64", "DATA:image/webp;charset=x;BASE64"])
def test_data_urls(head):
    assert is_data_url(f"{head},{TEXT}")
    assert from_data_url(f"{head},{TEXT}", 256) == DATA
    lines = "\r\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76))
    assert from_data_url(f"{head},{lines}\n", 256) == DATA


def test_data_urls_that_are_none():
    assert not is_data_url("https://example.com/data:image/png;base64,")
    assert data_refusal("data:image/png;base64") == data_refusal("data:image/png,abc")
    for text in ("a", "ab=c", "é", "!!!!", TEXT[:-1], TEXT + "=", "\x00\x00\x00\x00"):
        assert data_refusal(f"data:;base64,{text}") == "its base64 is not valid"


def test_the_size_of_a_data_url_is_judged_before_it_is_decoded(monkeypatch):
    assert data_refusal(f"data:;base64,{TEXT}", 255) == "larger than 255 bytes"
    monkeypatch.setattr(base64, "b64decode", None)
    assert data_refusal("data:;base64," + "A" * 4000, 1000) == "larger than 1000 bytes"


PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.127.255.254",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.251",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:a9fe:a9fe",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:a9fe:a9fe::1",
    "2001:0:53aa:64c::1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "localhost",
    "2130706433",
    "0x7f000001",
    "127.1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_everybodys(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111"])
def test_addresses_that_are(address):
    assert is_public(address)


# A server of this machine, by a name that a test gives it


class Names(AbstractResolver):
    """Answers as it is told, and counts who asks."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.asked = addresses, []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        self.asked.append(host)
        if not self.addresses:
            raise OSError("no such name")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.addresses]
        return [
            {"hostname": host, "host": address, "port": port, "family": kind, "proto": 0, "flags": 0}
            for address, kind in zip(self.addresses, kinds, strict=True)
        ]

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(the server's, the client's): a certificate for images.example."""
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=images.example"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:images.example"], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))


class Site:
    """What was asked of a server, and what it answers."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.connections = 0
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = plain


async def plain(request: web.Request) -> web.StreamResponse:
    return web.Response(body=DATA, content_type="text/plain")


@pytest.fixture
async def site(trust) -> AsyncIterator[Site]:
    found = Site()

    async def handle(request: web.Request) -> web.StreamResponse:
        found.requests.append(request)
        return await found.answer(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trust[0]).start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


@pytest.fixture
def fetch(site, trust):
    """fetch(path or URL, names, **Fetcher's options) -> bytes; this machine counts as public unless a test says no."""

    async def ask(url: str = "/a.png", names: AbstractResolver | None = None, **options) -> bytes:
        chosen = {"allowed": lambda address: True, "trust": trust[1], "port": site.port} | options
        most_bytes, limit_s = chosen.pop("most_bytes", 1000), chosen.pop("limit_s", 30)
        hosts = chosen.pop("hosts", ["Images.Example"])
        resolver = names or Names("127.0.0.1")
        made = Fetcher(hosts, most_bytes, limit_s, resolver=lambda: resolver, **chosen)
        return await made.fetch(f"https://images.example:{site.port}{url}" if url.startswith("/") else url)

    return ask


async def refusal(fetching: Awaitable[bytes]) -> str:
    with pytest.raises(RefusedImageError) as refused:
        await fetching
    return str(refused.value)


async def test_an_image_of_a_host_that_is_allowed(fetch, site):
    names = Names("127.0.0.1")
    assert await fetch("/some/a.png?size=1", names) == DATA
    (request,) = site.requests
    assert request.path_qs == "/some/a.png?size=1"
    assert request.host.startswith("images.example")
    assert {"Cookie", "Authorization", "Referer"}.isdisjoint(request.headers)
    assert request.headers["Accept-Encoding"] == "identity"
    assert names.asked == ["images.example"]  # once


LOCAL = [
    ("127.0.0.1",),
    ("8.8.8.8", "127.0.0.1"),  # one of several
    ("169.254.169.254",),
    ("::1",),
    ("::ffff:127.0.0.1",),
    ("10.0.0.7",),
    (),
]


@pytest.mark.parametrize("addresses", LOCAL, ids=str)
async def test_a_name_that_leads_into_this_network_is_not_connected_to(fetch, site, addresses):
    said = await refusal(fetch(names=Names(*addresses), allowed=is_public))
    assert said == ("its host has an address that is not public" if addresses else "it cannot be fetched")
    assert site.requests == []


async def test_a_name_is_not_looked_up_again_after_it_was_judged(fetch, site):
    """A name that changes between two questions: the second answer is never asked for."""

    class Rebinding(Names):
        async def resolve(self, host, port=0, family=socket.AF_INET):
            self.addresses = ("127.0.0.1",) if not self.asked else ("10.0.0.7",)
            return await super().resolve(host, port, family)

    names = Rebinding()
    assert await fetch(names=names, allowed=lambda address: address == "127.0.0.1") == DATA
    assert len(names.asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "file:///etc/passwd",
        "ftp://images.example/a",
        "gopher://images.example",
        "images.example/a.png",
        "https://",
        "",
        "https:///a.png",
        "javascript:alert(1)",
    ],
)
async def test_only_https(fetch, site, url):
    names = Names("127.0.0.1")
    assert await refusal(fetch(url or "x", names)) == "only https URLs are fetched"
    assert (names.asked, site.requests) == ([], [])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "images.example.evil.example", "xn--images.example", "127.0.0.1", "2130706433", "0x7f000001",
     "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "localhost", "images.example."],
)  # fmt: skip
async def test_other_hosts_are_not_asked_for(fetch, site, host):
    names = Names("127.0.0.1")
    said = await refusal(fetch(f"https://{host}:{site.port}/a.png", names))
    assert "not one that this server may ask" in said or said == "not a URL"
    assert (names.asked, site.requests) == ([], [])


async def test_without_hosts_nobody_is_asked(fetch, site):
    names = Names("127.0.0.1")
    assert "send a data URL" in await refusal(fetch(names=names, hosts=[]))
    assert (names.asked, site.requests) == ([], [])


@pytest.mark.parametrize("url", ["https://user:key@images.example{}/a", "https://user@images.example{}/a"])
async def test_a_user_in_a_url_is_refused(fetch, site, url):
    assert "with a user" in await refusal(fetch(url.format(f":{site.port}")))
    assert site.requests == []


async def test_another_port_is_refused(fetch, site):
    assert "a port other than 443" in await refusal(fetch(port=443))
    assert site.requests == []


async def test_an_address_in_the_list_of_hosts_must_be_public_too(fetch, site):
    """No name is looked up for it, so the rule holds before."""
    for host in ("127.0.0.1", "::1"):
        shown = f"[{host}]" if ":" in host else host
        said = await refusal(fetch(f"https://{shown}:{site.port}/", hosts=[host], allowed=is_public))
        assert said == "its host has an address that is not public"
    assert site.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(fetch, site, status):
    async def moved(request):
        return web.Response(status=status, headers={"Location": f"https://images.example:{site.port}/b.png"})

    site.answer = moved
    assert await refusal(fetch()) == f"its server answered with status {status}, and redirects are not followed"
    assert len(site.requests) == 1


@pytest.mark.parametrize("status", [204, 206, 401, 404, 500])
async def test_only_a_whole_answer_counts(fetch, site, status):
    async def other(request):
        return web.Response(status=status)

    site.answer = other
    assert await refusal(fetch()) == f"its server answered with status {status}"


@pytest.mark.parametrize("told", [True, False])
async def test_what_is_larger_than_allowed_is_not_read(fetch, site, told):
    sent = 0

    async def endless(request):
        nonlocal sent
        response = web.StreamResponse()
        if told:
            response.content_length = 1 << 40
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 28:
                await response.write(b"x" * 65536)
                sent += 65536
        return response

    site.answer = endless
    assert await refusal(fetch(most_bytes=100_000)) == "larger than 100000 bytes"
    assert sent < 1 << 27


async def test_the_largest_that_is_allowed_is(fetch):
    assert await fetch(most_bytes=len(DATA)) == DATA
    assert await refusal(fetch(most_bytes=len(DATA) - 1)) == "larger than 255 bytes"


async def test_compressed_answers_are_refused(fetch, site):
    async def folded(request):
        return web.Response(body=DATA, headers={"Content-Encoding": "gzip"})

    site.answer = folded
    assert "compressed" in await refusal(fetch())


async def test_nothing_of_a_compressed_answer_is_unfolded(fetch, site):
    """Not even what comes with its header, which says that it is one."""
    bomb, unfolding = gzip.compress(bytes(1 << 24)), []

    async def folded(request):
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    def begun(*options, **names):
        unfolding.append(options)
        return zlib.decompressobj(*options, **names)

    site.answer = folded
    assert len(bomb) < 1 << 15
    aiohttp.set_zlib_backend(SimpleNamespace(**vars(zlib) | {"decompressobj": begun}))
    try:
        assert "compressed" in await refusal(fetch(most_bytes=1 << 20))
    finally:
        aiohttp.set_zlib_backend(zlib)
    assert unfolding == []


@pytest.mark.parametrize("after", ["nothing", "headers"])
async def test_a_slow_server_has_its_time(fetch, site, after):
    async def slow(request):
        response = web.StreamResponse()
        if after == "headers":
            await response.prepare(request)
            await response.write(DATA[:10])
        await asyncio.Event().wait()
        return response

    site.answer = slow
    assert await refusal(fetch(limit_s=0.3)) == "its server takes longer than 0.3 s"


async def test_a_slow_look_up_has_its_time(fetch):
    class Slow(Names):
        async def resolve(self, host, port=0, family=socket.AF_INET):
            await asyncio.Event().wait()
            raise AssertionError

    assert await refusal(fetch(names=Slow(), limit_s=0.2)) == "its server takes longer than 0.2 s"


async def test_a_certificate_that_nobody_knows_is_refused(fetch, site):
    assert await refusal(fetch(trust=None)) == "it cannot be fetched"
    other = f"https://other.example:{site.port}/"
    assert await refusal(fetch(other, hosts=["other.example"])) == "it cannot be fetched"  # a certificate of another
    assert site.requests == []


async def test_nothing_of_the_environment_leads_elsewhere(fetch, site, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert await fetch() == DATA


async def test_a_server_that_hangs_up(fetch, site):
    async def hang_up(request):
        request.transport.abort()
        return web.Response()

    site.answer = hang_up
    assert await refusal(fetch()) == "it cannot be fetched"
