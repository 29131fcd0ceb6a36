"""Where a model to host comes from on this machine: a directory or a GGUF file. `hub` has the rest."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelRefused
from infra.local import gguf, pickles
from infra.local.child import Progress
from infra.local.gguf import CONVERSION_FILE


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that the engine can read, and the model's public name."""

    name: str
    directory: Path


def fetch(
    source: str, models_directory: Path, progress: Progress, *, allows_pickles: bool = False
) -> Checkpoint:
    """The checkpoint that `source` names, converted if need be.

    Raises ModelRefused when there is no such thing, SetUpFailed when a conversion fails.
    """
    path = Path(source)
    if path.is_dir():
        name = path.resolve().name.replace("--", "/")
        if allows_pickles and pickles.has_only_pickles(path):
            return Checkpoint(name, _from_pickles(path.resolve(), models_directory, progress))
        return Checkpoint(name, path.resolve())
    if path.suffix == ".gguf":
        return _from_gguf(path, models_directory, progress)
    raise ModelRefused(f"{source} is no directory, no .gguf file and no name on a model hub")


def _from_pickles(source: Path, models_directory: Path, progress: Progress) -> Path:
    """Our own copy of an operator's directory, with safetensors; it appears whole or not at all."""
    target = models_directory.resolve() / source.name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        pickles.convert(source, partial, progress)
        for path in source.iterdir():
            if path.is_file() and path.suffix not in (".bin", ".py"):
                shutil.copyfile(path, partial / path.name)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _from_gguf(path: Path, models_directory: Path, progress: Progress) -> Checkpoint:
    if not path.is_file():
        raise ModelRefused(f"{path} does not exist")
    target = models_directory.resolve() / path.stem
    if not (target / CONVERSION_FILE).is_file():
        facts = {"model": path.stem, "source": path.name, "what": "dequantised to fp32"}
        gguf.convert(path.resolve(), target, facts=facts, extra_files={}, progress=progress)
    return Checkpoint(path.stem, target)
