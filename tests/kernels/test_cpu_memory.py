"""Where the weights and the KV cache lie."""

import gc
from pathlib import Path

import pytest
import torch

from kernels.cpu.memory import HUGE_PAGE, Arena, lazy_zeros

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def facts_of_mapping(address: int) -> dict[str, str]:
    """What the kernel says about the mapping that holds this address."""
    facts: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(bound, 16) for bound in name.split("-"))
            is_inside = first <= address < last
        elif is_inside:
            facts[name.removesuffix(":")] = value.strip()
    return facts


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here"
)
def test_long_lived_memory_may_lie_on_huge_pages() -> None:
    memory = lazy_zeros(2 * HUGE_PAGE)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert facts_of_mapping(memory.data_ptr())["THPeligible"] == "1"


def test_pieces_of_an_arena_are_zeros_side_by_side_on_lines() -> None:
    arena = Arena()
    pieces = [arena.take(num_bytes) for num_bytes in (100, 64, 1)]
    for number, piece in enumerate(pieces):
        assert torch.count_nonzero(piece) == 0
        piece.fill_(number + 1)
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3]]
    first = pieces[0].data_ptr()
    assert [piece.data_ptr() - first for piece in pieces] == [0, 128, 192]


def test_a_piece_may_be_larger_than_a_chunk() -> None:
    arena = Arena()
    small, large, after = arena.take(10), arena.take(Arena.CHUNK + 1), arena.take(10)
    assert len(large) == Arena.CHUNK + 1
    assert len({piece.untyped_storage().data_ptr() for piece in (small, large, after)}) == 3


def test_a_chunk_is_given_back_with_its_last_piece() -> None:
    arena = Arena()
    first, second = arena.take(10), arena.take(10)
    address = second.data_ptr()
    del first
    after = arena.take(Arena.CHUNK)
    assert facts_of_mapping(address)
    del second
    gc.collect()
    assert not facts_of_mapping(address)
    assert len(after) == Arena.CHUNK


def test_what_is_taken_after_the_end_of_a_model_shares_no_chunk_with_it() -> None:
    arena = Arena()
    first = arena.take(10)
    arena.close()
    assert arena.take(10).untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
