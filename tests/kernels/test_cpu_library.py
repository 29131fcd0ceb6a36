"""Building and loading the library, and how its threads behave."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels.cpu.build as builder
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library as cpu
from kernels.cpu.build import NATIVE, build
from kernels.cpu.library import CpuLibrary
from kernels.embedding import Embedding
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import PagedKVCache
from kernels.linear import PackedLinear, Quantization, linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv
from tests.kernels.cpu_builds import built


@pytest.fixture
def enabled() -> Iterator[CpuLibrary]:
    yield cpu.enable(built(NATIVE), 2)
    cpu.disable()


def test_a_second_build_finds_the_first(tmp_path: Path) -> None:
    path = built(NATIVE)
    before = path.stat().st_mtime_ns
    again = build(path.parent)
    assert (again.path, again.reason) == (path, "built before")
    assert path.stat().st_mtime_ns == before


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder.shutil, "which", lambda _: None)
    result = build(tmp_path)
    assert result.path is None
    assert "no C++ compiler" in str(result)


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "FLAGS", ("--no-such-flag",))
    result = build(tmp_path)
    assert result.path is None
    assert "no-such-flag" in result.reason
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = build(tmp_path / "file" / "cache")
    assert result.path is None
    assert "could not be built" in result.reason


def test_public_operations_use_the_library_and_agree_with_torch(enabled: CpuLibrary) -> None:
    def operations() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x, weight = torch.randn(20, 64), torch.randn(8 * 16, 64)
        packed = PackedLinear(weight, torch.randn(8 * 16))
        cache = PagedKVCache(1, 4, 2, 16, torch.float32, "cpu")
        assert cache.is_packed == (cpu.active() is not None)
        assert (packed.weight is None) == (cpu.active() is not None)
        metadata = AttentionMetadata.build(query_lens=[20], context_lens=[20], block_tables=[[3]])
        projection = linear(rms_norm(x, torch.randn(64), 1e-5), packed)
        q, k, v = projection.view(20, 8, 16).split([4, 2, 2], dim=1)
        rotary_and_write_kv(q, k, v, build_cos_sin(64, 16, 1e4), cache, 0, metadata)
        attended = paged_attention(q, cache, 0, metadata, scale=0.25)
        return [projection, attended, silu_and_mul(projection)]

    fast = operations()
    cpu.disable()
    for ours, theirs in zip(fast, operations(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_callers_in_many_threads_take_turns(enabled: CpuLibrary) -> None:
    weight = enabled.pack(torch.randn(96, 64))
    inputs = [torch.randn(20, 64) for _ in range(4)]
    expected = [enabled.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            if not torch.equal(enabled.linear(inputs[index], weight), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_idle_team_burns_nothing(enabled: CpuLibrary) -> None:
    enabled.linear(torch.randn(64, 64), enabled.pack(torch.randn(64, 64)))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.01


FORK = """
import os, sys, torch
from pathlib import Path
from kernels.cpu.library import CpuLibrary
library = CpuLibrary(Path(sys.argv[1]), 2)
weight, x = library.pack(torch.randn(200, 64)), torch.randn(200, 64)
expected = library.linear(x, weight)
child = os.fork()
for _ in range(50):
    assert torch.equal(library.linear(x, weight), expected)
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
library.close()
"""


def test_a_forked_child_has_a_team_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK, str(built(NATIVE))], check=True, timeout=60)


def test_denormals_are_the_callers_own_business(enabled: CpuLibrary) -> None:
    """The kernels count denormals as zero; afterwards torch computes with them as before."""
    tiny = torch.full((4,), 1e-40)
    enabled.rms_norm(torch.randn(4, 64), torch.ones(64), 1e-5)
    assert bool((tiny * 1.0 > 0).all())
    assert not torch.is_nonzero(enabled.silu_and_mul(torch.full((1, 2), 1e-30)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("quantization", "is_tied", "is_kept"),
    [("none", True, False), ("none", False, True), ("int8", True, True)],
)
def test_an_embedding_is_in_memory_once(
    enabled: CpuLibrary,
    dtype: torch.dtype,
    quantization: Quantization,
    is_tied: bool,
    is_kept: bool,
) -> None:
    table = torch.randn(100, 64).to(dtype)
    head = PackedLinear(table, quantization=quantization)
    embedding = Embedding(table, head if is_tied else None)
    tokens = torch.tensor([99, 0, 47, 48, 48])
    expected, seen = table[tokens].float(), weakref.ref(table)
    del table
    assert torch.equal(embedding.rows(tokens), expected)
    assert (seen() is not None) == is_kept


def test_part_of_an_embedding_does_not_stand_for_the_whole(enabled: CpuLibrary) -> None:
    """As where ranks share the projection to logits."""
    table = torch.randn(100, 64)
    embedding = Embedding(table, PackedLinear(table[:50]))
    tokens = torch.tensor([99, 3])
    assert torch.equal(embedding.rows(tokens), table[tokens])
