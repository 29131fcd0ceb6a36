"""Bit-equal logits: alone, in a batch, in chunks, on a cached prefix, on any number of threads.

One build of the CPU kernels, one machine type. Each precision is tested on its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models.decoder import Decoder, load_decoder
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.cpu.build import NATIVE
from kernels.linear import Quantization
from tests.engine.tiny import save_tiny
from tests.kernels.cpu_builds import built

PRECISIONS: dict[str, tuple[torch.dtype, Quantization]] = {
    "fp32": (torch.float32, "none"),
    "bf16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
    "int8_weight_only": (torch.bfloat16, "int8_weight_only"),
}
LENGTH = 300  # two chunks of attention, five pages


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaConfig", path)
    return path


@pytest.fixture(params=PRECISIONS)
def decoder(request: pytest.FixtureRequest, directory: Path) -> Iterator[Decoder]:
    dtype, quantization = PRECISIONS[request.param]
    library.enable(built(NATIVE), num_threads=2)
    yield load_decoder(directory, dtype, torch.device("cpu"), quantization)
    library.disable()


class Run:
    """Steps of sequences over one cache; a sequence is its tokens and its pages."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.kv_cache = decoder.create_kv_cache(200)

    @torch.inference_mode()
    def step(self, *parts: tuple[torch.Tensor, int, int, list[int]]) -> torch.Tensor:
        """Tokens [first, last) of each sequence in one step; the logits of its last token."""
        metadata = AttentionMetadata.build(
            query_lens=[last - first for _, first, last, _ in parts],
            context_lens=[last for _, _, last, _ in parts],
            block_tables=[table for *_, table in parts],
        )
        tokens = torch.cat([ids[first:last] for ids, first, last, _ in parts])
        rows = metadata.query_start[1:].long() - 1
        return self.decoder.forward(tokens, self.kv_cache, metadata, rows)


def random_ids(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed))


def test_logits_have_the_same_bits_however_they_are_computed(decoder: Decoder) -> None:
    run, ids, pages = Run(decoder), random_ids(0), [7, 3, 19, 0, 11]
    alone = run.step((ids, 0, LENGTH, pages))[0]
    assert alone.isfinite().all()

    # 1. in chunks on other pages, beside the prefills and decodes of others
    other, other_pages = random_ids(1), [50, 51, 52, 53, 54]
    chunked = [20, 21, 22, 23, 24]
    for first, last in ((0, 1), (1, 66), (66, 129), (129, LENGTH)):
        both = run.step((other, 0, last, other_pages), (ids, first, last, chunked))
    assert torch.equal(both[1], alone)

    # 2. on a prefix that another sequence computed
    prefix_hit = [*pages[:3], 30, 31]
    assert torch.equal(run.step((ids, 192, LENGTH, prefix_hit))[0], alone)

    # 3. its last token as a decode: alone, and between 70 other decodes and a prefill
    run.step((ids, 0, LENGTH - 1, chunked))
    assert torch.equal(run.step((ids, LENGTH - 1, LENGTH, chunked))[0], alone)
    crowd = [(random_ids(2 + i, 5), 4, 5, [100 + i]) for i in range(70)]
    prefill = (random_ids(99), 0, 90, other_pages)
    decode = (ids, LENGTH - 1, LENGTH, chunked)
    assert torch.equal(run.step(*crowd[:33], decode, *crowd[33:], prefill)[33], alone)

    # 4. preempted: its pages are gone, and it is computed anew on others
    assert torch.equal(run.step((ids, 0, LENGTH, [80, 81, 82, 83, 84]))[0], alone)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_logits_do_not_depend_on_the_number_of_threads(
    decoder: Decoder, directory: Path, num_threads: int
) -> None:
    ids = random_ids(0)
    expected = Run(decoder).step((ids, 0, LENGTH, [0, 1, 2, 3, 4]))
    dtype, quantization = decoder.dtype, decoder.quantization
    library.enable(built(NATIVE), num_threads)
    again = load_decoder(directory, dtype, torch.device("cpu"), quantization)
    assert torch.equal(Run(again).step((ids, 0, LENGTH, [0, 1, 2, 3, 4])), expected)


def test_int8_stays_near_the_model_itself(directory: Path) -> None:
    ids = random_ids(0)
    library.enable(built(NATIVE), num_threads=2)
    exact, *quantised = (
        Run(load_decoder(directory, torch.float32, torch.device("cpu"), quantization)).step(
            (ids, 0, LENGTH, [0, 1, 2, 3, 4])
        )
        for quantization in ("none", "int8", "int8_weight_only")
    )
    library.disable()
    for found in quantised:
        assert 0 < float((found - exact).norm() / exact.norm()) < 0.15


def test_int8_from_kept_factors_has_the_same_bits(directory: Path, tmp_path: Path) -> None:
    library.enable(built(NATIVE), num_threads=2)
    ids = random_ids(7, 90)
    found = []
    for cache in (None, tmp_path, tmp_path):
        model = load_decoder(directory, torch.bfloat16, torch.device("cpu"), "int8", cache=cache)
        found.append(Run(model).step((ids, 0, 90, [0, 1])))
    library.disable()
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
