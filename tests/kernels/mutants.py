"""Planted mistakes in the Triton kernels. Each names what it breaks and the test that must notice."""

from tests.mutation import Mutant

TILE, DECODE = "kernels/attention_tile.py", "kernels/decode_splits.py"
PREFILL, MIXED = "kernels/paged_prefill_attention.py", "kernels/mixed_attention.py"
SAMPLING, ROTARY = "kernels/sampling_kernel.py", "kernels/rotary.py"
GEMM, FLOAT8 = "kernels/scaled_gemm.py", "kernels/float8.py"


def _tested_by(file: str, test: str, *changes: tuple[str, str, str, str]) -> list[Mutant]:
    tests = f"tests/kernels/interpreted/test_{file}.py::test_{test}"
    return [Mutant(name, path, old, new, tests) for name, path, old, new in changes]


MUTANTS = [
    *_tested_by(
        "attention",
        "decode_at_page_boundaries",
        ("values beyond the context are loaded", TILE,
         "is_value = is_value & (positions < length)[:, None]", "is_value = is_value"),
        ("off by one page", TILE, "tl.load(table_ptr + tile * TILE // PAGE)",
         "tl.load(table_ptr + tile * TILE // PAGE + 1)"),
        ("a token sees the next one", TILE, "positions[None, :] <= own_positions[:, None]",
         "positions[None, :] <= own_positions[:, None] + 1"),
        ("a token does not see itself", TILE, "positions[None, :] <= own_positions[:, None]",
         "positions[None, :] < own_positions[:, None]"),
        ("no scale", DECODE, "        (scale, window, softcap),\n        *(HEAD_DIM",
         "        (1.0, window, softcap),\n        *(HEAD_DIM"),
        ("the old sums are not shrunk", TILE, "values_sum = values_sum * shrink[:, None]",
         "values_sum = values_sum * 1.0"),
        ("the old weight is not shrunk", TILE, "weight = weight * shrink + tl.sum(shares, axis=1)",
         "weight = weight + tl.sum(shares, axis=1)"),
    ),
    *_tested_by(
        "attention",
        "decode_at_large_scores",
        ("the largest score is not subtracted", TILE, "shares = tl.exp2(scores - anchor[:, None])",
         "shares = tl.exp2(scores)"),
    ),
    *_tested_by(
        "attention",
        "splits_are_merged_by_whoever_comes_last",
        ("a split is dropped", DECODE, "first += (index - before) * tiles",
         "first += (index - before + 1) * tiles"),
        ("the last split is not merged", DECODE, "is_split = splits < num_splits",
         "is_split = splits < num_splits - 1"),
        ("the counter is not taken back", DECODE, "            tl.store(arrival_ptr, 0)\n", ""),
        ("the last but one merges", DECODE, " == num_splits - 1:\n", " == num_splits - 2:\n"),
        ("splits are merged without weights", DECODE, "parts * shares[:, None]", "parts"),
        ("every split has the sink", DECODE, "is_first = index == before",
         "is_first = index >= before"),
        ("splits begin a tile after the window", DECODE,
         "first = tl.maximum(lens - window, 0) // TILE",
         "first = tl.maximum(lens - window, 0) // TILE + 1"),
    ),
    *_tested_by(
        "attention",
        "decode_with",
        ("the window is one too long", TILE,
         "positions[None, :] > own_positions[:, None] - window",
         "positions[None, :] >= own_positions[:, None] - window"),
        ("the softcap has the wrong base", TILE, "scores / softcap * (2 * 1.4426950408889634)",
         "scores / softcap * 2"),
    ),
    *_tested_by(
        "attention",
        "decode_of_any_shape",
        ("keys have the values' width", TILE,
         "key_offsets = row * HEAD_DIM + tokens[:, None] * HEAD_DIM",
         "key_offsets = row * VALUE_DIM + tokens[:, None] * VALUE_DIM"),
        ("heads of the next group", DECODE, "heads = kv_head * GROUP + rows",
         "heads = (kv_head + 1) % num_kv_heads * GROUP + rows"),
    ),
    *_tested_by(
        "attention",
        "elements_beyond_2_to_the_31_are_found",
        ("32-bit addresses", TILE, "tile * TILE // PAGE).to(tl.int64)", "tile * TILE // PAGE)"),
    ),
    *_tested_by(
        "attention",
        "chunks_on_a_cached_prefix_beside_decodes",
        ("the cached prefix is forgotten", PREFILL, "before = length - num_queries",
         "before = length * 0"),
        ("the last tile of a chunk is missing", PREFILL,
         "counts = (query_lens + ROWS // GROUP - 1) // (ROWS // GROUP)",
         "counts = query_lens // (ROWS // GROUP)"),
        ("decodes are left out of a mixed step", MIXED,
         "    if program < num_decode_programs:", "    if program < 0:"),
        ("a whole tile beyond the diagonal", TILE, "(lowest_row + 1) // TILE",
         "(highest_row + 1) // TILE + 1"),
    ),
    *_tested_by(
        "attention",
        "prefill_with",
        ("the first tile of a window is skipped", PREFILL,
         "first = tl.maximum(before + first_token - window + 1, 0) // TILE",
         "first = tl.maximum(before + first_token - window + 1, 0) // TILE + 1"),
        ("sinks weigh nothing", PREFILL, "weight + 1.0", "weight"),
    ),
    *_tested_by(
        "attention",
        "a_cache_of_8_bit_floats",
        ("keys without their scale", DECODE, "scale = scale * tl.load(key_scales_ptr + kv_head)",
         "scale = scale * 1.0"),
        ("merged values without their scale", DECODE, "out = out * value_scale / weight",
         "out = out / weight"),
        ("8-bit floats at half their value", FLOAT8, "* 256.0)", "* 128.0)"),
    ),
    *_tested_by(
        "elementwise",
        "rotary_after_norms_into_a_cache_of_any_type",
        ("keys are rotated backwards", ROTARY,
         "first * cos - second * sin, second * cos + first * sin, rest",
         "first * cos + second * sin, second * cos - first * sin, rest"),
        ("8-bit floats are cut off", FLOAT8, "magnitude + 0x7FFFF + ((magnitude >> 20) & 1)",
         "magnitude"),
        ("the mean of the padded head", ROTARY, "tl.sum(x * x, axis=1) / HEAD_DIM",
         "tl.sum(x * x, axis=1) / (2 * HEAD_DIM)"),
    ),
    *_tested_by(
        "elementwise",
        "rotary_writes_what_it_should_and_nothing_else",
        ("slot -1 is written", ROTARY, "    if slot >= 0:", "    if slot >= -1:"),
    ),
    *_tested_by(
        "sampling",
        "many_draws_from_one_row_equal_those_of_torch",
        ("noise of the row alone", SAMPLING, "+ position * 0x9E3779B97F4A7C15", "+ position * 0"),
        ("the kept mass includes all", SAMPLING,
         "mass = tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=0)",
         "mass = tl.sum(tl.maximum(weights, 0.0), axis=0)"),
        ("top-p of everything, not of the top k", SAMPLING,
         "logits_ptr, vocabulary, largest, temperature, threshold, 0.0, BLOCK\n                )\n"
         "                low",
         "logits_ptr, vocabulary, largest, temperature, 0.0, 0.0, BLOCK\n                )\n"
         "                low"),
        ("the sum before a block is lost", SAMPLING, "before + tl.cumsum(kept, axis=0) > target",
         "tl.cumsum(kept, axis=0) > target"),
    ),
    *_tested_by(
        "sampling",
        "many_draws_from_one_row_equal_those_of_torch",
        ("top-k keeps one more", SAMPLING, "top_k.to(tl.float32), low", "top_k.to(tl.float32) + 1, low"),
    ),
    *_tested_by(
        "sampling",
        "top_log_probs_are_in_order_and_equals_by_index",
        ("equals are told once", SAMPLING, "(columns > previous_at)", "(columns < 0)"),
    ),
    *_tested_by(
        "scaled_gemm",
        "products_equal_those_of_the_8_bit_numbers",
        ("no scale of the row", GEMM, "* x_scales[:, None] * weight_scales",
         "* weight_scales"),
        ("the tail of the depth is not masked", GEMM,
         "is_there = (first + depth < in_features)[None, :]",
         "is_there = (first + depth <= in_features)[None, :]"),
    ),
    *_tested_by(
        "scaled_gemm",
        "rows_are_quantised_to_the_nearest",
        ("integers are cut off", GEMM, "(x + 12582912.0) - 12582912.0", "x"),
    ),
]  # fmt: skip
