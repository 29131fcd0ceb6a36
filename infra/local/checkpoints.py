"""Where a model to host comes from on this machine: a directory or a GGUF file. `hub` has the rest."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelRefused
from infra.local import gguf
from infra.local.gguf import CONVERSION_FILE, Progress


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that the engine can read, and the model's public name."""

    name: str
    directory: Path


def fetch(source: str, models_directory: Path, progress: Progress) -> Checkpoint:
    """The checkpoint that `source` names, converted if need be.

    Raises ModelRefused when there is no such thing, SetUpFailed when a conversion fails.
    """
    path = Path(source)
    if path.is_dir():
        return Checkpoint(path.resolve().name.replace("--", "/"), path.resolve())
    if path.suffix == ".gguf":
        return _from_gguf(path, models_directory, progress)
    raise ModelRefused(f"{source} is no directory, no .gguf file and no name on a model hub")


def _from_gguf(path: Path, models_directory: Path, progress: Progress) -> Checkpoint:
    if not path.is_file():
        raise ModelRefused(f"{path} does not exist")
    target = models_directory.resolve() / path.stem
    if not (target / CONVERSION_FILE).is_file():
        facts = {"model": path.stem, "source": path.name, "what": "dequantised to fp32"}
        gguf.convert(path.resolve(), target, facts=facts, extra_files={}, progress=progress)
    return Checkpoint(path.stem, target)
