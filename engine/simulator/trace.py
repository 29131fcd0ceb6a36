"""A load: which requests arrive when, how long they are, and what they share.

One JSON object per line, sorted or not:

    {"arrival": 0.25, "prompt": 900, "output": 120, "tenant": "a", "prefix": "b", "prefix_tokens": 640}

`arrival` in seconds, `prompt` and `output` in tokens. `tenant` may be left out. The first
`prefix_tokens` tokens of the prompt (all of it where left out) are those of `prefix`, and are
the same for every request of the tenant that names it. `max_output`, the most that the
caller allows, is what an engine knows of the length beforehand.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import TraceRejected

MAX_OUTPUT_TOKENS = 2048
"""What a caller allows where the trace does not say: more than nearly every answer is long."""
MAX_REQUESTS = 2_000_000

Positive = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a load."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "tenant"
    prefix: str = ""
    prefix_tokens: int = 0
    max_output_tokens: int = MAX_OUTPUT_TOKENS

    @property
    def authorized_tokens(self) -> int:
        """Output tokens that the engine must expect to be asked for."""
        return max(self.output_tokens, self.max_output_tokens)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    arrival: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    prompt: Positive
    output: Positive
    tenant: Annotated[str, msgspec.Meta(min_length=1)] = "tenant"
    prefix: str = ""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_output: Positive = MAX_OUTPUT_TOKENS


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file by arrival. Raises TraceRejected, which names the line."""
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TracedRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_parse(decoder, line, f"{path}:{number}"))
                if len(requests) > MAX_REQUESTS:
                    raise TraceRejected(f"{path} has more than {MAX_REQUESTS:,} requests")
    except OSError as fault:
        raise TraceRejected(f"{path} cannot be read: {fault.strerror}") from fault
    if not requests:
        raise TraceRejected(f"{path} has no request")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse(decoder: "msgspec.json.Decoder[_Line]", text: bytes, place: str) -> TracedRequest:
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise TraceRejected(f"{place}: {fault}") from fault
    shared = line.prompt if line.prefix_tokens is None else line.prefix_tokens
    if line.prefix_tokens and not line.prefix:
        raise TraceRejected(f"{place}: `prefix_tokens` without a `prefix`")
    if shared > line.prompt:
        raise TraceRejected(f"{place}: `prefix_tokens` is more than `prompt`")
    return TracedRequest(
        arrival_s=line.arrival,
        prompt_tokens=line.prompt,
        output_tokens=line.output,
        tenant=line.tenant,
        prefix=line.prefix,
        prefix_tokens=shared if line.prefix else 0,
        max_output_tokens=line.max_output,
    )


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Write what `read_trace` reads."""
    encode = msgspec.json.encode
    with path.open("wb") as lines:
        for request in requests:
            shared = request.prefix_tokens if request.prefix else None
            line = _Line(
                arrival=request.arrival_s,
                prompt=request.prompt_tokens,
                output=request.output_tokens,
                tenant=request.tenant,
                prefix=request.prefix,
                prefix_tokens=shared,
                max_output=request.max_output_tokens,
            )
            lines.write(encode(line) + b"\n")


def mean_rate(requests: list[TracedRequest]) -> float:
    """Requests per second from the first arrival to the last; 0 where all arrive at once."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else 0.0


def at_rate(requests: list[TracedRequest], rate: float) -> list[TracedRequest]:
    """The same requests with their arrivals drawn out or pressed together to `rate` per second."""
    current = mean_rate(requests)
    if current == 0:
        raise TraceRejected("requests that all arrive at once have no rate that could be changed")
    first_s = requests[0].arrival_s
    factor = current / rate
    return [
        replace(request, arrival_s=(request.arrival_s - first_s) * factor) for request in requests
    ]
