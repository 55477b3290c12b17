"""Bytes of the control plane: typed messages only, CURVE with an allow-list, sizes bounded before decoding."""

import errno
import os
import socket
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.auth.base import Authenticator

from tided.control.keys import Keys
from tided.control.messages import ControlMessage
from tided.errors import ConfigError, PairError, PermissionError_, UnavailableError
from tided.settings import Parallel, Settings

SMALL_BYTES = 1 << 20  # hello, ready, digest, heartbeat
TOKEN_BYTES = 5  # most bytes of a token id in msgpack
QUEUE_MESSAGES = 256  # a peer that reads nothing for so many messages is stuck
LINGER_MS = 1000  # longest wait at close for a last word to leave
ZAP_DOMAIN = "tide"
EVERYWHERE = ("0.0.0.0", "::", "*", "")

AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ControlMessage)


def encode(message: ControlMessage) -> bytes:
    return _encoder.encode(message)


def decode(payload: list[bytes], sender: str) -> ControlMessage:
    """The one frame of a message. Raises PairError for anything that is not a `ControlMessage`."""
    try:
        (frame,) = payload
        return _decoder.decode(frame)
    except (ValueError, msgspec.MsgspecError) as error:
        raise PairError(
            f"{sender} sent a message that cannot be read: {error}",
            hint="the ranks must run the same version; restart all of them",
        ) from None


def step_limit_bytes(settings: Settings) -> int:
    """Most bytes of a message from rank 0: one step may admit a longest prompt on every lane, or name every pair."""
    return SMALL_BYTES + TOKEN_BYTES * settings.engine.lanes * settings.cache.context_tokens


def leader_ip(parallel: Parallel) -> str:
    """The one numeric address that rank 0 listens on; never all of them."""
    host = parallel.hosts[0] if parallel.hosts else "127.0.0.1"
    if host in EVERYWHERE:
        raise ConfigError(
            f"parallel.hosts[0] is {host!r}", hint="name the address of rank 0 on the link between the ranks"
        )
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UnavailableError(f"parallel.hosts[0] {host!r} has no address: {error.strerror}") from None


def all_local(parallel: Parallel) -> bool:
    """Whether every rank runs on this machine by the profile's word."""
    return len(set(parallel.hosts)) <= 1


def endpoint(parallel: Parallel, offset: int) -> str:
    ip = leader_ip(parallel)
    return f"tcp://{f'[{ip}]' if ':' in ip else ip}:{parallel.control_port + offset}"


class AllowFollowers:
    """The allow-list that the ZAP handler asks: the followers' public key and no other."""

    def __init__(self, keys: Keys) -> None:
        self._allowed = keys.followers.public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._allowed


def allow_followers(authenticator: Authenticator, keys: Keys) -> None:
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=AllowFollowers(keys))


def listen_tcp(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket on one address ("": all). Raises UnavailableError, PermissionError_, naming the setting."""
    family, kind, _, _, address = _resolve(host, port, setting)
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        kind_of = PermissionError_ if error.errno == errno.EACCES else UnavailableError
        raise kind_of(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
            where=setting,
            hint="another instance may be running (tidectl status); or choose another port",
        ) from None
    return listener


def _resolve(host: str, port: int, setting: str) -> Any:
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UnavailableError(f"{host!r} is no address of this machine: {error.strerror}", where=setting) from None


def listen(router: AnySocket, keys: Keys, address: str) -> AnySocket:
    """Rank 0's end. A ZAP handler must run in the socket's context before. Raises UnavailableError: port in use."""
    _configure(router, address, SMALL_BYTES)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.leader.public.encode(), keys.leader.secret.encode()
    router.zap_domain = ZAP_DOMAIN.encode()
    router.router_mandatory = True  # a send to a rank that hung up fails instead of vanishing
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(0)
        raise UnavailableError(
            f"rank 0 cannot listen on {address}: {os.strerror(error.errno or 0)}",
            hint="another instance may be running (tidectl status); or choose another parallel.control_port",
        ) from None
    return router


def connect(dealer: AnySocket, keys: Keys, address: str, identity: bytes, limit_bytes: int) -> AnySocket:
    """A follower's end; the connection is made in the background, again and again until rank 0 listens."""
    _configure(dealer, address, limit_bytes)
    dealer.curve_serverkey = keys.leader.public.encode()
    dealer.curve_publickey, dealer.curve_secretkey = keys.followers.public.encode(), keys.followers.secret.encode()
    dealer.identity = identity
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = 50, 500
    dealer.connect(address)
    return dealer


def _configure(sock: zmq.Socket[Any], address: str, limit_bytes: int) -> None:
    sock.maxmsgsize = limit_bytes  # a larger message closes its connection before it is held in memory
    sock.sndhwm = sock.rcvhwm = QUEUE_MESSAGES
    sock.linger = LINGER_MS
    sock.handshake_ivl = 5000
    sock.ipv6 = "[" in address
