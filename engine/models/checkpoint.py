"""Reads a checkpoint directory: `config.json` and safetensors, whole or in shards.

Nothing of the checkpoint is executed. Weights that are packed are unpacked as they are read, and
have the names of plain ones here. What cannot be hosted is refused with one sentence.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelRefused
from engine.models.unpacking.tensors import PackedTensor, is_companion, packed_tensors
from engine.packed_weights import read_packed_weights

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that old checkpoints saved; they are computed, not learned."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ModelRefused when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"{path.name} is missing in {path.parent}", path=str(path)) from None
    except ValueError as error:
        raise ModelRefused(f"{path.name} is not valid JSON: {error}", path=str(path)) from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path.name} is not a JSON object", path=str(path))
    return content


class Checkpoint:
    """The tensors of one checkpoint, read by name; remembers which were never asked for.

    They are read straight to `device`: a GPU's weights never take the host's memory.
    """

    def __init__(self, directory: Path, device: torch.device = CPU) -> None:
        self.directory = directory
        self._device = device
        self._file_by_name = _files_by_tensor(directory)
        self.packed = read_packed_weights(read_json(directory / "config.json"))
        """How its weights are packed; None where they are plain."""
        self._packed: dict[str, PackedTensor] = {}
        names = set(self._file_by_name)
        if self.packed is not None:
            self._packed = packed_tensors(names, self.packed)
            for each in self._packed.values():
                names -= set(each.sources.values())
            names = {name for name in names if not is_companion(name)} | self._packed.keys()
        self._names = names
        self._unread = {n for n in names if not n.endswith(IGNORED_SUFFIXES)}

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`; raises ModelRefused when missing or of another shape."""
        if name not in self._names:
            raise ModelRefused(f"the checkpoint lacks the tensor {name}", tensor=name)
        tensor = self._plain(name)
        if tuple(tensor.shape) != shape:
            raise ModelRefused(
                f"the tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}",
                tensor=name,
            )
        if not tensor.is_floating_point():
            raise ModelRefused(f"the tensor {name} is quantised ({tensor.dtype})", tensor=name)
        self._unread.discard(name)
        return tensor.to(dtype)

    def unpacked(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors by name: those that were packed in `dtype`, the others as they are stored."""
        return {
            name: tensor.to(dtype) if name in self._packed else tensor
            for name in sorted(self._names)
            for tensor in (self._plain(name),)
        }

    def skip(self, name: str) -> None:
        """Say that this tensor is known and not needed."""
        self._unread.discard(name)

    def refuse_unread(self) -> None:
        """Raise ModelRefused when tensors are left that the model's structure has no place for."""
        if self._unread:
            names = ", ".join(sorted(self._unread)[:3])
            raise ModelRefused(
                f"the checkpoint holds {len(self._unread)} tensors of an unknown structure: {names}"
            )

    def has_stored(self, name: str) -> bool:
        """Whether a tensor of this name is stored, one that belongs to no weight included."""
        return name in self._file_by_name

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored. Raises ModelRefused when it is missing."""
        if name not in self._file_by_name:
            raise ModelRefused(f"the checkpoint lacks the tensor {name}", tensor=name)
        self._unread.discard(name)
        return self._stored(name)

    def _plain(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        if packed is not None:
            return packed.read(self._stored)
        tensor = self._stored(name)
        if tensor.is_floating_point() and tensor.itemsize == 1:
            raise ModelRefused(f"the tensor {name} ({tensor.dtype}) has no scale", tensor=name)
        return tensor

    def _stored(self, name: str) -> torch.Tensor:
        path, device = self._file_by_name[name], str(self._device)
        with safe_open(path, framework="pt", device=device) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    single = directory / "model.safetensors"
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        is_map = isinstance(weight_map, dict) and all(
            isinstance(file, str) for file in weight_map.values()
        )
        if not is_map or not weight_map:
            raise ModelRefused(f"{INDEX} has no weight_map of names to files")
        files = {name: directory / Path(file).name for name, file in weight_map.items()}
    elif single.exists():
        files = dict.fromkeys(_tensor_names(single), single)
    else:
        raise ModelRefused(f"no safetensors weights in {directory}", path=str(directory))
    for path in sorted(set(files.values())):
        if not path.exists():
            raise ModelRefused(f"the shard {path.name} is missing", path=str(path))
        _tensor_names(path)
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelRefused(f"{path.name} cannot be read: {error}", path=str(path)) from error
