"""Tokenizers of the families that open models use, small enough to build in a test."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.tokenization import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]

# A template that tests only what it should not have to: both turns and trimming, as Llama's does.
TEMPLATE = """{{ bos_token }}{% for message in messages %}
[{{ message['role'] }}]{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def byte_fallback_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Letters, bytes and a few merges, as SentencePiece's BPE has them."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(0x21, 0x7F)] + ["é", "世"]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    tokens += ["".join(pair) for pair in merges]
    return {token: i for i, token in enumerate(tokens)}, merges


def llama_like() -> tokenizers.Tokenizer:
    """Llama 2: `▁` in front of every text, bytes for what is not in the vocabulary."""
    vocabulary, merges = byte_fallback_vocabulary()
    fast = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    fast.add_special_tokens(SPECIAL)
    fast.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return fast


def gemma_like() -> tokenizers.Tokenizer:
    """Gemma: as Llama 2, but nothing is put in front."""
    fast = llama_like()
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast


def metaspace_like() -> tokenizers.Tokenizer:
    """Models with a Metaspace pre-tokenizer and decoder (Mistral v3, T5)."""
    fast = llama_like()
    fast.normalizer = normalizers.Sequence([])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    fast.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Metaspace(replacement="▁", prepend_scheme="first"),
        ]
    )
    return fast


FAMILIES = {"llama": llama_like, "gemma": gemma_like, "metaspace": metaspace_like}


def save(directory: Path, fast: tokenizers.Tokenizer, **configs: Any) -> Path:
    """Write a model directory as `Tokenizer.load` reads it."""
    fast.save(str(directory / "tokenizer.json"))
    files = {
        "config": {"vocab_size": 400, "max_position_embeddings": 128},
        "generation_config": {"eos_token_id": 2},
        "tokenizer_config": {
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
            "chat_template": TEMPLATE,
        },
    }
    for name, content in (files | configs).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """A tokenizer of each family without byte-level BPE."""
    return Tokenizer.load(save(tmp_path, FAMILIES[request.param]()))


@pytest.fixture(scope="session")
def default_tokenizer(default_model_directory: Path) -> Tokenizer:
    """The default model's tokenizer: byte-level BPE."""
    return Tokenizer.load(default_model_directory)
