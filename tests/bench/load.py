"""A load generator for streamed completions: raw asyncio, so that it costs little of the machine.

Time to first token (TTFT) runs from sending the request to the first event with text; time per
output token (TPOT) is the rest of the stream divided by the tokens after the first.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

REQUEST_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed answer as its caller saw it."""

    started_s: float
    ttft_s: float
    total_s: float
    num_tokens: int
    engine_s: float
    """Of `ttft_s`, as our server tells: queued and in prefill."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


async def stream_completion(base_url: str, api_key: str, body: dict[str, Any]) -> Completion:
    """POST `body` to `/completions` with `stream` and usage, and time what comes back."""
    url = urlsplit(base_url)
    payload = json.dumps(
        body | {"stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 20)
    head = (
        f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await _read_events(reader, started)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, started: float) -> Completion:
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read(2000)
    first_s, num_tokens, engine_ms = 0.0, 0, 0.0
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"data: [DONE]"):
                break
            continue
        event = orjson.loads(line[6:])
        assert "error" not in event, event
        if not first_s and event["choices"] and event["choices"][0].get("text"):
            first_s = time.perf_counter() - started
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
            timing = event.get("timing", {})  # a peer's server tells none
            engine_ms = timing.get("queued_ms", 0.0) + timing.get("prefill_ms", 0.0)
    assert num_tokens, "the stream ended without usage"
    total_s = time.perf_counter() - started
    return Completion(started, first_s or total_s, total_s, num_tokens, engine_ms / 1e3)


async def burst(
    base_url: str, api_key: str, bodies: list[dict[str, Any]]
) -> tuple[list[Completion], float]:
    """Send all at once; returns what came back and the seconds until the last one ended."""
    started = time.perf_counter()
    completions = await asyncio.gather(
        *(stream_completion(base_url, api_key, body) for body in bodies)
    )
    return completions, time.perf_counter() - started
