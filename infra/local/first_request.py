"""The proof that the platform works: one real streamed request, and what it cost."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from infra.errors import PartFailed

QUESTION = "In one sentence: why does the sky look blue?"
MAX_TOKENS = 60
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back."""

    ttft_s: float
    num_tokens: int
    cost: str
    balance: str


def ask(base_url: str, api_key: str, model: str, show: Callable[[str], None]) -> Answered:
    """Send one chat request, hand each piece of the answer to `show`. Raises PartFailed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    ttft_s, usage = 0.0, None
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        with (
            httpx.Client(timeout=TIMEOUT_S) as client,
            client.stream(
                "POST", f"{base_url}/chat/completions", json=body, headers=headers
            ) as response,
        ):
            if response.status_code != 200:
                raise PartFailed(f"the first request failed: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise PartFailed(f"the first request failed: {event['error']['message']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        ttft_s = ttft_s or time.perf_counter() - started
                        show(text)
    except httpx.HTTPError as fault:
        raise PartFailed(f"the first request failed: {fault!r}") from fault
    if usage is None:
        raise PartFailed("the first request ended without usage")
    return Answered(
        ttft_s=ttft_s,
        num_tokens=usage["completion_tokens"],
        cost=usage["cost"],
        balance=usage["balance_remaining"],
    )
