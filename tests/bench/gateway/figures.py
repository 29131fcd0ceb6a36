"""What was promised, what was measured, and by how much the one differs from the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
OURS, LITELLM, PORTKEY, DIRECT = "nCompass", "LiteLLM", "Portkey", "no gateway"
STREAMS = 5_000


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure's bound."""

    figure: str
    bound: float
    is_least: bool = False
    """The figure is to be at least, not at most, the bound."""

    def is_kept(self, value: float) -> bool:
        """Whether `value` keeps it."""
        return value >= self.bound if self.is_least else value <= self.bound


PROMISES = (
    Promise("added_ttft_ms_p50", 4.0),
    Promise("added_ttft_ms_p99", 12.0),
    Promise("rps_per_core", 400.0, is_least=True),
    Promise("open_streams", STREAMS, is_least=True),
    Promise("cpu_cores_at_open_streams", 1.0),
    Promise("rss_mb_at_5000_streams", 500.0),
    Promise("frame_delay_ms_p99", 100.0),
    Promise("ramp_ttft_ms_p99", 250.0),
    Promise("frames_missed", 0.0),
    Promise("stall_ms_max", 50.0),
)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Every figure that `rows` have the measurements of."""
    found: dict[str, float] = {}
    direct = _row(rows, DIRECT, "open")
    for name, prefix in ((OURS, ""), (LITELLM, "litellm_"), (PORTKEY, "portkey_")):
        # A peer that answered nothing has no figures: a ratio to it would flatter us.
        rows = [row for row in rows if row["gateway"] != name or name == OURS or not is_silent(row)]
        served = _row(rows, name, "open")
        if served is not None and direct is not None:
            for part in ("p50", "p99"):
                added = served[f"ttft_ms_{part}"] - direct[f"ttft_ms_{part}"]
                found[f"{prefix}added_ttft_ms_{part}"] = added
        if (closed := _row(rows, name, "closed")) is not None:
            found[f"{prefix}rps_per_core"] = closed["requests_per_s"]
    for name in ("litellm", "portkey"):
        if f"{name}_rps_per_core" in found and "rps_per_core" in found:
            found[f"{name}_rps_ratio"] = found["rps_per_core"] / found[f"{name}_rps_per_core"]
    if (streams := _row(rows, OURS, "streams")) is not None:
        found |= {
            "open_streams": streams["num_streams"] - streams["num_failed"],
            "frames_missed": streams["frames_missed"],
            "frame_delay_ms_p99": streams["delay_ms_p99"],
            "ramp_ttft_ms_p99": streams["ttft_ms_p99"],
            "cpu_cores_at_open_streams": streams["cpu_cores"],
        }
        if streams["num_streams"] == STREAMS:
            found["rss_mb_at_5000_streams"] = streams["rss_mb"]
    if (stall := _row(rows, OURS, "stall")) is not None:
        found["stall_ms_max"] = stall["delay_ms_max"]
    return found


def promises(found: dict[str, float]) -> list[Row]:
    """The table of what was promised; losses too."""
    table = []
    for promise in PROMISES:
        if promise.figure not in found:
            continue
        value = found[promise.figure]
        table.append(
            {
                "figure": promise.figure,
                "measured": value,
                "promised": f"{'at least' if promise.is_least else 'at most'} {promise.bound:g}",
                "kept": "yes" if promise.is_kept(value) else "NO",
            }
        )
    return table


def is_silent(row: Row) -> bool:
    """Whether not one request of a cell was answered."""
    answered = {
        "open": lambda: row["num_answered"],
        "closed": lambda: row["requests_per_s"],
        "streams": lambda: row["num_streams"] - row["num_failed"],
        "stall": lambda: row["status"] == 200,
    }
    return not answered[row["cell"]]()


def beside_peers(found: dict[str, float], rows: Sequence[Row]) -> list[Row]:
    """Ours beside the peers: ratios above one are ours to win."""
    table = []
    for figure, cell, ratio in (
        ("added_ttft_ms_p50", "open", _smaller),
        ("added_ttft_ms_p99", "open", _smaller),
        ("rps_per_core", "closed", _larger),
    ):
        line: Row = {"figure": figure, "nCompass": found.get(figure, "")}
        for peer in (LITELLM, PORTKEY):
            theirs = found.get(f"{peer.lower()}_{figure}")
            was_asked = _row(rows, peer, cell) is not None
            line[peer.lower()] = (
                ("answered nothing" if was_asked else "") if theirs is None else theirs
            )
            is_known = theirs is not None and figure in found
            line[f"{peer.lower()} ratio"] = ratio(found[figure], theirs or 0.0) if is_known else ""
        table.append(line)
    return table


def _smaller(ours: float, theirs: float) -> float:
    return theirs / ours if ours > 0 else float("inf")


def _larger(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("inf")


def _row(rows: Sequence[Row], gateway: str, cell: str) -> Row | None:
    matching = (row for row in rows if row["gateway"] == gateway and row["cell"] == cell)
    return next(matching, None)
