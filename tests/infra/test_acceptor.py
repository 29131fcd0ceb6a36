"""Connections are accepted many at a time, by the loop that the API runs on."""

import asyncio
import errno
import os
import socket
import time

import pytest
import uvloop

from infra import acceptor
from infra.acceptor import Acceptor

NUM_CONNECTIONS = 100


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]  # uvloop's is of no class of asyncio


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(NUM_CONNECTIONS)
    return listener


async def turns_until_all_are_answered(listener: socket.socket) -> int:
    """Each turn of the loop does as much work as a busy one."""
    clients = [socket.create_connection(listener.getsockname()) for _ in range(NUM_CONNECTIONS)]
    for client in clients:
        client.sendall(b"x")
        client.setblocking(False)
    waiting, turns = set(clients), 0
    while waiting:
        time.sleep(0.001)
        await asyncio.sleep(0)
        turns += 1
        for client in list(waiting):
            try:
                assert client.recv(1) == b"x"
            except BlockingIOError:
                continue
            waiting.remove(client)
        assert turns < 10 * NUM_CONNECTIONS
    for client in clients:
        client.close()
    return turns


def test_a_hundred_connections_do_not_take_a_hundred_turns_of_the_loop() -> None:
    async def serve() -> int:
        with listening() as listener:
            accepting = Acceptor(listener, Echo)
            accepting.start()
            turns = await turns_until_all_are_answered(listener)
            accepting.stop()
            return turns

    assert uvloop.run(serve()) < NUM_CONNECTIONS / 2


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.05)

    class Exhausted(socket.socket):
        num_refused = 0

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_refused < 2:
                Exhausted.num_refused += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    async def serve() -> None:
        with Exhausted() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            accepting = Acceptor(listener, Echo)
            accepting.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"x")
            async with asyncio.timeout(5):
                assert await reader.read(1) == b"x"
            writer.close()
            await writer.wait_closed()
            accepting.stop()

    uvloop.run(serve())
    assert Exhausted.num_refused == 2
