"""What the C library's heap does with freed memory; for processes without torch too."""

import ctypes

# Parameters of glibc's mallopt.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> None:
    """Have glibc keep what steps free, instead of giving it back and faulting it in again.

    A step frees megabytes and asks for them again: with page faults of 20 us prefill took twice as
    long when measured. All threads take from one heap: a heap for each keeps what the others lack,
    and a worker still grew by 17 to 44 MB in its second thousand of requests (4 MB with one).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        library.mallopt(M_TOP_PAD, 64 << 20)
        library.mallopt(M_ARENA_MAX, 1)


def release_freed_memory() -> None:
    """Give back to the system what is free now; `keep_freed_memory` stays in force for later."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
