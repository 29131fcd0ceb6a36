"""Tiny checkpoints with random weights, and what transformers generates from them."""

from pathlib import Path

import torch


def save_tiny(family: str, directory: Path, **changes: object) -> None:
    """A model of 3 layers with weights large enough that greedy output is not constant."""
    import tokenizers
    import transformers

    torch.manual_seed(7)
    shape: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, family)(**(shape | changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    vocabulary = {f"t{index}": index for index in range(config.vocab_size)}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))


def generated(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates for each prompt by itself, greedily."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
