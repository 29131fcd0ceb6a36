"""What has been measured: one JSON file a cell, so that an interrupted matrix goes on."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BURST = float("inf")
"""The rate of a burst: everything is sent at once."""
DISTURBED_SHARE = 0.1
"""Of one core: what others may use before a cell counts as disturbed."""


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """One run: what was asked of whom."""

    trace: str
    rate: float
    num_requests: int
    seed: int
    contestant: str

    @property
    def rate_name(self) -> str:
        """`burst`, or the requests per second."""
        return "burst" if self.rate == BURST else f"{self.rate:g}"

    @property
    def content(self) -> str:
        """What the text of its prompts depends on: never on who answers."""
        return f"{self.rate_name}/{self.seed}"

    @property
    def file_name(self) -> str:
        """`chat-3-200-1-ours.json`."""
        parts = (self.trace, self.rate_name, self.num_requests, self.seed, self.contestant)
        return "-".join(str(part) for part in parts) + ".json"


@dataclass(frozen=True, slots=True)
class Cell:
    """What came out of one run, request by request."""

    key: CellKey
    num_failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: list[float]
    """Of the requests that were answered."""
    tpot_s: list[float]
    other_cores: float
    """Cores' worth of CPU that neither the engine nor the load generator used, with what other
    guests took from this machine: the share of the measurement that is not its own."""
    engine_cores: float
    client_cores: float
    facts: dict[str, Any]
    """Precision, versions, commit, machine, date."""

    @property
    def is_disturbed(self) -> bool:
        """Whether others computed beside it."""
        return self.other_cores > DISTURBED_SHARE

    @property
    def requests_per_s(self) -> float:
        """Answered requests over the time until the last one ended."""
        return len(self.ttft_s) / self.duration_s


@dataclass(frozen=True, slots=True)
class CellStore:
    """The cells under one directory."""

    directory: Path

    def find(self, key: CellKey) -> Cell | None:
        """The cell of `key`, when it has been measured."""
        path = self.directory / key.file_name
        return _read(path) if path.exists() else None

    def save(self, cell: Cell) -> None:
        """Write it whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / cell.key.file_name
        partial = path.with_suffix(".partial")
        record = asdict(cell)
        record["key"]["rate"] = cell.key.rate_name
        partial.write_text(json.dumps(record) + "\n")
        partial.rename(path)

    def all(self) -> Iterator[Cell]:
        """Every cell there is."""
        for path in sorted(self.directory.glob("*.json")):
            yield _read(path)


def parse_rate(text: str) -> float:
    """`burst` or requests per second. Raises ValueError."""
    rate = BURST if text == "burst" else float(text)
    if not rate > 0:
        raise ValueError(f"{text} is no rate")
    return rate


def _read(path: Path) -> Cell:
    record = json.loads(path.read_text())
    key = record.pop("key")
    return Cell(key=CellKey(**key | {"rate": parse_rate(key["rate"])}), **record)
