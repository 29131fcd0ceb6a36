"""Token ids for requests of which only lengths are known.

Equal where the trace says that a prefix is shared, different everywhere else, so that the real prefix
cache finds what it would find.
"""

from zlib import crc32

import numpy as np

from engine.simulator.trace import TracedRequest

NUM_IDS = 1 << 31


def prompt_token_ids(request: TracedRequest, index: int) -> list[int]:
    """The prompt of the request with this number."""
    own = request.prompt_tokens - request.prefix_tokens
    if request.prefix_tokens == 0:
        return _run(f"request {index}", own)
    return _run(f"prefix {request.prefix}", request.prefix_tokens) + _run(f"request {index}", own)


def _run(name: str, length: int) -> list[int]:
    """`length` ids that depend on the name and the place alone."""
    places = np.arange(length, dtype=np.int64)
    mixed: list[int] = ((places * 2_654_435_761 + crc32(name.encode())) % NUM_IDS).tolist()
    return mixed
