"""The gateway's benchmark measures what it says: frames, delays, misses, and who kept what."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gateway import cells, figures, servers
from tests.bench.gateway.cells import TOKENS_PER_S, Served
from tests.bench.gateway.client import Connection, Exchange, Target
from tests.bench.gateway.words import NUM_WORDS, Words


@pytest.fixture(scope="module")
def words(default_model_directory: Path) -> Words:
    return Words(default_model_directory)


@pytest.fixture(scope="module")
def upstream(
    default_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with servers.null_server(default_model_directory, tmp_path_factory.mktemp("logs")) as served:
        yield served


def test_a_word_says_how_long_ago_it_was_said(words: Words) -> None:
    said = words.texts[NUM_WORDS - 2].encode()
    assert words.delay_ms(said, 10 * NUM_WORDS + 1.5) == 3.5


async def test_every_frame_of_a_stream_is_counted_and_timed(upstream: Served, words: Words) -> None:
    measured = await cells.open_streams(
        upstream, words, num_streams=20, opened_per_s=100, steady_s=1.5
    )
    assert measured.num_failed == measured.frames_missed == 0
    assert measured.frames_expected >= 20 * 1.5 * TOKENS_PER_S
    assert 0 <= measured.delay_ms_p50 < 1_000


async def test_a_closed_loop_counts_what_was_answered(upstream: Served, words: Words) -> None:
    measured = await cells.closed_loop(upstream, words, concurrency=4, seconds=0.3)
    assert measured.num_failed == 0
    assert measured.requests_per_s > 10


async def test_a_stream_that_is_cut_misses_its_frames(words: Words) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = f'data: {{"choices":[{{"delta":{{"content":"{words.texts[0]}"}}}}]}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(words), host, port)
    target = Target(f"http://{host}:{port}", "null", {})
    exchange = Exchange(is_streamed=True, due_ms=0.0)
    await connection.send(target.request(stream=True, max_tokens=5), exchange)
    server.close()
    assert (exchange.num_frames, exchange.last_ms) == (1, 0.0)


def test_figures_say_what_was_added_and_which_promise_was_broken() -> None:
    rows = [
        {"gateway": name, "cell": "open", "ttft_ms_p50": p50, "ttft_ms_p99": p99, "num_answered": 9}
        for name, p50, p99 in (("no gateway", 1, 2), ("nCompass", 4.5, 20), ("LiteLLM", 18, 60))
    ]
    found = figures.figures(rows)
    assert found["added_ttft_ms_p50"] == 3.5
    kept = {row["figure"]: row["kept"] for row in figures.promises(found)}
    assert kept == {"added_ttft_ms_p50": "yes", "added_ttft_ms_p99": "NO"}
    assert figures.beside_peers(found, rows)[0]["litellm ratio"] == pytest.approx(17 / 3.5)


def test_a_peer_that_answers_nothing_has_no_figures_and_the_table_says_why() -> None:
    rows = [
        {"gateway": name, "cell": "open", "ttft_ms_p50": p50, "ttft_ms_p99": p50, "num_answered": n}
        for name, p50, n in (("no gateway", 1, 9), ("nCompass", 4.5, 9), ("Portkey", math.inf, 0))
    ]
    rows.append({"gateway": "Portkey", "cell": "closed", "requests_per_s": 700.0})
    found = figures.figures(rows)
    assert "portkey_added_ttft_ms_p50" not in found
    assert found["portkey_rps_per_core"] == 700.0
    ttft, _, rate = figures.beside_peers(found, rows)
    assert (ttft["portkey"], ttft["portkey ratio"], ttft["litellm"]) == ("answered nothing", "", "")
    assert rate["portkey"] == 700.0


@pytest.mark.parametrize(
    "row",
    [
        {"cell": "open", "num_answered": 0},
        {"cell": "closed", "requests_per_s": 0.0},
        {"cell": "streams", "num_streams": 300, "num_failed": 300},
        {"cell": "stall", "status": 500},
    ],
)
def test_a_cell_without_an_answer_is_silent(row: dict[str, Any]) -> None:
    assert figures.is_silent(row)


async def test_a_server_that_refuses_streams_is_not_measured(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
        is_streamed = json.loads(await reader.readexactly(length))["stream"]
        writer.write(b"HTTP/1.1 %b\r\n" % (b"500 No" if is_streamed else b"200 OK"))
        writer.write(b"content-length: 9\r\nconnection: close\r\n\r\nimmutable")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    (tmp_path / "peer.log").write_text("what it says of itself")
    target = Target(f"http://{host}:{port}", "null", {})
    with pytest.raises(servers.NoAnswer, match="500 immutable\nwhat it says of itself"):
        await asyncio.to_thread(servers._wait_for, target, tmp_path / "peer.log", 0.5)
    server.close()
