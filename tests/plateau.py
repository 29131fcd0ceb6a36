"""How much memory a process keeps of what is over."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


def traced_bytes() -> int:
    """What Python objects take that were made since `tracing` began and are still there."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@contextmanager
def tracing() -> Iterator[None]:
    """Follow every allocation; several times slower."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
