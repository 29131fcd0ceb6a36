"""In fp32 the engine's greedy output is that of transformers' `generate`, token for token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import ModelRefused
from engine.model_runner import ModelRunner
from engine.models.decoder import load_decoder
from engine.settings import EngineSettings
from kernels.cpu import library
from tests.engine.driver import Driver, request

FAMILIES = ["LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "cpp"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Each test once in plain torch and once with the compiled kernels."""
    if request.param == "cpp":
        built = library.build(Path("/tmp") / "ncompass-test-kernels")
        if built.path is None:
            pytest.skip(built.reason)
        library.enable(built.path, 2)
    yield request.param
    library.disable()


def driver_of(directory: Path, num_blocks: int = 64, **settings: object) -> Driver:
    model = load_decoder(directory, torch.float32, torch.device("cpu"))
    runner = ModelRunner(model, num_blocks)
    return Driver(Engine(runner, EngineSettings(**settings), num_blocks))  # type: ignore[arg-type]


def save_tiny(family: str, directory: Path) -> None:
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, family)(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def generated(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates for each prompt by itself."""
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


def prompts_of_mixed_lengths(count: int, vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 3, 17, 40, 63, 64, 65, 100, 128, 129, 150, 7, 30, 90, 12, 70][:count]
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_what_transformers_does(
    family: str, tmp_path: Path, backend: str
) -> None:
    save_tiny(family, tmp_path)
    prompts = prompts_of_mixed_lengths(16)
    expected = generated(tmp_path, prompts, 24)
    alone = [driver_of(tmp_path).generate([request("a", prompt, 24)])[0] for prompt in prompts[::5]]
    assert alone == expected[::5]
    batch = driver_of(tmp_path, max_step_tokens=128)
    assert batch.generate([request(f"r{i}", p, 24) for i, p in enumerate(prompts)]) == expected
    # Again, now from the prefix cache; and on so little memory that sequences are preempted.
    again = [request(f"again{i}", p, 24) for i, p in enumerate(prompts)]
    assert batch.generate(again) == expected
    scarce = driver_of(tmp_path, num_blocks=8)
    assert scarce.generate([request(f"r{i}", p, 24) for i, p in enumerate(prompts)]) == expected


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_default_model_generates_what_transformers_does(
    default_model_directory: Path, backend: str
) -> None:
    prompts = [prompt for prompt in prompts_of_mixed_lengths(16, 40_000) if len(prompt) > 1]
    expected = generated(default_model_directory, prompts, 16)
    engine = driver_of(default_model_directory, num_blocks=80)
    outputs = engine.generate([request(f"r{i}", p, 16) for i, p in enumerate(prompts)])
    assert outputs == expected


def test_an_unknown_architecture_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelRefused, match="mamba"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))


def test_a_missing_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny("LlamaConfig", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match="up_proj"):
        load_decoder(tmp_path, torch.float32, torch.device("cpu"))
