"""Which tile each attention kernel takes on which GPU: measured once, kept on disk, shipped where known.

A table belongs to one GPU by name and one version of Triton. What it does not know, the rules of the
kernel files decide, which also wrote the tables that come with the product:
`tuned/*.json` say so in their `origin` until a GPU has measured them.

    python -m kernels.benchmarks.tune        measures this GPU, writes its table
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

SHIPPED = Path(__file__).parent / "tuned"
RULES = "rules"
MEASURED = "measured"
LONGEST = 4096
"""Longer chunks take the tile of this length."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program of a kernel is shaped."""

    rows: int
    """Tokens times the query heads of one KV head."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a tile is chosen by."""

    dtype: str
    head_dim: int
    group: int
    query_len: int
    """Rounded up to a power of two: longest chunk of the step."""

    @property
    def key(self) -> str:
        """As tables write it."""
        return f"prefill {self.dtype} d{self.head_dim} g{self.group} n{self.query_len}"


@dataclass(frozen=True, slots=True)
class TuningTable:
    """Tiles by shape, for one GPU."""

    gpu: str
    triton: str
    """The version that compiled what was measured; empty: of the rules, which hold for all."""
    origin: str
    """`rules` or `measured`."""
    tiles: dict[str, Tile]

    def find(self, shape: TileShape) -> Tile | None:
        """The tile for a shape, None where it is unknown."""
        return self.tiles.get(shape.key)

    def write(self, path: Path) -> None:
        """Whole or not at all: two workers may start at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> TuningTable | None:
        """A table; None where there is none that can be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tiles = {key: Tile(**tile) for key, tile in content["tiles"].items()}
            return cls(content["gpu"], content["triton"], content["origin"], tiles)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def table_name(gpu: str, triton: str) -> str:
    """The file of a measured table."""
    words = "".join(letter if letter.isalnum() else "-" for letter in gpu.lower())
    return f"{words}-triton-{triton}.json"


def table_for(gpu: str, triton: str, directory: Path) -> TuningTable | None:
    """What was measured on this machine, else what the product brings for such a GPU."""
    measured = TuningTable.read(directory / table_name(gpu, triton))
    if measured is not None and (measured.gpu, measured.triton) == (gpu, triton):
        return measured
    shipped = (TuningTable.read(path) for path in sorted(SHIPPED.glob("*.json")))
    return next((table for table in shipped if table is not None and table.gpu in gpu), None)


def shape_of(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> TileShape:
    """The shape of a launch."""
    rounded = min(LONGEST, 1 << max(max_query_len - 1, 0).bit_length())
    return TileShape(str(dtype).removeprefix("torch."), head_dim, group, rounded)


_active: list[TuningTable] = []


def enable(directory: Path, device: torch.device) -> TuningTable | None:
    """Let this process take its tiles from the table of its GPU, where there is one."""
    _active.clear()
    if device.type == "cuda":
        table = table_for(torch.cuda.get_device_name(device), version("triton"), directory)
        _active.extend([] if table is None else [table])
    return active()


def active() -> TuningTable | None:
    """The table of this process, if one is enabled."""
    return _active[0] if _active else None
