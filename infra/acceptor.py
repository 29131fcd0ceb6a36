"""Accepting connections many at a time.

uvloop's own servers accept one connection a turn of the loop (libuv does). A turn that writes 150
frames takes milliseconds, so that while thousands of streams are served, a hundred new ones a second
wait for each other: 100 at once took 1.5 s where a turn takes 10 ms, and take 0.06 s here.
"""

import asyncio
import socket
from collections.abc import Callable

import structlog

ACCEPTS_PER_TURN = 64
"""More wait for the next turn: other processes on the same socket want some, too."""
PAUSE_S = 0.5
"""After the process has run out of descriptors or memory."""

log = structlog.get_logger()


class Acceptor:
    """Gives each connection of `listener` a protocol of its own, until it is stopped."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept nothing more; whoever knocks waits for another process, or is refused."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot_accept", error=error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self.start)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            log.debug("connection_lost_at_once", error=error.strerror)
            connection.close()
