"""Images by URL: https, from hosts that the profile names, from public addresses alone.

A name is looked up once, and every address that it has must be public: the connection goes to one of those and to
nothing else. Redirects are not followed, cookies and proxies of the environment are not used, and what is sent is read
up to a limit of bytes and of time.
"""

import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from tided.images.source import too_large
from tided.images.types import RefusedImageError

HTTPS_PORT = 443
_SLICE_BYTES = 1 << 16
# Addresses that lead to others (6to4, Teredo, NAT64), or belong to protocols.
_LEADING = tuple(
    ipaddress.ip_network(net)
    for net in ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")
)


def is_public(address: str) -> bool:
    """Whether anyone on the internet has this address: not this machine, this network, a group, or nobody."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if any(found in net for net in _LEADING) or (found.version == 6 and found.ipv4_mapped):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


class _NotPublicError(OSError):
    pass


class _Checked(AbstractResolver):
    """Addresses of a name, all of them public, or none."""

    def __init__(self, inner: AbstractResolver, allowed: Callable[[str], bool]) -> None:
        self._inner, self._allowed = inner, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not found or not all(self._allowed(entry["host"]) for entry in found):
            raise _NotPublicError
        return found

    async def close(self) -> None:
        await self._inner.close()


class Fetcher:
    """`hosts`: those that are allowed; none: nothing is ever fetched. `limit_s`: of one image, look-up included.

    `resolver`, `allowed`, `trust` and `port` are the system's and the rules of this module, but for tests."""

    def __init__(
        self,
        hosts: Sequence[str],
        most_bytes: int,
        limit_s: float,
        *,
        resolver: Callable[[], AbstractResolver] = aiohttp.ThreadedResolver,
        allowed: Callable[[str], bool] = is_public,
        trust: ssl.SSLContext | None = None,
        port: int = HTTPS_PORT,
    ) -> None:
        self._hosts, self._most_bytes, self._limit_s = {host.lower() for host in hosts}, most_bytes, limit_s
        self._resolver, self._allowed, self._trust, self._port = resolver, allowed, trust, port

    async def fetch(self, url: str) -> bytes:
        """Raises RefusedImageError."""
        target = self._checked(url)
        connector = aiohttp.TCPConnector(
            resolver=_Checked(self._resolver(), self._allowed),
            ssl=self._trust or True,
            use_dns_cache=False,
            force_close=True,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._limit_s),
            headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tidelm"},
            auto_decompress=False,  # or what was already sent would be unfolded before its header is judged
            trust_env=False,
        )
        try:
            async with session, session.get(target, allow_redirects=False) as answer:
                return await self._read(answer)
        except RefusedImageError:
            raise
        except TimeoutError:
            raise RefusedImageError(f"its server takes longer than {self._limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if _is_not_public(error):
                raise RefusedImageError("its host has an address that is not public") from None
            raise RefusedImageError("it cannot be fetched") from None

    def _checked(self, url: str) -> URL:
        try:
            target = URL(url)
            host, port = (target.host or "").lower(), target.port
        except ValueError:
            raise RefusedImageError("not a URL") from None
        if target.scheme != "https" or not host:
            raise RefusedImageError("only https URLs are fetched")
        if host not in self._hosts:
            raise RefusedImageError("its host is not one that this server may ask; send a data URL")
        if target.user is not None or target.password is not None or port != self._port:
            raise RefusedImageError(f"a URL with a user, or a port other than {self._port}, is not fetched")
        if _is_address(host) and not self._allowed(host):  # no name to be looked up: the resolver never sees it
            raise RefusedImageError("its host has an address that is not public")
        return target

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            moved = ", and redirects are not followed" if 300 <= answer.status < 400 else ""
            raise RefusedImageError(f"its server answered with status {answer.status}{moved}")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedImageError("its server sent it compressed, which was not asked for")
        data = bytearray()
        async for part in answer.content.iter_chunked(_SLICE_BYTES):
            data += part
            if len(data) > self._most_bytes:
                raise too_large(self._most_bytes)
        return bytes(data)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_not_public(error: BaseException | None) -> bool:
    """aiohttp wraps what a resolver raises."""
    while error is not None:
        if isinstance(error, _NotPublicError):
            return True
        error = error.__cause__ or getattr(error, "os_error", None)
    return False
