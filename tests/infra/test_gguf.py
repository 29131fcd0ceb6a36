"""A GGUF file of mixed types, as llama.cpp's Q4_K_M is one, becomes what its blocks say."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from infra.local.gguf import convert

WIDTH = 256
"""Of everything: a block of the K types."""
RANDOM = np.random.default_rng(5)


def q8_0(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32: a half-precision scale, then 32 signed bytes."""
    scales = RANDOM.uniform(0.001, 0.01, (rows, WIDTH // 32, 1)).astype(np.float16)
    numbers = RANDOM.integers(-127, 128, (rows, WIDTH // 32, 32), dtype=np.int8)
    blocks = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=-1)
    return blocks.reshape(rows, -1), (scales.astype(np.float32) * numbers).reshape(rows, WIDTH)


def q4_k(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 256: scale and least value for each of 8 groups of 32, in 6 bits each, of two
    half-precision units; then nibbles, the low ones of 32 bytes before the high ones."""
    units = RANDOM.uniform(0.0001, 0.001, (rows, 2)).astype(np.float16)
    scales, least = RANDOM.integers(0, 64, (2, rows, 8), dtype=np.uint8)
    packed = np.zeros((rows, 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    packed[:, 4:8] = least[:, :4] | (least[:, 4:] >> 4 << 6)
    packed[:, 8:12] = (scales[:, 4:] & 15) | ((least[:, 4:] & 15) << 4)
    nibbles = RANDOM.integers(0, 16, (rows, 4, 2, 32), dtype=np.uint8)
    low_and_high = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    blocks = np.concatenate([units.view(np.uint8), packed, low_and_high.reshape(rows, 128)], axis=1)
    unit, least_unit = units.astype(np.float32)[:, :1], units.astype(np.float32)[:, 1:]
    values = (unit * scales)[..., None] * nibbles.reshape(rows, 8, 32)
    return blocks, (values - (least_unit * least)[..., None]).reshape(rows, WIDTH)


def f16(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Plain half precision."""
    numbers = RANDOM.normal(0, 0.1, (rows, WIDTH)).astype(np.float16)
    return numbers, numbers.astype(np.float32)


TYPES = gguf.GGMLQuantizationType
MADE = {
    "blk.0.ffn_down.weight": (q4_k, TYPES.Q4_K, "model.layers.0.mlp.down_proj.weight"),
    "blk.0.ffn_gate.weight": (q8_0, TYPES.Q8_0, "model.layers.0.mlp.gate_proj.weight"),
    "blk.0.ffn_up.weight": (f16, None, "model.layers.0.mlp.up_proj.weight"),
    "blk.0.attn_v.weight": (q4_k, TYPES.Q4_K, "model.layers.0.self_attn.v_proj.weight"),
    "blk.0.attn_output.weight": (q8_0, TYPES.Q8_0, "model.layers.0.self_attn.o_proj.weight"),
}


def write(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer; what its matrices are to become, by their names there."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        ["a", "b", "ab", *(chr(0x100 + number) for number in range(254)), "<eos>"]
    )
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    expected = {}
    for name, (make, kind, becomes) in MADE.items():
        blocks, values = make(WIDTH)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        expected[becomes] = values
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, f16(WIDTH)[0])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, f16(258)[0])
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.slow
def test_mixed_types_become_what_their_blocks_say(tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf")
    target = tmp_path / "model"
    convert(tmp_path / "tiny.gguf", target, facts={}, extra_files={}, progress=print)
    found = load_file(target / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-7, err_msg=name)
