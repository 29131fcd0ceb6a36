"""What a checkpoint answers with: text, an embedding, or a score; read from its files, torch-free.

An embedding model says in the files of sentence-transformers how its tokens become one vector:
`modules.json` names the stages, `1_Pooling/config.json` the pooling, `sentence_bert_config.json`
the longest input, `config_sentence_transformers.json` the prompts. A reranker is a sequence
classifier with one label. Worker and API read the same files and so agree on all of it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.context import context_length
from engine.errors import ModelRefused

ModelKind = Literal["generate", "embed", "rerank"]
PoolingMode = Literal["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens"]

OFFSET_FAMILIES = frozenset(
    {
        *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Their positions begin behind the id of the padding, so that some of the table is never used."""
ENCODER_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining")
"""Architectures that say nothing of generating text: pooled as sentence-transformers would."""
FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
UNLIMITED = 1 << 20
"""Tokenizer configurations write a huge number where they know no limit."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the tokens of an input become what is answered."""

    kind: ModelKind
    max_tokens: int
    """Longest input, special tokens included."""
    dimension: int
    """Of the vector; 1 for a score."""
    mode: PoolingMode = "mean"
    is_normalised: bool = False
    dense: tuple[str, ...] = ()
    """Folders of the layers behind the pooling, in their order."""
    is_score_logit: bool = False
    """The score is the logit itself and not its sigmoid."""
    is_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    """What is put before an input, by the name of its use."""
    default_prompt: str = ""

    def __str__(self) -> str:
        if self.kind == "rerank":
            return "logit as the score" if self.is_score_logit else "sigmoid of the logit"
        stages = [f"{self.mode} pooling"]
        stages += [f"dense {name}" for name in self.dense]
        stages.append("normalised" if self.is_normalised else "not normalised")
        return ", ".join(stages)


def kind_of(directory: Path) -> ModelKind:
    """What the checkpoint answers with. Raises ModelRefused for a broken configuration."""
    config = _read(directory / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return "rerank"
    if (directory / "modules.json").is_file() or (directory / "1_Pooling").is_dir():
        return "embed"
    return "embed" if architecture.endswith(ENCODER_SUFFIXES) else "generate"


def read_pooling(directory: Path) -> Pooling | None:
    """How a checkpoint pools; None for one that generates text.

    Raises ModelRefused for what the files ask for and this engine does not compute.
    """
    kind = kind_of(directory)
    if kind == "generate":
        return None
    config = _read(directory / "config.json")
    if kind == "rerank":
        return _reranker(directory, config)
    sentence = _read_optional(directory / "sentence_bert_config.json")
    prompts = _read_optional(directory / "config_sentence_transformers.json")
    named = {name: str(text) for name, text in (prompts.get("prompts") or {}).items()}
    stages = _stages(directory)
    pooled = next((folder for kind, folder in stages if kind == "Pooling"), "1_Pooling")
    pooling = _read_optional(directory / pooled / "config.json")
    if not pooling.get("include_prompt", True) and any(named.values()):
        raise ModelRefused("its pooling leaves the prompt out, which is not supported")
    dense = tuple(folder for kind, folder in stages if kind == "Dense")
    return Pooling(
        kind=kind,
        max_tokens=_max_tokens(directory, config, sentence),
        dimension=_dimension(directory, config, dense),
        mode=_mode(pooling),
        is_normalised=any(kind == "Normalize" for kind, _ in stages),
        dense=dense,
        is_lower_case=bool(sentence.get("do_lower_case")),
        prompts=named,
        default_prompt=named.get(str(prompts.get("default_prompt_name")), ""),
    )


def _reranker(directory: Path, config: dict[str, Any]) -> Pooling:
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        raise ModelRefused(f"it sorts texts into {num_labels} classes; a reranker has one score")
    trained = config.get("sentence_transformers")
    named = trained.get("activation_fn") if isinstance(trained, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = str(named).rsplit(".", 1)[-1]
    if activation not in ("Sigmoid", "Identity"):
        raise ModelRefused(f"its score goes through {activation}, which is not supported")
    return Pooling(
        kind="rerank",
        max_tokens=_max_tokens(directory, config, {}),
        dimension=1,
        is_score_logit=activation == "Identity",
    )


def _stages(directory: Path) -> list[tuple[str, str]]:
    """(type, folder) of each stage behind the transformer. Raises ModelRefused for unknown ones."""
    path = directory / "modules.json"
    if not path.is_file():
        return [("Pooling", "1_Pooling")]
    listed = _read_any(path)
    if not isinstance(listed, list) or not all(isinstance(stage, dict) for stage in listed):
        raise ModelRefused("modules.json is not a list of stages")
    stages = [(_kind(stage), Path(str(stage.get("path"))).name) for stage in listed]
    if not stages or stages[0][0] != "Transformer":
        raise ModelRefused("modules.json does not begin with a transformer")
    order = "".join(kind[:1] for kind, _ in stages[1:])
    unknown = {kind for kind, _ in stages[1:]} - {"Pooling", "Dense", "Normalize"}
    if unknown or order.rstrip("N").rstrip("D") != "P" or order.count("N") > 1:
        named = ", ".join(kind for kind, _ in stages)
        raise ModelRefused(f"its stages ({named}) are not a pooling, dense layers, a normalisation")
    return stages[1:]


def _kind(stage: dict[str, Any]) -> str:
    return str(stage.get("type", "")).rsplit(".", 1)[-1]


def _mode(pooling: dict[str, Any]) -> PoolingMode:
    """The one mode that is on; the mean where nothing is said."""
    chosen = [mode for flag, mode in FLAGS.items() if pooling.get(flag)]
    named = pooling.get("pooling_mode")
    if isinstance(named, str):
        chosen = [mode for mode in FLAGS.values() if mode == named]
    known = {*FLAGS, "pooling_mode_weightedmean_tokens"}
    others = [flag for flag in known - set(FLAGS) if pooling.get(flag)]
    if len(chosen) > 1 or others or (named and not chosen):
        raise ModelRefused(
            f"its pooling ({', '.join([*chosen, *others]) or named}) is not supported"
        )
    return chosen[0] if chosen else "mean"


def _max_tokens(directory: Path, config: dict[str, Any], sentence: dict[str, Any]) -> int:
    limit = context_length(config)
    if config.get("model_type") in OFFSET_FAMILIES:
        limit -= int(config.get("pad_token_id") or 0) + 1
    tokenizer = _read_optional(directory / "tokenizer_config.json")
    for named in (sentence.get("max_seq_length"), tokenizer.get("model_max_length")):
        if isinstance(named, int) and 0 < named < UNLIMITED:
            limit = min(limit, named)
    return limit


def _dimension(directory: Path, config: dict[str, Any], dense: tuple[str, ...]) -> int:
    text_config = config.get("text_config", config)
    hidden = text_config.get("hidden_size") or text_config.get("dim") or text_config.get("d_model")
    if dense:
        hidden = _read(directory / dense[-1] / "config.json").get("out_features")
    if not isinstance(hidden, int) or hidden < 1:
        raise ModelRefused("its configuration does not say how long its vectors are")
    return hidden


def _read_optional(path: Path) -> dict[str, Any]:
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    content = _read_any(path)
    if not isinstance(content, dict):
        raise ModelRefused(f"{path.name} is not a JSON object", path=str(path))
    return content


def _read_any(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"{path.name} is missing in {path.parent}", path=str(path)) from None
    except ValueError as error:
        raise ModelRefused(f"{path.name} is not valid JSON: {error}", path=str(path)) from error
