"""What the public calls compute on a GPU, beside the same calls on the CPU in fp32."""

import pytest
import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import PLAIN, PagedKVCache
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv
from kernels.sampling import sample
from kernels.sampling_batch import SamplingBatch

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
STEPS = {
    "decode": ([1, 1, 1, 1], [1, 63, 64, 700]),
    "long decode": ([1, 1], [5000, 129]),
    "prefill": ([64, 130, 7], [64, 130, 7]),
    "chunk on a prefix": ([50, 65], [200, 1000]),
    "mixed": ([100, 1, 1, 33], [300, 65, 900, 33]),
}
HEADS = ((32, 8, 128), (9, 3, 64), (4, 4, 16), (8, 1, 256))


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (found.float().cpu() - expected.float()).abs().max()
    assert difference <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 40])
def test_attention(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    step: str,
    window: int | None,
    gpu: torch.device,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    query_lens, context_lens = STEPS[step]
    counts = [-(-length // 64) for length in context_lens]
    order = torch.randperm(sum(counts)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    pages = [torch.randn(sum(counts), num_kv_heads, 64, head_dim).to(dtype) for _ in range(2)]
    outs = []
    for device, kind in ((gpu, dtype), (CPU, torch.float32)):
        cache = PagedKVCache(1, sum(counts), num_kv_heads, head_dim, kind, device, layout=PLAIN)
        for target, source in zip((cache.keys[0], cache.values[0]), pages, strict=True):
            target.copy_(source)
        metadata = AttentionMetadata.build(
            query_lens=query_lens, context_lens=context_lens, block_tables=tables, device=device
        )
        attended = paged_attention(
            q.to(device, kind), cache, 0, metadata, scale=head_dim**-0.5, window=window
        )
        outs.append(attended)
    near(outs[0], outs[1], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (300, 4096)], ids=str)
def test_norms_and_gates(dtype: torch.dtype, shape: tuple[int, int], gpu: torch.device) -> None:
    x, weight, stream = (
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
        torch.randn(shape),
    )
    near(
        rms_norm(x.to(gpu), weight.to(gpu), 1e-5), rms_norm(x.float(), weight.float(), 1e-5), dtype
    )
    found = add_rms_norm(x.to(gpu), stream.to(gpu), weight.to(gpu), 1e-5)
    expected = add_rms_norm(x.float(), stream, weight.float(), 1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs, dtype)
    near(silu_and_mul(x.to(gpu)), silu_and_mul(x.float()), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotary_turns_and_writes(dtype: torch.dtype, gpu: torch.device) -> None:
    q, k, v = (torch.randn(90, heads, 128).to(dtype) for heads in (8, 2, 2))
    table = build_cos_sin(128, 128, 1e4)
    results = []
    for device, kind in ((gpu, dtype), (CPU, torch.float32)):
        cache = PagedKVCache(1, 2, 2, 128, kind, device, layout=PLAIN)
        metadata = AttentionMetadata.build(
            query_lens=[90], context_lens=[90], block_tables=[[1, 0]], device=device
        )
        turned = q.to(device, kind).clone()
        rotary_and_write_kv(
            turned, k.to(device, kind), v.to(device, kind), table.to(device), cache, 0, metadata
        )
        results.append((turned, cache.keys[0], cache.values[0]))
    for ours, theirs in zip(*results, strict=True):
        near(ours, theirs, dtype)


def test_draws_are_those_of_the_cpu(gpu: torch.device) -> None:
    logits = 4 * torch.randn(64, 32_000)
    settings: dict[str, list[float]] = {
        "temperature": [0.0, 0.7, 1.0, 2.0] * 16,
        "top_p": [1.0, 0.9, 1.0, 0.5] * 16,
        "min_p": [0.0, 0.0, 0.05, 0.0] * 16,
    }
    tokens = []
    for device in (gpu, CPU):
        batch = SamplingBatch.build(
            **settings,
            top_k=[0, 0, 40, 0] * 16,
            seeds=list(range(64)),
            positions=list(range(64)),
            device=device,
        )
        tokens.append(sample(logits.to(device), batch).cpu())
    agreement = (tokens[0] == tokens[1]).float().mean()
    assert torch.equal(tokens[0][::4], tokens[1][::4]), "greedy rows"
    assert agreement >= 0.95, "sums in another order may move a draw that lies on an edge"
