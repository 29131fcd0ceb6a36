"""A token's result has the same bits whatever shares its step, however its prefill is cut."""

import pytest
import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import attention as cpu_attention
from kernels.cpu.library import CpuLibrary
from kernels.cpu.page_layout import PANELS
from kernels.kv_cache import PagedKVCache
from kernels.rotary import build_cos_sin
from tests.kernels.cpu_builds import VARIANTS, attend, built

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 530  # three chunks of 256 tokens, the last one ragged


class Sequence:
    """Random q, k, v of one sequence, and its result when it runs alone and whole."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self.length = length
        self.projection = torch.randn(length, 9 + 3 + 3, 32).to(dtype)


def run(
    library: CpuLibrary,
    cache: PagedKVCache,
    parts: list[tuple[Sequence, int, int, list[int]]],
    window: int | None,
) -> list[torch.Tensor]:
    """One step of tokens [first, last) of each sequence; their attention, sequence by sequence."""
    metadata = AttentionMetadata.build(
        query_lens=[last - first for _, first, last, _ in parts],
        context_lens=[last for _, _, last, _ in parts],
        block_tables=[table for *_, table in parts],
    )
    projection = torch.cat([s.projection[first:last] for s, first, last, _ in parts])
    q, k, v = projection.split([9, 3, 3], dim=1)
    table = build_cos_sin(LENGTH, 32, 1e4)
    cpu_attention.rotary_and_write_kv(library, q, k, v, table, cache, 0, metadata)
    out = attend(library, q, cache, metadata, window=window)
    return list(out.split([last - first for _, first, last, _ in parts]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_does_not_depend_on_the_batch_or_the_cutting(
    cpu_library: CpuLibrary, dtype: torch.dtype, window: int | None
) -> None:
    num_pages = -(-LENGTH // 64)
    cache = PagedKVCache(1, 20 * num_pages, 3, 32, dtype, "cpu", layout=PANELS)
    pages = iter(torch.randperm(cache.num_blocks).tolist())
    tables = [[next(pages) for _ in range(num_pages)] for _ in range(20)]
    sequence = Sequence(LENGTH, dtype)
    (alone,) = run(cpu_library, cache, [(sequence, 0, LENGTH, tables[0])], window)

    # 1. in chunks, beside another prefill
    other = Sequence(LENGTH, dtype)
    pieces = []
    for first, last in ((0, 1), (1, 66), (66, 300), (300, LENGTH - 1)):
        parts = [(sequence, first, last, tables[1]), (other, 0, last, tables[2])]
        pieces.append(run(cpu_library, cache, parts, window)[0])
    # 2. its last token as a decode: alone, then among other decodes and a prefill
    decode = (sequence, LENGTH - 1, LENGTH, tables[1])
    (single,) = run(cpu_library, cache, [decode], window)
    pieces.append(single)
    assert torch.equal(torch.cat(pieces), alone)
    others = [(Sequence(5, dtype), 4, 5, table) for table in tables[3:19]]
    prefill = (Sequence(90, dtype), 0, 90, tables[19])
    assert torch.equal(run(cpu_library, cache, [*others, decode, prefill], window)[16], single)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_depends_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    target, is_native = VARIANTS[name]
    sequence = Sequence(300, dtype)
    weight, x = torch.randn(100, 130).to(dtype), torch.randn(70, 130).to(dtype)
    results = []
    for num_threads in (1, 2, 3):
        library = CpuLibrary(built(target), num_threads, native_bf16_dot=False)
        if is_native and library.has_native_bf16_dot:
            library.close()
            library = CpuLibrary(built(target), num_threads, native_bf16_dot=True)
        cache = PagedKVCache(1, 5, 3, 32, dtype, "cpu", layout=PANELS)
        (prefill,) = run(library, cache, [(sequence, 0, 299, [0, 1, 2, 3, 4])], None)
        (decode,) = run(library, cache, [(sequence, 299, 300, [0, 1, 2, 3, 4])], None)
        norm = library.rms_norm(x, torch.ones(130, dtype=dtype), 1e-5)
        results.append((prefill, decode, norm, library.linear(x, library.pack(weight))))
        library.close()
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
