"""Pieces of a body past ASGI: between uvicorn's own, in their order, and only where nobody must wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from api.middleware import DIRECT_BODY
from infra.connection import Connection
from infra.direct_body import ChunkedBody


class Application:
    """Runs `script` for the one request that a test sends."""

    def __init__(self) -> None:
        self.was_ready: list[bool] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        direct: ChunkedBody = scope[DIRECT_BODY]
        self.was_ready.append(direct.is_ready)
        headers = [(b"content-length", b"1")] if scope["path"] == "/whole" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.was_ready.append(direct.is_ready)
        if scope["path"] == "/whole":
            await send({"type": "http.response.body", "body": b"a"})
            return
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        direct.write(b"b" * 20)
        if scope["path"] == "/long":
            while direct.is_ready:
                direct.write(b"c" * HIGH_WATER_LIMIT)
        await send({"type": "http.response.body", "body": b"d"})
        self.was_ready.append(direct.is_ready)


@asynccontextmanager
async def serving(application: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(application, lifespan="off")
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Application, int]]:
    application = Application()
    async with serving(application) as port:
        yield application, port


async def test_it_is_not_ready_once_the_connection_closes() -> None:
    """A turn of the loop before anybody is told; uvloop's transport raises at a write then."""
    was_ready: list[bool] = []

    async def close(scope: Any, receive: Any, send: Any) -> None:
        direct: ChunkedBody = scope[DIRECT_BODY]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        was_ready.append(direct.is_ready)
        direct._transport.close()
        was_ready.append(direct.is_ready)
        await send({"type": "http.response.body", "body": b""})

    async with serving(close) as port:
        await told(port, b"/")
    assert was_ready == [True, False]


async def told(port: int, path: bytes, *, pause_s: float = 0.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
    await asyncio.sleep(pause_s)
    async with asyncio.timeout(10):
        said = await reader.read()
    writer.close()
    return said.partition(b"\r\n\r\n")[2]


async def test_direct_pieces_stand_between_the_servers_own(
    served: tuple[Application, int],
) -> None:
    application, port = served
    assert await told(port, b"/") == b"1\r\na\r\n14\r\n%b\r\n1\r\nd\r\n0\r\n\r\n" % (b"b" * 20)
    assert application.was_ready == [False, True, False]


async def test_a_body_that_is_not_chunked_has_no_direct_way(
    served: tuple[Application, int],
) -> None:
    application, port = served
    assert await told(port, b"/whole") == b"a"
    assert not any(application.was_ready)


async def test_it_is_not_ready_while_the_client_does_not_read(
    served: tuple[Application, int],
) -> None:
    """The application ends its loop: what the client has not read is too much. Nothing is lost."""
    _, port = served
    said = await told(port, b"/long", pause_s=0.2)
    assert said.count(b"c") % HIGH_WATER_LIMIT == 0
    assert said.count(b"c") >= HIGH_WATER_LIMIT
    assert said.endswith(b"c\r\n1\r\nd\r\n0\r\n\r\n")
