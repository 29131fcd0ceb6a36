"""What a checkpoint's files say of it, read without torch: enough for the catalogue."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.context import context_length
from engine.errors import ModelRefused
from engine.pooling import ModelKind, read_pooling

WORD_LENGTHS = {"architecture": 128, "dtype": 16}
"""What the catalogue keeps of them."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint as the catalogue lists it."""

    architecture: str
    context_length: int
    dtype: str
    revision: str
    """A short fingerprint of the configuration and the sizes of the weights."""
    weight_bytes: int
    kind: ModelKind


def read_model_facts(directory: Path, files: Mapping[str, int] | None = None) -> ModelFacts:
    """Check that the files are there and say what they are. Raises ModelRefused.

    `files`: bytes of the weights by name, where they are not there yet.
    """
    config = read_config(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ModelRefused(f"{directory} has no tokenizer.json")
    if files is None:
        files = {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}
    if not files:
        raise ModelRefused(f"{directory} has no *.safetensors; other formats are not loaded")
    pooling = read_pooling(directory)
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for name in sorted(files):
        digest.update(f"{name}:{files[name]}".encode())
    return ModelFacts(
        architecture=_word("architecture", (config.get("architectures") or ["unknown"])[0]),
        context_length=context_length(config) if pooling is None else pooling.max_tokens,
        dtype=_word("dtype", config.get("dtype") or config.get("torch_dtype") or "unknown"),
        revision=digest.hexdigest()[:12],
        weight_bytes=sum(files.values()),
        kind="generate" if pooling is None else pooling.kind,
    )


def _word(what: str, said: object) -> str:
    """A name out of the configuration. Raises ModelRefused for what is none: it is shown and stored."""
    if isinstance(said, str) and len(said) <= WORD_LENGTHS[what] and said.isprintable():
        return said
    raise ModelRefused(f"config.json names no {what} but {str(said)[:40]!r}")


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's configuration. Raises ModelRefused."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"{directory} has no config.json") from None
    except ValueError as fault:
        raise ModelRefused(f"{path} is not JSON: {fault}") from fault
    if not isinstance(config, dict):
        raise ModelRefused(f"{path} is not a JSON object")
    return config
