"""The listening socket: who may hold a connection, and how long the head of a request may take to come.

A connection is idle until the head of a request is whole, and when its reply is written. There are never more than
`server.max_connections`: whoever comes then takes the place of the one that has been idle longest, and is refused where
all are busy. So neither thousands of idle connections nor heads that drip keep others out. A reply that is still being
read is not cut; who takes nothing of it from one look to the next, `Limits.stall_s` later, is dropped. Bodies and
streams have limits of their own (`ports.Limits`).
"""

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Self, cast

from aiohttp import StreamReader, web

from tided.api.context import CONTEXT
from tided.api.heads import FULL, LATE, Handler

_HEAD_END = b"\r\n\r\n"


class Door:
    """An application's open port. `close` in any case."""

    def __init__(self, app: web.Application) -> None:
        server, limits = app[CONTEXT].served.settings.server, app[CONTEXT].limits
        self.head_s, self.stall_s, self._most = server.head_timeout_s, limits.stall_s, server.max_connections
        self.held: set[Connection] = set()
        self.idle: dict[Connection, None] = {}  # in the order in which they became it
        # Its handlers end with their client's connection, also while a request waits in the queue.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, handle_signals=False, shutdown_timeout=limits.close_s
        )
        self._app = app
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, app: web.Application, listener: socket.socket) -> Self:
        """`listener` is bound; it is closed with the door, or by its owner when this fails."""
        door = cls(app)
        await door._runner.setup()
        door._server = await asyncio.get_running_loop().create_server(door._connection, sock=listener)
        return door

    async def close(self) -> None:
        """Closes the port and waits for replies under way."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def admits(self, connection: "Connection") -> bool:
        if len(self.held) >= self._most and (longest := next(filter(Connection.at_rest, self.idle), None)):
            longest.close()
        if len(self.held) >= self._most:
            return False
        self.held.add(connection)
        self.idle[connection] = None
        return True

    def forget(self, connection: "Connection") -> None:
        self.held.discard(connection)
        self.idle.pop(connection, None)

    def _connection(self) -> "Connection":
        server = self._runner.server
        assert server is not None, "connections come between setup and cleanup"
        return Connection(self, Handler(self._app, server))


class Connection(asyncio.Protocol):
    """Between a transport and aiohttp's handler of it.

    Two timers: of a head that has begun, and of a reply that is not all sent when its request is over. A reply that
    fits into the transport's buffer never pauses writing, and aiohttp's own close waits for that buffer for ever:
    so what is left in it is looked at, whatever else happens.
    """

    def __init__(self, door: Door, handler: asyncio.Protocol) -> None:
        self._door, self._handler = door, handler
        self._transport: asyncio.Transport | None = None  # None: not let in
        self._timer: asyncio.TimerHandle | None = None  # of a head that has begun
        self._look: asyncio.TimerHandle | None = None  # the next, while anything may be unread
        self._unread: int | None = None  # bytes, at the last look; None: none, or something has been taken since
        self._busy = self._paused = False
        self._body: StreamReader | None = None  # of the request that is busy
        self._beyond = False  # whether what came last is behind that request
        self._behind = -1  # bytes that came with a head, after its end; -1: it has none yet
        self._end = b""  # of what came: its last four bytes

    @classmethod
    def of(cls, request: web.Request) -> Self | None:
        """None: its client has gone."""
        protocol = request.transport.get_protocol() if request.transport is not None else None
        return protocol if isinstance(protocol, cls) else None

    def begun(self, request: web.Request) -> None:
        """The head of a request is whole."""
        body, self._busy = request.content, True
        self._body, self._beyond = body, not request.body_exists or (body.is_eof() and self._behind > body.total_bytes)
        self._door.idle.pop(self, None)
        self._stop_timer()
        if self.at_rest():
            self._unread = None

    def over(self) -> None:
        """The request has its reply, which is about to be written."""
        self._busy, self._body, self._behind = False, None, -1
        if self not in self._door.held:
            return
        self._door.idle[self] = None
        self._watch()
        if self._beyond and self._end != _HEAD_END:  # part of the next head, or a whole one with a body
            self._start_timer()

    def at_rest(self) -> bool:
        """All that was said has been sent."""
        return self._transport is None or not self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._door.forget(self)
        if self._transport is not None:
            self._transport.close()
            self._watch()  # it waits for what is not sent

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's own class is none by name
        if self._door.admits(self):
            self._transport = stream
            self._handler.connection_made(stream)
        else:
            stream.write(FULL)
            stream.close()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        body, before = self._body, 0
        if body is None:
            self._start_timer()
            self._count_behind(data)
        else:
            before = body.total_bytes
        self._end = (self._end + data[-4:])[-4:]
        self._handler.data_received(data)
        if body is not None and body.is_eof():
            self._beyond |= len(data) > body.total_bytes - before

    def _count_behind(self, data: bytes) -> None:
        if self._behind >= 0:
            self._behind += len(data)
        elif (at := (seen := self._end[-3:] + data).find(_HEAD_END)) >= 0:
            self._behind = len(seen) - at - len(_HEAD_END)

    def eof_received(self) -> bool | None:
        return None if self._transport is None else self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._look is not None:
            self._look.cancel()
        self._door.forget(self)
        if self._transport is not None:
            self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._paused = True
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._paused, self._unread = False, None
        if self._timer is not None:
            self._stop_timer()
            self._start_timer()
        self._handler.resume_writing()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._door.head_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._paused:  # whole heads wait for the reader of the reply before theirs, who has limits of its own
            self._start_timer()
        elif self._transport is not None:
            self._transport.write(LATE)
            self.close()

    def _watch(self) -> None:
        if self._look is None and self._transport is not None:
            self._look = asyncio.get_running_loop().call_later(self._door.stall_s, self._looked)

    def _looked(self) -> None:
        """While a request is busy its own limits count: a stream's (`sse.EventStream`), a body's."""
        assert self._transport is not None
        self._look, left = None, _unread_bytes(self._transport)
        if not self._busy and self._unread is not None and left >= self._unread:
            self._transport.abort()
        elif left:
            self._unread = None if self._busy else left
            self._watch()
        else:
            self._unread = None


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What the client's machine has not acknowledged, once the socket is full; 0 before. The socket takes more only
    when a third of it is free: who reads slowly would seem not to read."""
    left = transport.get_write_buffer_size()
    if left:
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        left += int.from_bytes(queued, sys.byteorder)
    return left
