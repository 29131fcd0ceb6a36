"""Models are added from a hub: a real client, a hub of ours, every fault that a hub can have."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file

from engine import catalog
from engine.errors import ModelRefused
from engine.models.checkpoint import Checkpoint
from infra.errors import SetUpFailed
from infra.local import checkpoints, hub
from infra.local.hub import HubAccess, HubModel, describe, fetch_weights
from infra.settings import InfraSettings
from tests.engine.lora import save_adapter
from tests.infra.hub_server import REVISION, HubServer, serve_hub
from tests.infra.test_additions import checkpoint, hosts

NAME = "org/model"


@pytest.fixture
def server() -> Iterator[HubServer]:
    with serve_hub() as found:
        yield found


@pytest.fixture
def source(server: HubServer, tmp_path: Path) -> Path:
    """A checkpoint on the hub, among files that nobody wants."""
    directory = checkpoint(tmp_path / "source")
    for unwanted in ("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "a.gguf"):
        (directory / unwanted).parent.mkdir(exist_ok=True)
        (directory / unwanted).write_bytes(b"unwanted" * 1000)
    save_numpy({"x": np.zeros(9, np.float32)}, directory / "consolidated.safetensors")
    server.repositories[NAME] = directory
    return directory


def described(server: HubServer, models: Path, token: str | None = None) -> HubModel:
    return describe(NAME, models, HubAccess(server.url, token), lambda line: None)


def test_descriptions_come_first_then_the_weights_and_nothing_else(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    model = described(server, models)
    assert model.revision == REVISION
    assert set(server.fetched()) == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        "tokenizer.json",
    }
    assert [span for _, path, span in server.asked if path.endswith("model.safetensors")] == [
        "bytes=0-100000"
    ], "only the header of the weights"
    assert not (model.directory / "model.safetensors").exists()
    assert not model.target.exists()
    lines: list[str] = []
    whole = fetch_weights(model, lines.append)
    assert whole == models / "org--model@01234567"
    assert sorted(path.name for path in whole.iterdir()) == [
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        "tokenizer.json",
    ]
    assert (whole / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert [path.name for path in models.iterdir()] == [whole.name]
    # again: nothing is fetched
    server.asked.clear()
    assert fetch_weights(described(server, models), lines.append) == whole
    assert lines[-1] == "org/model is here already"
    assert [path for path in server.fetched() if path != "model.safetensors"] == []


def test_progress_is_told_while_it_comes(
    server: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "POLL_S", 0.05)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    model = described(server, tmp_path / "models")
    half = (source / "model.safetensors").stat().st_size // 2
    server.stalls["model.safetensors"] = half
    lines: list[str] = []
    fetching = threading.Thread(target=fetch_weights, args=(model, lines.append))
    fetching.start()
    assert server.stalled.wait(10)
    deadline_s = time.monotonic() + 5
    while not any("(4" in line or "(5" in line for line in lines) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    server.released.set()
    fetching.join(timeout=10)
    assert any(" of 544 KB (4" in line or " of 544 KB (5" in line for line in lines), lines
    assert model.target.is_dir()


def test_a_connection_that_breaks_goes_on_where_it_broke(
    server: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # of 10 MB
    model = described(server, tmp_path / "models")
    server.breaks["model.safetensors"] = [100_000]
    server.asked.clear()
    whole = fetch_weights(model, lambda line: None)
    assert (whole / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    spans = [span for method, path, span in server.asked if method == "GET" and "model.s" in path]
    assert spans[0] == ""
    assert 0 < int(spans[1].removeprefix("bytes=").removesuffix("-")) <= 100_000


@pytest.mark.parametrize(
    ("spoil", "token", "sentence"),
    [
        (lambda server, source: server.repositories.clear(), None, "the hub has no org/model"),
        (lambda server, source: server.private.add(NAME), None, "the hub has no org/model"),
        (lambda server, source: server.gated.add(NAME), None, "org/model is gated: .* HF_TOKEN"),
        (lambda server, source: server.gated.add(NAME), "bad", "org/model is gated"),
        (lambda server, source: server.gated.add(NAME), "good", ""),
        (
            lambda server, source: [path.unlink() for path in source.glob("*.safetensors")],
            None,
            "its weights as pickles only, .*--allow-pickles",
        ),
        (
            lambda server, source: [path.unlink() for path in source.glob("*m*.[bs]*")],
            None,
            "GGUF files only",
        ),
        (
            lambda server, source: (source / "model.safetensors").write_bytes(b"x" * 90),
            None,
            "could not be downloaded: Failed to parse safetensors header",
        ),
    ],
    ids=["unknown", "private", "gated", "wrong token", "right token", "pickles", "gguf", "broken"],
)
def test_what_cannot_be_had_is_told_in_one_sentence(
    server: HubServer,
    source: Path,
    tmp_path: Path,
    spoil: Callable[[HubServer, Path], object],
    token: str | None,
    sentence: str,
) -> None:
    spoil(server, source)
    if not sentence:
        assert described(server, tmp_path / "models", token).files
        return
    with pytest.raises(ModelRefused, match=sentence) as refusal:
        described(server, tmp_path / "models", token)
    assert "\n" not in refusal.value.message


def test_a_hub_that_is_not_there_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"^org/model could not be downloaded: ") as refusal:
        describe(NAME, tmp_path, HubAccess("http://127.0.0.1:9"), lambda line: None)
    assert "\n" not in refusal.value.message


def test_a_disk_without_room_is_found_before_the_weights(
    server: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = described(server, tmp_path / "models")
    server.asked.clear()

    class Usage:
        free = 1000

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(ModelRefused, match=r"takes 54\d KB on disk, .* are free"):
        fetch_weights(model, lambda line: None)
    assert server.asked == []


def test_the_hub_and_the_token_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.setenv("HF_TOKEN", "secret")
    settings = InfraSettings()
    assert settings.hub_endpoint == "http://hub.example"
    assert "secret" not in repr(settings)
    assert settings.hub_token is not None
    assert settings.hub_token.get_secret_value() == "secret"


class Hostile:
    """Runs code where it is unpickled as Python would."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/ncompass-a-pickle-ran",)


def test_pickles_are_fetched_where_they_are_allowed_and_read_as_tensors_only(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    tensors = load_file(source / "model.safetensors")
    for unwanted in ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        (source / unwanted).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:]), start=1):
        path = source / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, path)
    access = HubAccess(server.url, allows_pickles=True)
    model = describe(NAME, tmp_path / "models", access, lambda line: None)
    num_weights = sum(x.numel() for x in tensors.values())
    assert sum(model.stored.num_elements.values()) == pytest.approx(num_weights, rel=0.1)
    whole = fetch_weights(model, lambda line: None)
    assert not list(whole.glob("*.bin"))
    assert not list(whole.glob("*.py"))
    found = Checkpoint(whole)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name, tuple(tensor.shape), torch.float32), tensor)


def test_a_directory_with_pickles_is_left_as_it_is_and_no_code_in_them_runs(
    source: Path, tmp_path: Path
) -> None:
    tensors, models = load_file(source / "model.safetensors"), tmp_path / "models"
    local = tmp_path / "org--local"
    shutil.copytree(source, local, ignore=shutil.ignore_patterns("onnx", "*.safetensors"))
    torch.save(tensors, local / "pytorch_model.bin")
    before = sorted(path.name for path in local.iterdir())
    assert checkpoints.fetch(str(local), models, print).directory == local
    mine = checkpoints.fetch(str(local), models, print, allows_pickles=True)
    assert (mine.name, mine.directory) == ("org/local", models / "org--local")
    assert sorted(path.name for path in local.iterdir()) == before
    assert load_file(mine.directory / "model.safetensors").keys() == tensors.keys()
    assert not (mine.directory / "modeling_own.py").exists()
    shutil.rmtree(mine.directory)
    (local / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Hostile()}))
    with pytest.raises(SetUpFailed, match=r"pytorch_model.bin holds more than tensors, or is"):
        checkpoints.fetch(str(local), models, print, allows_pickles=True)
    assert not Path("/tmp/ncompass-a-pickle-ran").exists()
    assert list(models.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from infra.local.hub import HubAccess, describe, fetch_weights
access = HubAccess(sys.argv[1])
fetch_weights(describe("org/model", Path(sys.argv[2]), access, print), print)
"""


@pytest.mark.slow
async def test_a_model_of_a_hub_goes_live_after_a_kill_and_a_failed_one_leaves_nothing(
    server: HubServer, source: Path, sqlite_url: str, clean_redis: str, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    # 1. killed in the middle of its weights: nothing has a name yet
    server.stalls["model.safetensors"] = 50_000
    child = subprocess.Popen([sys.executable, "-c", KILLED, server.url, str(models)])
    assert server.stalled.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    assert [path.name for path in models.iterdir()] == [".partial-org--model"]
    del server.stalls["model.safetensors"]
    server.asked.clear()
    async with hosts(sqlite_url, clean_redis, tmp_path) as platform:
        platform.runner.hub_access = HubAccess(server.url)
        # 2. asked for again: what was whole is not fetched again
        added = await platform.add(Path(NAME))
        assert (added.state, added.name) == ("live", NAME), added.detail
        assert set(server.fetched()) == {"model.safetensors"}
        assert [path.name for path in models.iterdir()] == ["org--model@01234567"]
        # 3. one that does not fit is refused before its weights come
        big = tmp_path / "big"
        big.mkdir()
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                (big / path.name).write_bytes(path.read_bytes())
        config = json.loads((big / "config.json").read_text())
        config |= {"num_hidden_layers": 10_000, "max_position_embeddings": 1_000_000}
        (big / "config.json").write_text(json.dumps(config))
        (big / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        server.repositories["org/big"] = big
        failed = await platform.add(Path("org/big"))
        assert (failed.state, failed.failed_step) == ("failed", "checking")
        assert "it does not fit" in failed.detail
        # 4. one whose weights never come
        server.repositories["org/broken"] = source
        server.broken.add("model.safetensors")
        server.asked.clear()
        failed = await platform.add(Path("org/broken"))
        assert (failed.state, failed.failed_step) == ("failed", "fetching"), failed.detail
        assert failed.detail.startswith("org/broken could not be downloaded: ")
        # 5. an adapter of the first
        save_adapter(source, tmp_path / "tuned", base_model_name_or_path=NAME)
        (tmp_path / "tuned" / "README.md").write_text("---\nlicense: mit\n---\n")
        server.repositories["org/tuned"] = tmp_path / "tuned"
        tuned = await platform.add(Path("org/tuned"))
        assert tuned.state == "live", tuned.detail
        assert sorted(path.name for path in models.iterdir()) == [
            *("org--model@01234567", "org--tuned@01234567")
        ]
        async with platform.sessions() as session:
            live = [model.name for model in await catalog.live_models(session)]
        assert live == [NAME, "org/tuned"]
