"""The original of a checkpoint: transformers' own model, which tiers two and three build upon.

Safetensors only, and no code of the checkpoint is ever run. Whatever transformers raises while it
builds a foreign model becomes one sentence for the operator.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelRefused
from engine.models.checkpoint import IGNORED_SUFFIXES, Checkpoint, read_json

Original = Any
"""A `transformers.PreTrainedModel` that generates text; its own types do not tell that it does."""
MAX_SENTENCE = 300
"""Characters of a foreign error that are worth repeating."""


def load_original(directory: Path, dtype: torch.dtype, device: torch.device) -> Original:
    """The model in evaluation mode. Raises ModelRefused with one clear sentence."""
    model_type = read_json(directory / "config.json").get("model_type")
    if model_type in CONFIG_MAPPING and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelRefused(f"{model_type} is not a text-generation architecture")
    return build(AutoModelForCausalLM, directory, dtype, device)


def build(
    auto: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_headless: bool = False,
) -> Original:
    """The model that one of transformers' auto classes makes of a checkpoint.

    `is_headless`: what computes something of the hidden states may be there or not, it is not used.
    Raises ModelRefused with one clear sentence.
    """
    _refuse_unknown(read_json(directory / "config.json"))
    checkpoint = Checkpoint(directory)  # every shard is there and readable
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # nor here
    try:
        model, loaded = _load(auto, checkpoint, dtype)
    except ModelRefused:
        raise
    except Exception as fault:
        raise ModelRefused(f"transformers cannot build this model: {one_line(fault)}") from fault
    _refuse_incomplete(loaded, _heads(model, loaded) if is_headless else frozenset())
    model.requires_grad_(False)
    return model.eval().to(device)


def _load(auto: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Original, dict[str, Any]]:
    """The model, and what was missing or left over. Packed weights are handed over unpacked."""
    common = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    own_files = {"trust_remote_code": False, "local_files_only": True}
    directory = checkpoint.directory
    found: tuple[Original, dict[str, Any]]
    if checkpoint.packed is None:
        found = auto.from_pretrained(directory, use_safetensors=True, **own_files, **common)
        return found
    config = AutoConfig.from_pretrained(directory, **own_files)
    del config.quantization_config  # else transformers looks for the tool that packed them
    with torch.device("meta"):
        architecture: Any = type(auto.from_config(config, trust_remote_code=False))
    tensors = checkpoint.unpacked(dtype)
    found = architecture.from_pretrained(None, config=config, state_dict=tensors, **common)
    return found


def num_weight_bytes(original: Original) -> int:
    """Bytes of all parameters: what a step reads, where it reads them all."""
    return sum(parameter.nbytes for parameter in original.parameters())


def _refuse_unknown(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if config.get("auto_map"):
            raise ModelRefused(f"{model_type} needs code from its checkpoint, which is never run")
        raise ModelRefused(
            f"the architecture {model_type} is unknown to transformers {__version__}"
        )


def _heads(model: Original, loaded: dict[str, Any]) -> frozenset[str]:
    """Tensors of parts that the body of a model has not, and of the pooler that few are saved with."""
    body = {name for name, _ in model.named_children()} - {"pooler"}
    names = {*loaded["missing_keys"], *loaded["unexpected_keys"]}
    prefix = f"{model.base_model_prefix}."
    return frozenset(n for n in names if n.removeprefix(prefix).split(".")[0] not in body)


def _refuse_incomplete(loaded: dict[str, Any], ignored: frozenset[str]) -> None:
    for name, found, expected in sorted(loaded["mismatched_keys"]):
        raise ModelRefused(
            f"the tensor {name} has shape {tuple(found)}, the config says {tuple(expected)}"
        )
    if missing := sorted(set(loaded["missing_keys"]) - ignored):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelRefused(f"the checkpoint lacks the tensor {missing[0]}{more}")
    unexpected = set(loaded["unexpected_keys"]) - ignored
    unread = sorted(name for name in unexpected if not name.endswith(IGNORED_SUFFIXES))
    if unread:
        names = ", ".join(unread[:3])
        raise ModelRefused(
            f"the checkpoint holds {len(unread)} tensors of an unknown structure: {names}"
        )


def one_line(fault: Exception) -> str:
    """A foreign error in a sentence's tail."""
    text = " ".join(str(fault).split()) or "no reason given"
    return f"{type(fault).__name__}: {text[:MAX_SENTENCE]}"
