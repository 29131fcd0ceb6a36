"""Vectors and scores equal those of plain transformers, and nothing that shares a step moves them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.errors import ModelRefused
from engine.messages import CostModel, GenerateRequest, Sampling, TokenFrame
from engine.models.pooled import padded_length
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from tests.engine.tiny_pooled import embedded, save_pooled, scored, write_json, write_stages

LENGTHS = (5, 1, 16, 31, 150, 90, 7, 16, 33)
ENCODERS = {
    "BertConfig": "mean_tokens",
    "RobertaConfig": "cls_token",
    "XLMRobertaConfig": "mean_tokens",
    "DistilBertConfig": "mean_sqrt_len_tokens",
    "MPNetConfig": "max_tokens",
    "ModernBertConfig": "mean_tokens",
    "Qwen3Config": "lasttoken",
}
RERANKERS = ("BertConfig", "XLMRobertaConfig", "DebertaV2Config", "ModernBertConfig", "Qwen3Config")


@pytest.fixture(autouse=True)
def uncalibrated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model of round numbers; measuring one takes longer than these tests."""
    round_numbers = CostModel(
        base_s=1e-4, per_token_s=1e-5, per_prefill_context_s=1e-9, per_decode_context_s=1e-9
    )
    if request.function is not test_its_seconds_are_measured_at_the_start:
        monkeypatch.setattr("engine.worker.loading.fit_cost_model", lambda *_, **__: round_numbers)


def inputs_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(5, 320, (length,), generator=generator) for length in lengths]
    return [ids.tolist() for ids in drawn]


def settings(tmp_path: Path, **changes: object) -> EngineSettings:
    chosen = {"dtype": "fp32", "device": "cpu", "calibration_cache": tmp_path / "calibrated"}
    return EngineSettings(**(chosen | changes))  # type: ignore[arg-type]


def ask(
    request_id: str, token_ids: list[int], second_at: int = 0, tenant: str = "tenant"
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model="model",
        node="node",
        tenant=tenant,
        prompt_token_ids=token_ids,
        sampling=Sampling(),
        authorized_tokens=1,
        max_tokens=1,
        arrival_ms=0,
        key=float(len(token_ids)),
        is_pooled=True,
        second_text_at=second_at,
    )


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, TokenFrame]:
    for request in requests:
        engine.add(request)
    frames: dict[str, TokenFrame] = {}
    for _ in range(1_000):
        if not engine.has_work:
            break
        for frame in engine.step().frames.get("node", []):
            assert frame.request_id not in frames, "more than one frame for one input"
            frames[frame.request_id] = frame
    assert engine.problems() == []
    assert engine.stats.num_running == 0
    return frames


def vectors_of(engine: Engine, inputs: list[list[int]], seconds: list[int] | None = None) -> object:
    seconds = seconds or [0] * len(inputs)
    requests = [ask(str(n), ids, seconds[n]) for n, ids in enumerate(inputs)]
    frames = run(engine, requests)
    rows = [frames[str(number)].vector for number in range(len(inputs))]
    return np.stack([np.frombuffer(row, "<f4") for row in rows if row is not None])


@pytest.mark.parametrize(("family", "mode"), ENCODERS.items())
def test_embeddings_equal_plain_transformers(family: str, mode: str, tmp_path: Path) -> None:
    save_pooled(family, tmp_path)
    write_stages(tmp_path, mode)
    loaded = load_engine(tmp_path, settings(tmp_path))
    assert loaded.report.tier.startswith("embed:"), "it is computed in batches"
    found = vectors_of(loaded.engine, inputs_of())
    expected = embedded(tmp_path, inputs_of(), mode, normalise=True)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("family", RERANKERS)
def test_scores_of_pairs_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    save_pooled(family, tmp_path, "AutoModelForSequenceClassification", num_labels=1)
    loaded = load_engine(tmp_path, settings(tmp_path))
    inputs = inputs_of()
    seconds = [len(ids) // 2 for ids in inputs]
    found = vectors_of(loaded.engine, inputs, seconds)
    expected = scored(tmp_path, inputs, seconds)
    np.testing.assert_allclose(found[:, 0], expected.numpy(), atol=2e-5)  # type: ignore[index]


@pytest.mark.parametrize("family", ["BertConfig", "ModernBertConfig", "Qwen3Config"])
def test_what_shares_the_step_changes_rounding_only(family: str, tmp_path: Path) -> None:
    save_pooled(family, tmp_path)
    write_stages(tmp_path)
    engine = load_engine(tmp_path, settings(tmp_path)).engine
    inputs = inputs_of((5, 12, 15, 16, 16, 17, 31, 150, 90, 7, 3, 3))
    together = vectors_of(engine, inputs)
    alone = [vectors_of(engine, [ids]) for ids in inputs]
    np.testing.assert_allclose(np.concatenate(alone), together, atol=1e-6)  # type: ignore[arg-type]


def test_a_model_that_padding_disturbs_computes_one_input_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    save_pooled("BertConfig", tmp_path)
    forward = transformers.BertModel.forward

    def careless(self: object, *, input_ids: torch.Tensor, **options: object) -> object:
        return forward(self, input_ids=input_ids)  # as if it knew no mask

    monkeypatch.setattr(transformers.BertModel, "forward", careless)
    loaded = load_engine(tmp_path, settings(tmp_path))
    assert "one input at a time" in loaded.report.tier
    found = vectors_of(loaded.engine, inputs_of())
    expected = embedded(tmp_path, inputs_of(), "mean_tokens", normalise=False)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)  # type: ignore[arg-type]


def test_dense_layers_stand_between_pooling_and_norm(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_pooled("BertConfig", tmp_path)
    write_stages(tmp_path, dense=24)
    found = vectors_of(load_engine(tmp_path, settings(tmp_path)).engine, inputs_of())
    weights = load_file(tmp_path / "2_Dense" / "model.safetensors")
    states = embedded(tmp_path, inputs_of(), "mean_tokens", normalise=False)
    expected = torch.tanh(states @ weights["linear.weight"].T + weights["linear.bias"])
    expected = expected / expected.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


def test_a_body_may_come_with_a_head_that_is_not_used(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path, "AutoModelForMaskedLM")
    found = vectors_of(load_engine(tmp_path, settings(tmp_path)).engine, inputs_of())
    expected = embedded(tmp_path, inputs_of(), "mean_tokens", normalise=False)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


def test_a_long_input_is_never_cut_and_short_ones_go_in_few_steps(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path)
    engine = load_engine(tmp_path, settings(tmp_path, max_step_tokens=64)).engine
    inputs = inputs_of((150, 20, 20, 20, 9, 120))
    assert len(run(engine, [ask(str(n), ids) for n, ids in enumerate(inputs)])) == len(inputs)
    assert engine.stats.prefill_tokens_total == sum(map(len, inputs))
    assert engine.stats.num_steps == 4, "20 + 20 + 9, 20, and each of the long ones by itself"


def test_both_tenants_are_charged_and_the_refused_are_told(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path)
    engine = load_engine(tmp_path, settings(tmp_path)).engine
    wants_text = replace_pooled(ask("text", [5, 6]))
    longest = inputs_of((160, 161))
    engine.add(ask("a", longest[0], tenant="a"))
    engine.add(ask("b", [7, 8], tenant="b"))
    engine.add(ask("too long", longest[1]))
    engine.add(wants_text)
    charges: dict[str, float] = {}
    frames: dict[str, TokenFrame] = {}
    while engine.has_work:
        output = engine.step()
        charges |= output.charges
        frames |= {frame.request_id: frame for frame in output.frames.get("node", [])}
    assert min(charges["a"], charges["b"]) > 0
    assert frames["a"].vector
    assert frames["b"].vector
    assert "no room" in str(frames["too long"].error)
    assert "another kind" in str(frames["text"].error)


def replace_pooled(request: GenerateRequest) -> GenerateRequest:
    import msgspec

    return msgspec.structs.replace(request, is_pooled=False)


def test_a_vector_that_is_not_finite_is_an_error_of_its_own_request(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path)
    loaded = load_engine(tmp_path, settings(tmp_path))
    model = loaded.engine._runner.model._original  # type: ignore[attr-defined]
    model.embeddings.word_embeddings.weight[9] = float("nan")
    frames = run(loaded.engine, [ask("good", [5, 6]), ask("bad", [9, 6])])
    assert frames["good"].vector
    assert "finite" in str(frames["bad"].error)


def test_what_cannot_be_pooled_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path, "AutoModelForSequenceClassification", num_labels=3)
    with pytest.raises(ModelRefused, match="3 classes"):
        load_engine(tmp_path, settings(tmp_path))
    save_pooled("BertConfig", tmp_path)
    write_stages(tmp_path, "weightedmean_tokens")
    with pytest.raises(ModelRefused, match="weightedmean"):
        load_engine(tmp_path, settings(tmp_path))
    write_json(tmp_path / "modules.json", [{"type": "sentence_transformers.models.CLIPModel"}])
    with pytest.raises(ModelRefused, match="begin with a transformer"):
        load_engine(tmp_path, settings(tmp_path))


def test_its_seconds_are_measured_at_the_start(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path, max_position_embeddings=640)
    cost_model = load_engine(tmp_path, settings(tmp_path)).engine.cost_model
    assert cost_model is not None
    assert cost_model.work_s(500) > cost_model.work_s(50) > 0


@pytest.mark.parametrize("length", [1, 16, 17, 127, 129, 300, 513, 8_000])
def test_padding_is_bounded(length: int) -> None:
    padded = padded_length(length)
    assert 0 <= padded - length <= max(15, length / 8)
