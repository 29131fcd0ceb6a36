"""Writes pickled weights (`pytorch_model*.bin`) as safetensors, where an operator has allowed it.

A pickle can run code while it is read. torch reads these as tensors only (`weights_only`) and refuses
what is more; even so it is done once, in a process of its own (`python -m infra.local.pickles SOURCE
TARGET`), and the workers never see the pickle.
"""

import json
import sys
from pathlib import Path

from infra.local.child import Progress, run_module, say

PICKLED = "pytorch_model*.bin"
INDEX = "model.safetensors.index.json"


def has_only_pickles(directory: Path) -> bool:
    """Whether the weights of a checkpoint are there as pickles, and in no other form."""
    return any(directory.glob(PICKLED)) and not any(directory.glob("*.safetensors"))


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write the weights of `source` into `target`. Raises SetUpFailed with the reason."""
    progress("writing pickled weights as safetensors")
    failed = "its pickled weights could not be read"
    run_module("infra.local.pickles", [str(source), str(target)], progress, failed=failed)


def _read_and_write(source: Path, target: Path) -> None:
    """The child's work."""
    import torch  # noqa: PLC0415 - only this child pays for it
    from safetensors.torch import save_file  # noqa: PLC0415 - it imports torch

    paths = sorted(source.glob(PICKLED))
    weight_map: dict[str, str] = {}
    for number, path in enumerate(paths, start=1):
        say(f"writing {path.name} as safetensors, {number} of {len(paths)}")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as fault:  # a foreign file may fail in any way
            sys.exit(f"{path.name} holds more than tensors, or is broken ({type(fault).__name__})")
        is_plain = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in found.items()
        )
        if not is_plain:
            sys.exit(f"{path.name} holds no plain table of tensors")
        shard = f"model-{number:05}-of-{len(paths):05}.safetensors"
        file = "model.safetensors" if len(paths) == 1 else shard
        # Tied tensors share memory, which a file cannot say.
        owned = {name: tensor.clone().contiguous() for name, tensor in found.items()}
        save_file(owned, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(found, file)
    if len(paths) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index))


if __name__ == "__main__":
    _read_and_write(Path(sys.argv[1]), Path(sys.argv[2]))
