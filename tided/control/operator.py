"""The operator's way into a running rank 0: a socket in the state directory, which nobody else may enter (0700).

A client writes one line, a JSON object of at most a page, and reads one: what was asked, or `Refused`. Clients of the
API have no such way, whatever their keys: who may ask for answers need not be who owns the machine.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from tided.errors import NotRunningError, TideError, UnavailableError, UsageError, told

log = logging.getLogger("daemon")

NAME = "control.sock"
MOST_BYTES = 4096
LINE_S = 10.0  # for a client's line to be there
ANSWER_S = 120.0  # the engine looks at what it is asked between two steps


class AskBudget(msgspec.Struct, frozen=True, tag="budget", forbid_unknown_fields=True):
    """Another budget of experts: so many, or as many as so many bytes on each rank hold; neither: how it stands."""

    resident: int | None = None
    nbytes: int | None = None
    apply: bool = False


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    what: str
    hint: str = ""


Handler = Callable[[AskBudget], Awaitable[msgspec.Struct]]
_DECODER = msgspec.json.Decoder(AskBudget)


class OperatorSocket:
    """Rank 0's end, on its loop."""

    def __init__(self, server: asyncio.Server, path: Path) -> None:
        self._server, self._path = server, path

    @classmethod
    async def open(cls, directory: Path, handler: Handler) -> Self:
        """Raises OSError. What an earlier run left is replaced."""
        path = directory / NAME
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as name:
            listener.bind(name)
        path.chmod(0o600)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _serve(reader, writer, handler)

        return cls(await asyncio.start_unix_server(serve, sock=listener, limit=MOST_BYTES), path)

    async def close(self) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    reply: msgspec.Struct
    try:
        reply = await handler(await _question(reader))
    except TideError as error:
        reply = Refused(error.what, error.hint)
    except TimeoutError:
        reply = Refused("the answer took too long")
    except Exception as error:
        log.exception("an operator's question failed")
        reply = Refused(f"the question failed: {told(error)}", hint="the log has the trace")
    with suppress(OSError):
        writer.write(msgspec.json.encode(reply) + b"\n")
        await writer.drain()
    writer.close()


async def _question(reader: asyncio.StreamReader) -> AskBudget:
    """Raises UsageError for what is none, UnavailableError where no line came."""
    try:
        async with asyncio.timeout(LINE_S):
            return _DECODER.decode(await reader.readline())
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"this is no question that an operator has: {error}") from error
    except (OSError, TimeoutError) as error:
        raise UnavailableError("no line came") from error


def ask(directory: Path, question: AskBudget) -> dict[str, Any]:
    """What rank 0 of this state directory answers. Raises NotRunningError, UnavailableError; TideError for a refusal,
    in its own words."""
    path = directory / NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with _short(path) as name:
                connection.connect(name)
        except OSError as error:
            hint = (
                "`tidectl start PROFILE` starts one; on a pair, ask on the node of rank 0, as the user that it runs as"
            )
            raise NotRunningError(
                f"no server listens ({error.strerror or error})", where=str(path), hint=hint
            ) from error
        try:
            connection.sendall(msgspec.json.encode(question) + b"\n")
            found = msgspec.json.decode(_line(connection))
        except (OSError, msgspec.DecodeError) as error:
            raise UnavailableError(f"the server did not answer ({error})", where=str(path)) from error
    if not isinstance(found, dict):
        raise UnavailableError("the server's answer is none", where=str(path))
    if found.get("type") == "refused":
        raise TideError(str(found.get("what")), hint=str(found.get("hint") or ""))
    return found


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and (part := connection.recv(MOST_BYTES)):
        data += part
    return data


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for the socket that the kernel takes, which allows 107 bytes: by its directory's descriptor."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
