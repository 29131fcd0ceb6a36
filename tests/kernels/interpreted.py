"""Triton kernels in the interpreter against the plain-torch reference. Run by `test_triton.py`.

A process of its own: TRITON_INTERPRET must be set before Triton is imported. fp32 and fp16 only,
because the interpreter computes bf16 products wrongly (it multiplies the raw bits).
"""

import sys

import torch

from kernels import reference
from kernels.attention_metadata import AttentionMetadata
from kernels.gated_activation import silu_and_mul_with_triton
from kernels.kv_cache import PLAIN, PagedKVCache
from kernels.paged_decode_attention import decode_with_triton
from kernels.paged_prefill_attention import prefill_with_triton
from kernels.rms_norm import rms_norm_with_torch, rms_norm_with_triton
from kernels.rotary import build_cos_sin, rotary_and_write_kv_with_triton
from tests.kernels.batches import assert_near, build_step

DTYPES = (torch.float32, torch.float16)


def check_rms_norm() -> int:
    """Odd widths, strided rows, with and without a residual of a wider type."""
    count = 0
    for dtype in DTYPES:
        for shape in ((1, 1), (3, 5), (7, 123), (2, 576), (2, 3, 64), (0, 16)):
            x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
            out, _ = rms_norm_with_triton(x, None, weight, 1e-5)
            assert_near(out, rms_norm_with_torch(x.double(), weight.double(), 1e-5), dtype)
            residual = torch.randn(shape)
            out, total = rms_norm_with_triton(x, residual, weight, 1e-5)
            assert total is not None
            assert_near(total, residual + x, torch.float32)
            assert_near(out, rms_norm_with_torch(total.double(), weight.double(), 1e-5), dtype)
            count += 2
        wide = torch.randn(4, 100).to(dtype)
        strided = wide[:, :50]
        weight = torch.randn(50).to(dtype)
        out, _ = rms_norm_with_triton(strided, None, weight, 1e-6)
        assert_near(out, rms_norm_with_torch(strided.double(), weight.double(), 1e-6), dtype)
        count += 1
    return count


def check_decode() -> int:
    """One-token and page-boundary contexts, several splits, windows, softcap, odd heads, poison."""
    count = 0
    cases = [
        ({}, [1, 2, 63, 64, 65, 127, 128, 129], {}),
        ({}, [700, 1, 513], {}),  # two splits, and sequences that need one
        ({"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, [5, 200], {}),
        ({"num_heads": 20, "num_kv_heads": 1, "head_dim": 40}, [70], {}),
        ({"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}, [33, 64], {}),
        ({}, [3, 150, 700], {"window": 20}),
        ({}, [3, 150, 700], {"window": 64}),
        ({}, [65, 130], {"softcap": 5.0}),
        ({}, [65, 600], {"softcap": 5.0, "window": 30}),
    ]
    for dtype in DTYPES:
        for shape, lengths, options in cases:
            step = build_step([1] * len(lengths), lengths, dtype=dtype, **shape)
            scale = step.q.shape[-1] ** -0.5
            arguments = {"scale": scale, "window": None, "softcap": None, **options}
            expected = reference.paged_attention(
                step.q, step.kv_cache, 0, step.metadata, **arguments
            )
            out = decode_with_triton(step.q, step.kv_cache, 0, step.metadata, **arguments)
            assert_near(out, expected, dtype)
            count += 1
    return count


def check_prefill() -> int:
    """Whole prompts, chunks on a cached prefix, mixed batches, strided q; poison all around."""
    count = 0
    cases: list[tuple[dict[str, int], list[int], list[int], dict[str, float]]] = [
        ({}, [1, 2, 63, 64, 65], [1, 2, 63, 64, 65], {}),
        ({}, [2, 17, 64, 1], [66, 81, 129, 64], {}),
        ({"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, [50, 1], [50, 70], {}),
        ({"num_heads": 20, "num_kv_heads": 1, "head_dim": 40}, [9], [70], {}),
        ({"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}, [130], [194], {}),
        ({}, [1, 70, 9], [150, 70, 200], {"window": 20}),
        ({}, [66], [130], {"window": 64}),
        ({}, [9, 70], [73, 70], {"softcap": 5.0}),
        ({}, [9, 1], [140, 200], {"softcap": 5.0, "window": 30}),
    ]
    for dtype in DTYPES:
        for shape, query_lens, context_lens, options in cases:
            step = build_step(query_lens, context_lens, dtype=dtype, **shape)
            tokens, heads, head_dim = step.q.shape
            q = torch.randn(tokens, heads + 2, head_dim).to(dtype)[:, :heads]
            arguments = {"scale": head_dim**-0.5, "window": None, "softcap": None, **options}
            expected = reference.paged_attention(q, step.kv_cache, 0, step.metadata, **arguments)
            out = prefill_with_triton(q, step.kv_cache, 0, step.metadata, **arguments)
            assert_near(out, expected, dtype)
            count += 1
    return count


def check_silu_and_mul() -> int:
    """Odd widths, more than one block of columns, rows apart, no rows."""
    shapes = ((1, 2), (7, 246), (0, 8), (2, 3072))
    for dtype in DTYPES:
        for num_rows, width in shapes:
            gate_up = (torch.randn(num_rows, width + 3) * 3).to(dtype)[:, :width]
            assert_near(silu_and_mul_with_triton(gate_up), reference.silu_and_mul(gate_up), dtype)
    return len(DTYPES) * len(shapes)


def check_rotary() -> int:
    """Views of one projection, a rotary part, tokens that are not written, two pages."""
    cases = ((5, 2, 16, 16), (3, 3, 16, 8), (4, 1, 40, 24), (1, 1, 8, 8))
    for dtype in DTYPES:
        for heads, kv_heads, head_dim, rotary_dim in cases:
            metadata = AttentionMetadata.build(
                query_lens=[8, 1], context_lens=[70, 3], block_tables=[[2, 0], [3]]
            )
            metadata.slot_mapping[3] = -1
            widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
            projection = torch.randn(9, sum(widths)).to(dtype)
            q, k, v = (part.view(9, -1, head_dim) for part in projection.split(widths, dim=-1))
            positions = metadata.positions.tolist()
            rotated_q = reference.rotate(q, positions, 1e4, rotary_dim)
            rotated_k = reference.rotate(k, positions, 1e4, rotary_dim)
            untouched = projection[:, widths[0] :].clone()
            cache = PagedKVCache(2, 4, kv_heads, head_dim, dtype, "cpu", layout=PLAIN)
            table = build_cos_sin(128, rotary_dim, 1e4)
            rotary_and_write_kv_with_triton(q, k, v, table, cache, 1, metadata)
            assert_near(q, rotated_q, dtype)
            assert torch.equal(projection[:, widths[0] :], untouched)
            for token, slot in enumerate(metadata.slot_mapping.tolist()):
                if slot >= 0:
                    block, offset = divmod(slot, 64)
                    assert_near(cache.keys[1][block, :, offset], rotated_k[token], dtype)
                    assert torch.equal(cache.values[1][block, :, offset], v[token])
            assert int((cache.values[1] != 0).sum()) == 8 * kv_heads * head_dim
            assert not cache.keys[0].any()
    return len(DTYPES) * len(cases)


CHECKS = {
    "rms_norm": check_rms_norm,
    "decode": check_decode,
    "prefill": check_prefill,
    "silu_and_mul": check_silu_and_mul,
    "rotary": check_rotary,
}

if __name__ == "__main__":
    torch.manual_seed(20261130)
    torch.set_num_threads(1)
    counts = [f"{name}={check()}" for name, check in CHECKS.items()]
    sys.stdout.write(" ".join(counts) + "\n")
