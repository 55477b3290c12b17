"""What a profile may say: each key's own type and limits, and the combinations that cannot work.

Values travel as `dotted key -> value`. A rule over several keys runs when all of its keys hold valid values, so that
one wrong key never hides what is wrong elsewhere.
"""

import difflib
import ipaddress
import math
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tided.profile.problems import Severity
from tided.profile.schema import Key, choices, element_type, wanted

Values = dict[str, Any]


_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


class Fault(NamedTuple):
    """What is wrong with a value; `element` is set when only one element of an array is."""

    message: str
    rule: str
    suggestion: str = ""
    element: int | None = None


def faults_of(key: Key, value: Any) -> Iterator[Fault]:
    """Everything that a single key's value does wrong by itself."""
    rule = f"{key.dotted}: {key.text}"
    if isinstance(value, list) and (inner := element_type(key.type)) is not None:
        for index, element in enumerate(value):
            for message in _wrong(f"element {index + 1} of '{key.dotted}'", inner, element):
                yield Fault(message, rule, element=index)
        return
    for message in _wrong(f"'{key.dotted}'", key.type, value):
        yield Fault(message, rule, nearest(value, choices(key.type)) if isinstance(value, str) else "")


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def _wrong(name: str, annotation: Any, value: Any) -> Iterator[str]:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        yield f"{name} must be {wanted(annotation)}, not {_words(value)}"
        return
    if isinstance(value, float) and not math.isfinite(value):  # NaN passes every limit
        yield f"{name} must be {wanted(annotation)}, not {_words(value)}"
    if isinstance(value, str) and not (value.isprintable() and value == value.strip()):
        yield f"{name} holds a control character, or a blank at its start or end: {_words(value)}"


class Rule(NamedTuple):
    """`broken` gets the values of `keys` in order and returns what is wrong, or "". The first key is pointed at."""

    keys: tuple[str, ...]
    text: str
    broken: Callable[..., str]
    severity: Severity = "error"


def _pool(pool_tokens: int, context_tokens: int) -> str:
    return (
        f"a pool of {pool_tokens} tokens cannot hold one request of {context_tokens} tokens"
        if pool_tokens < context_tokens
        else ""
    )


def _hosts(hosts: tuple[str, ...], ranks: int) -> str:
    return f"{len(hosts)} hosts for {ranks} ranks" if hosts and len(hosts) != ranks else ""


def _loopback_hosts(hosts: tuple[str, ...]) -> str:
    local = [host for host in hosts if _is_loopback(host)]
    return f"the other hosts cannot reach a rank at {local[0]}" if local and len(local) < len(hosts) else ""


def _data_port(data_port: int, control_port: int, ranks: int) -> str:
    taken = ranks > 1 and data_port in (control_port, control_port + 1)
    return f"port {data_port} is the control plane's ({control_port} and {control_port + 1})" if taken else ""


def _server_port(port: int, control_port: int, data_port: int, ranks: int) -> str:
    ports = (control_port, control_port + 1, data_port)
    return f"port {port} is used between the ranks (they use {ports})" if ranks > 1 and port in ports else ""


def _peer_timeout(peer_timeout_s: float, heartbeat_s: float) -> str:
    if peer_timeout_s >= 2 * heartbeat_s:
        return ""
    return f"a peer would count as dead after {peer_timeout_s:g} s with a heartbeat each {heartbeat_s:g} s"


def _idle_audits(idle_s: float, remember_tokens: int, sync_slots: int) -> str:
    if not idle_s or (remember_tokens and sync_slots):
        return ""
    return "answers are to be audited when it is quiet, but " + (
        "none is remembered (audit.remember_tokens = 0)"
        if sync_slots
        else "no expert could be read (tide.sync_slots = 0)"
    )


def _pack_dir(source: str, pack_dir: str) -> str:
    return "records are to come from packs, but experts.pack_dir is empty" if source == "pack" and not pack_dir else ""


def _verify_reads(verify_reads: bool, source: str) -> str:
    return "a checkpoint has no checksums to verify" if verify_reads and source != "pack" else ""


def _loop_break(loop_break: int) -> str:
    return "every token comes once: no answer would have a second one" if loop_break == 1 else ""


def _exit_below(exit_below_bytes: int, reserve_bytes: int) -> str:
    if exit_below_bytes <= reserve_bytes:
        return ""
    return f"a start may leave {reserve_bytes} bytes free, and ends again below {exit_below_bytes}"


def _vision_rank(rank: int, ranks: int) -> str:
    return f"there is no rank {rank}: there are {ranks}, from 0 on" if rank >= ranks else ""


def _url_hosts(hosts: tuple[str, ...]) -> str:
    wrong = [host for host in hosts if not _HOST_NAME.fullmatch(host)]
    return f"'{wrong[0]}' is no name of a host" if wrong else ""


def _file_exists(path: str) -> str:
    return f"there is no file {path}" if path and not is_file(path) else ""


def is_file(path: str) -> bool:
    """Never raises, whatever the path; Path.is_file does for one that is too long or behind a closed directory."""
    return os.path.isfile(path)  # noqa: PTH113


def _open_server(host: str, api_keys_file: str, api_keys_credential: str, allow_open: bool) -> str:
    closed = api_keys_file or api_keys_credential or _is_loopback(host)
    return "" if closed or allow_open else f"anyone who reaches {host} could ask"


def _opened_server(host: str, api_keys_file: str, api_keys_credential: str, allow_open: bool) -> str:
    """What was allowed is said all the same."""
    closed = api_keys_file or api_keys_credential or _is_loopback(host)
    return f"anyone who reaches {host} may ask" if allow_open and not closed else ""


_WHO_MAY_ASK = ("server.host", "server.api_keys_file", "server.api_keys_credential", "server.allow_open")

RULES: tuple[Rule, ...] = (
    Rule(("cache.pool_tokens", "cache.context_tokens"), "cache.pool_tokens >= cache.context_tokens", _pool),
    Rule(("parallel.hosts", "parallel.ranks"), "one host a rank, or none: all ranks on this machine", _hosts),
    Rule(("parallel.hosts",), "hosts name the addresses by which the ranks reach each other", _loopback_hosts),
    Rule(
        ("parallel.data_port", "parallel.control_port", "parallel.ranks"),
        "parallel.data_port is neither control_port nor control_port + 1",
        _data_port,
    ),
    Rule(
        ("server.port", "parallel.control_port", "parallel.data_port", "parallel.ranks"),
        "server.port is none of the ports of [parallel]",
        _server_port,
    ),
    Rule(
        ("parallel.peer_timeout_s", "parallel.heartbeat_s"),
        "parallel.peer_timeout_s >= 2 x parallel.heartbeat_s",
        _peer_timeout,
    ),
    Rule(("experts.source", "experts.pack_dir"), "experts.pack_dir names where `tidectl pack` wrote", _pack_dir),
    Rule(
        ("experts.verify_reads", "experts.source"), 'experts.verify_reads needs experts.source = "pack"', _verify_reads
    ),
    Rule(("engine.loop_break",), "engine.loop_break is 0 (off), or 2 and more", _loop_break),
    Rule(("vision.rank", "parallel.ranks"), "vision.rank < parallel.ranks", _vision_rank),
    Rule(
        ("memory.exit_below_bytes", "memory.reserve_bytes"),
        "memory.exit_below_bytes <= memory.reserve_bytes",
        _exit_below,
    ),
    Rule(
        ("audit.idle_s", "audit.remember_tokens", "tide.sync_slots"),
        "audit.idle_s needs audit.remember_tokens, and slots for experts to be read into (tide.sync_slots)",
        _idle_audits,
    ),
    Rule(("vision.url_hosts",), 'hosts by name, "images.example.org": without https:// and without a port', _url_hosts),
    Rule(("parallel.key_file",), "a key file that is named must be there", _file_exists),
    Rule(("server.api_keys_file",), "a key file that is named must be there", _file_exists),
    Rule(
        _WHO_MAY_ASK,
        "set server.api_keys_file, or server.allow_open, when others can reach the address",
        _open_server,
    ),
    Rule(_WHO_MAY_ASK, "set server.api_keys_file when others can reach the address", _opened_server, "note"),
)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _words(value: Any) -> str:
    """A TOML value as a person would name it, short."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            shown = value if len(value) <= 40 else value[:37] + "..."
            return f"the string {shown!a}" if not shown.isprintable() else f'the string "{shown}"'
        case int():
            return f"the integer {value}" if abs(value) < 10**24 else "so large an integer"
        case float():
            return f"the number {value:g}"
        case dict():
            return "a table"
        case list():
            return "an array" if value else "an empty array"
    return "a date or time"
