"""Triton kernels in the interpreter against the plain-torch reference. Run by `test_triton.py`.

A process of its own: TRITON_INTERPRET must be set before Triton is imported. fp32 and fp16 only,
because the interpreter computes bf16 products wrongly (it multiplies the raw bits).
"""

import sys

import torch

from kernels import reference
from kernels.paged_decode_attention import decode_with_triton
from kernels.rms_norm import rms_norm_with_torch, rms_norm_with_triton
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
            for bucket in step.metadata.decode_buckets:
                out = decode_with_triton(step.q[bucket.rows], step.kv_cache, 0, bucket, **arguments)
                assert_near(out, expected[bucket.rows], dtype)
            count += 1
    return count


if __name__ == "__main__":
    torch.manual_seed(20261130)
    torch.set_num_threads(1)
    sys.stdout.write(f"rms_norm={check_rms_norm()} decode={check_decode()}\n")
