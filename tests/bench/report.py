"""How a benchmark speaks: a table for people, one JSON file for scripts (DESIGN §8)."""

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ["torch", "transformers", "fastapi", "uvicorn", "redis", "sqlalchemy"]


def percentile(values: list[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def print_table(title: str, rows: list[dict[str, Any]], note: str = "") -> None:
    """Print `rows` (same keys each) as a table."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console(width=120).print(table)


def provenance(versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Where a figure comes from: machine, versions (ours and `versions`), commit, date."""
    return {
        "machine": _machine(),
        "versions": {name: metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()}
        | dict(versions or {}),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_report(
    path: Path,
    figures: Mapping[str, float],
    rows: list[dict[str, Any]],
    *,
    versions: Mapping[str, str] | None = None,
    notes: list[str] | None = None,
) -> None:
    """Write the machine, versions, commit, date, figures, rows and notes to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = provenance(versions) | {
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "rows": rows,
        "notes": notes or [],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _shown(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.platform()


def _commit() -> str:
    ran = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return ran.stdout.strip() or "unknown"
