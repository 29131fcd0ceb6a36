"""What a client without a key can make a connection keep, over real sockets and uvicorn's parser."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from infra import connection
from infra.connection import HEAD_BYTES_MAX, Connection

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body was."""
    num_bytes, is_more = 0, True
    while is_more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{num_bytes} bytes".encode()})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(answer, lifespan="off")
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1]
    server.close()


async def told(port: int, *pieces: bytes) -> bytes:
    """What the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "piece",
    [b"a" * 10_000, b"x: y\r\n" * 2_000],
    ids=["one header", "many headers"],
)
async def test_a_head_without_an_end_is_refused(port: int, piece: bytes) -> None:
    begin = HEAD if piece.endswith(b"\n") else HEAD + b"x: "
    said = await told(port, begin, *[piece] * (2 * HEAD_BYTES_MAX // len(piece)))
    assert said.startswith(b"HTTP/1.1 431 ") or said == b"reset"


async def test_an_address_without_an_end_is_refused(port: int) -> None:
    said = await told(port, b"GET /", *[b"a" * 10_000] * 14)
    assert said.startswith(b"HTTP/1.1 431 ") or said == b"reset"


async def test_trailers_without_an_end_are_refused(port: int) -> None:
    begin = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    said = await told(port, begin, *[b"x: y\r\n" * 2_000] * 14)
    assert b" 200 " not in said


async def test_bodies_may_be_longer_than_heads(port: int) -> None:
    size = 5 * HEAD_BYTES_MAX
    whole = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size + b"a" * size
    chunk = b"%x\r\n" % size + b"a" * size + b"\r\n0\r\n\r\n"
    chunked = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunk
    for request in (whole, chunked):
        pieces = [request[at : at + 10_000] for at in range(0, len(request), 10_000)]
        assert b"%d bytes" % size in await told(port, *pieces)


@pytest.mark.parametrize(
    "pieces",
    [[], [b"GET / HTTP/1.1\r\nho"], [HEAD + b"content-length: 0\r\n\r\n", b"\r\n"]],
    ids=["nothing", "half a head", "an empty line after a request"],
)
async def test_a_client_that_finishes_no_head_is_let_go(
    port: int, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with asyncio.timeout(5):
        await told(port, *pieces)


async def test_an_answer_may_take_longer_than_a_head(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    begin = HEAD + b"connection: close\r\ncontent-length: 90\r\n\r\n"
    said = await told(port, begin, *[b"a"] * 90)
    assert b"90 bytes" in said


async def test_requests_that_come_before_an_answer_hear_that_the_connection_is_gone() -> None:
    """uvicorn tells only the last one; the first would go on, and write to what is closed."""
    heard: list[str] = []
    begun = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        heard.append((await receive())["type"])

    config = uvicorn.Config(wait, lifespan="off")
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    writer.write((HEAD + b"content-length: 0\r\n\r\n") * 3)
    await begun.wait()
    writer.transport.abort()
    async with asyncio.timeout(5):
        while not heard:
            await asyncio.sleep(0.005)
    assert heard == ["http.disconnect"], "those behind it are never begun"
    server.close()


async def test_requests_that_come_before_an_answer_are_answered_in_their_order(port: int) -> None:
    requests = [b"content-length: %d\r\n\r\n" % size + b"a" * size for size in (3, 0, 7)]
    said = await told(
        port,
        *[HEAD + b"connection: keep-alive\r\n" + each for each in requests],
        HEAD + b"connection: close\r\ncontent-length: 1\r\n\r\na",
    )
    order = [said.index(b"%d bytes" % size) for size in (3, 0, 7, 1)]
    assert order == sorted(order)


@pytest.mark.parametrize("offer", [b"Upgrade: h2c\r\n", b"upgrade:h2c \r\nx: y\r\n"])
async def test_a_request_that_offers_http_2_is_read_with_its_body(port: int, offer: bytes) -> None:
    """As Java's client sends it; in one piece or in two."""
    head = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AA\r\n" + offer
    head += b"content-length: 14\r\n\r\n"
    body = b"\r\nUpgrade: h2c"
    close = HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    for pieces in ([head + body], [head, body]):
        said = await told(port, *pieces, close)
        assert b"14 bytes" in said
        assert b"0 bytes" in said, "the connection goes on"
