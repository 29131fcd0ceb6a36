"""Where a model to host comes from: a directory, a GGUF file, or a model hub."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from engine.errors import ModelRefused
from infra.local import gguf
from infra.local.default_model import directory_name
from infra.local.gguf import CONVERSION_FILE, Progress

WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "LICENSE*", "README.md"]
"""No pickles and no code: only what is read as data."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that the engine can read, and the model's public name."""

    name: str
    directory: Path


def fetch(source: str, models_directory: Path, progress: Progress) -> Checkpoint:
    """The checkpoint that `source` names, converted or downloaded if need be.

    Raises ModelRefused when there is no such thing, SetUpFailed when a conversion fails.
    """
    path = Path(source)
    if path.is_dir():
        return Checkpoint(path.resolve().name.replace("--", "/"), path.resolve())
    if path.suffix == ".gguf":
        return _from_gguf(path, models_directory, progress)
    owner, _, name = source.partition("/")
    if owner not in ("", ".", "..", "~") and name and "/" not in name and not path.exists():
        return _from_hub(source, models_directory, progress)
    raise ModelRefused(f"{source} is no directory, no .gguf file and no name on a model hub")


def _from_gguf(path: Path, models_directory: Path, progress: Progress) -> Checkpoint:
    if not path.is_file():
        raise ModelRefused(f"{path} does not exist")
    target = models_directory.resolve() / path.stem
    if not (target / CONVERSION_FILE).is_file():
        facts = {"model": path.stem, "source": path.name, "what": "dequantised to fp32"}
        gguf.convert(path.resolve(), target, facts=facts, extra_files={}, progress=progress)
    return Checkpoint(path.stem, target)


def _from_hub(name: str, models_directory: Path, progress: Progress) -> Checkpoint:
    """A download goes on where an interrupted one stopped."""
    target = models_directory.resolve() / directory_name(name)
    progress(f"downloading {name} from its hub into {target}")
    try:
        snapshot_download(name, local_dir=target, allow_patterns=WANTED_FILES)
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as fault:
        reason = (str(fault).strip() or repr(fault)).splitlines()[0]
        raise ModelRefused(f"{name} could not be downloaded: {reason}") from fault
    return Checkpoint(name, target)
