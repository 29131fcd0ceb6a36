"""Loads a model that pools, and holds it beside transformers computing one input at a time."""

import itertools
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from engine.errors import ModelRefused
from engine.models.checkpoint import read_json
from engine.models.original import Original, build, one_line
from engine.models.pooled import PooledModel, Tail
from engine.models.report import Check, LoadReport
from engine.pooling import Pooling

LIMIT = 1e-4
PROBE_LENS = (3, 9, 16, 21, 70, 130)
LONGEST_PROBE = 1024
ACTIVATIONS = {
    "Identity": torch.nn.Identity,
    "Tanh": torch.nn.Tanh,
    "GELU": torch.nn.GELU,
    "ReLU": torch.nn.ReLU,
    "Sigmoid": torch.nn.Sigmoid,
}


def load_pooled(
    directory: Path, pooling: Pooling, device: torch.device
) -> tuple[PooledModel, LoadReport]:
    """Load an embedding model or a reranker in fp32. Raises ModelRefused with one clear sentence."""
    is_embedding = pooling.kind == "embed"
    auto = AutoModel if is_embedding else AutoModelForSequenceClassification
    original = build(auto, directory, torch.float32, device, is_headless=is_embedding)
    _give_a_padding(original)
    tail = _tail(directory, pooling, device) if is_embedding else torch.nn.Identity()
    expected = _answers(PooledModel(original, pooling, tail, is_padding=False), pooling)
    batched = PooledModel(original, pooling, tail)
    error = _error(batched, pooling, expected)
    if error <= LIMIT:
        checks = (Check("pooled", error, LIMIT),)
        return batched, LoadReport(f"{pooling.kind}: {pooling}", "", checks)
    report = LoadReport(
        f"{pooling.kind}, one input at a time: {pooling}",
        f"beside others its vectors differ by {error:.1e}",
    )
    return PooledModel(original, pooling, tail, is_padding=False), report


def _give_a_padding(original: Original) -> None:
    """Classifiers over decoders look for the last id that is no padding, and need to know it."""
    config = original.config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0


def _tail(directory: Path, pooling: Pooling, device: torch.device) -> Tail:
    """The dense layers behind the pooling, in fp32."""
    layers: list[torch.nn.Module] = []
    for name in pooling.dense:
        folder = directory / name
        config = read_json(folder / "config.json")
        activation = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
        if activation not in ACTIVATIONS:
            raise ModelRefused(f"{name} ends in {activation}, which is not supported")
        layer = torch.nn.Linear(
            config["in_features"], config["out_features"], bias=bool(config.get("bias", True))
        )
        try:
            weights = load_file(folder / "model.safetensors")
            layer.load_state_dict({key.removeprefix("linear."): w for key, w in weights.items()})
        except (OSError, SafetensorError, RuntimeError) as fault:
            raise ModelRefused(f"{name} cannot be loaded: {one_line(fault)}") from fault
        layers += [layer.float(), ACTIVATIONS[activation]()]
    return torch.nn.Sequential(*layers).requires_grad_(requires_grad=False).to(device)


def _probe(model: PooledModel, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    vocab_size = model.spec.vocab_size
    return torch.randint(
        min(5, vocab_size - 1), vocab_size, (length,), generator=generator
    ).tolist()


@torch.inference_mode()
def _answers(model: PooledModel, pooling: Pooling) -> torch.Tensor:
    """Inputs of several lengths, the longest included where it is short, in one batch."""
    lengths = {min(length, pooling.max_tokens) for length in PROBE_LENS}
    if pooling.max_tokens <= LONGEST_PROBE:
        lengths.add(pooling.max_tokens)
    probes = [_probe(model, length) for length in sorted(lengths)]
    starts = torch.tensor([0, *itertools.accumulate(map(len, probes))])
    token_ids = torch.tensor([token for probe in probes for token in probe], device=model.device)
    try:
        return model.raw(token_ids, torch.zeros_like(token_ids), starts)
    except Exception as fault:  # a foreign model may fail in any way
        raise ModelRefused(f"it cannot be computed: {one_line(fault)}") from fault


def _error(model: PooledModel, pooling: Pooling, expected: torch.Tensor) -> float:
    """Largest difference as a part of the expected range; infinite where it cannot run so."""
    try:
        answers = _answers(model, pooling)
    except ModelRefused:
        return float("inf")
    span = (expected.max() - expected.min()).clamp(min=1e-6)
    return float((answers - expected).abs().max() / span)
