"""What cannot be hosted is refused at load, in one clear sentence; what is loaded says how."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelRefused
from engine.models.checkpoint import Checkpoint
from engine.models.choice import load_model
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from tests.engine.driver import Driver, request
from tests.engine.tiny import generated, save_tiny

GEMMA = ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16})

LAYERS = ["sliding_attention", "full_attention"]


def load(directory: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "fp32",
        "num_threads": 1,
        "kv_cache_mib": 16,
        "calibration_cache": directory / "calibration",
    }
    return load_engine(directory, EngineSettings(**(defaults | settings)))


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A checkpoint that the attention hook runs."""
    save_tiny(GEMMA[0], tmp_path, **GEMMA[1])
    return tmp_path


def change(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "perceptron9"}, "architecture perceptron9 is unknown to transformers"),
        ({"model_type": "own", "auto_map": {"AutoModel": "m.M"}}, "never run"),
        ({"model_type": "vit"}, "not a text-generation architecture"),
        ({"quantization_config": {"quant_method": "eetq"}}, "checkpoints quantised by eetq"),
        ({"hidden_activation": "zigzag"}, "transformers cannot build this model"),
        ({"intermediate_size": 80}, r"shape \(64, 96\), the config says \(64, 80\)"),
        ({"num_hidden_layers": 4, "layer_types": LAYERS * 2}, "lacks the tensor model.layers.3"),
        (
            {"num_hidden_layers": 2, "layer_types": LAYERS},
            "tensors of an unknown structure: model.layers.2",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_configuration_is_refused(
    gemma: Path, changes: dict[str, Any], sentence: str
) -> None:
    change(gemma, changes)
    with pytest.raises(ModelRefused, match=sentence) as refusal:
        load(gemma)
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("weight_map", [None, [1], {"lm_head.weight": 5}, {}])
def test_an_index_that_maps_nothing_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelRefused, match="no weight_map of names to files"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_refused_by_its_name(gemma: Path) -> None:
    tensors = load_file(gemma / "model.safetensors")
    names = sorted(tensors)
    (gemma / "model.safetensors").unlink()
    save_file({names[0]: tensors[names[0]]}, gemma / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00002-of-00002.safetensors")
    weight_map[names[0]] = "model-00001-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": weight_map}
    (gemma / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"shard model-00002-of-00002.safetensors is missing"):
        load(gemma)


def test_weights_that_are_no_safetensors_are_not_read(gemma: Path) -> None:
    torch.save(load_file(gemma / "model.safetensors"), gemma / "pytorch_model.bin")
    (gemma / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no safetensors weights"):
        load(gemma)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_checkpoint_without_a_tokenizer_is_refused(gemma: Path, content: str | None) -> None:
    path = gemma / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        load(gemma)


def test_the_load_report_says_tier_reason_and_errors(gemma: Path) -> None:
    report = load(gemma).report
    assert report.tier == "attention hook"
    assert [check.name for check in report.checks] == ["prefill", "chunk", "decode", "resume"]
    assert all(check.error < 1e-5 for check in report.checks)
    assert "the architecture gemma2" in str(report)
    assert "no chat template" in str(report)
    (gemma / "chat_template.jinja").write_text("{{ messages }}")
    assert "no chat template" not in str(load(gemma).report)


def test_an_attention_that_computes_something_else_falls_to_the_models_own(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models import hooked

    right = hooked.paged_attention

    def forgetful(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **(options | {"softcap": None, "scale": 1.0}))

    monkeypatch.setattr(hooked, "paged_attention", forgetful)
    model, report = load_model(gemma, torch.float32, torch.device("cpu"))
    assert report.tier == "own cache, in chunks"
    assert "under the attention hook its logits differ" in report.reason
    assert model.spec.shares_blocks is False
    assert model.spec.can_rewind is False


def test_states_of_a_fixed_size_limit_how_many_sequences_run(tmp_path: Path) -> None:
    save_tiny("MambaConfig", tmp_path, head_dim=None, state_size=16)
    loaded = load(tmp_path, kv_cache_mib=1)
    per_sequence = loaded.engine._runner.model.spec.bytes_per_sequence
    assert loaded.engine._settings.max_running == 2**20 // 2 // per_sequence
    prompt = list(range(3, 40))
    driver = Driver(loaded.engine)
    expected = generated(tmp_path, [prompt], 8)
    outputs = driver.generate([request(f"r{i}", prompt, 8) for i in range(12)])
    assert outputs == expected * 12
    states = loaded.engine._runner.kv_cache.by_block
    assert len(states) <= loaded.engine._settings.max_running


def test_a_fused_model_is_held_against_the_original_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.models import decoder

    save_tiny("LlamaConfig", tmp_path)
    assert load(tmp_path).report.checks == ()
    report = load(tmp_path, verify_fused=True).report
    assert report.is_fused
    assert len(report.checks) == 4
    assert all(check.error < 1e-4 for check in report.checks)
    monkeypatch.setattr(decoder, "rms_norm", lambda x, weight, eps: x * weight)
    wrong = load(tmp_path, verify_fused=True).report
    assert wrong.tier == "attention hook"
    assert wrong.reason.startswith("fused, its logits differ: prefill")
