"""Tiny models that pool, with random weights, and what plain transformers computes with them.

The oracle pools token by token in plain Python over one input at a time: no padding, no mask.
"""

import json
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
CHANGES: dict[str, dict[str, object]] = {
    "DistilBertConfig": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    "ModernBertConfig": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "Qwen3Config": {"num_key_value_heads": 2, "head_dim": 16},
    "DebertaV2Config": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}


def save_pooled(family: str, directory: Path, auto: str = "AutoModel", **changes: object) -> None:
    """A model of the family `family` (its config class) and a tokenizer of words t0 … t319."""
    import tokenizers
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, family)(**(SHAPE | CHANGES.get(family, {}) | changes))
    getattr(transformers, auto).from_config(config).save_pretrained(directory)
    vocabulary = {f"t{index}": index for index in range(config.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="t2 $A t3",
        pair="t2 $A t3 $B:1 t3:1",
        special_tokens=[("t2", 2), ("t3", 3)],
    )
    words.save(str(directory / "tokenizer.json"))


def write_stages(
    directory: Path, mode: str = "mean_tokens", *, normalise: bool = True, dense: int = 0
) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling"] + ["Dense"] * bool(dense) + ["Normalize"] * normalise
    paths = ["" if index == 0 else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(directory / "modules.json", modules)
    write_json(directory / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True})
    if dense:
        from safetensors.torch import save_file

        layer = torch.nn.Linear(64, dense)
        config = {"in_features": 64, "out_features": dense, "bias": True}
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        write_json(directory / "2_Dense" / "config.json", config | activation)
        tensors = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
        save_file(tensors, directory / "2_Dense" / "model.safetensors")


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@torch.inference_mode()
def embedded(directory: Path, inputs: list[list[int]], mode: str, *, normalise: bool) -> Any:
    """[S, hidden]: plain transformers, one input at a time, and the pooling spelled out."""
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for token_ids in inputs:
        states = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        rows.append(_pool(states, mode))
    stacked = torch.stack(rows)
    return stacked / stacked.norm(dim=1, keepdim=True) if normalise else stacked


def _pool(states: torch.Tensor, mode: str) -> torch.Tensor:
    pooled = {
        "cls_token": states[0],
        "lasttoken": states[-1],
        "max_tokens": states.max(dim=0).values,
        "mean_tokens": states.mean(dim=0),
        "mean_sqrt_len_tokens": states.sum(dim=0) / len(states) ** 0.5,
    }
    return pooled[mode]


@torch.inference_mode()
def scored(directory: Path, inputs: list[list[int]], second_at: list[int]) -> Any:
    """[S]: the sigmoid of the logit of each pair."""
    import transformers

    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(directory, dtype=torch.float32).eval()
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0
    scores = []
    for token_ids, second in zip(inputs, second_at, strict=True):
        options = {}
        if second and getattr(model.config, "type_vocab_size", 0) > 1:
            types = [int(index >= second) for index in range(len(token_ids))]
            options["token_type_ids"] = torch.tensor([types])
        logits = model(input_ids=torch.tensor([token_ids]), **options).logits
        scores.append(logits[0, 0].sigmoid())
    return torch.stack(scores)
