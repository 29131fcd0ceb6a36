"""The picture: TTFT against rate on a logarithmic scale, drawn as SVG."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 46, 56
COLOURS = ("#0b7a75", "#c8553d", "#8d99ae", "#5e548e", "#e09f3e")
TICKS_MS = [base * 10**power for power in range(5) for base in (1, 2, 5)]

Line = list[tuple[float, float, float]]
"""(rate, TTFT p50, TTFT p99) with times in milliseconds, in the order of the rates."""


def draw(title: str, note: str, lines: Mapping[str, Line]) -> str:
    """One colour an engine: its median as a solid line, its 99th percentile dashed."""
    points = [point for line in lines.values() for point in line]
    assert points, "nothing to draw"
    scale = _Scale(
        rate_max=max(rate for rate, _, _ in points) * 1.05,
        low_ms=min(p50 for _, p50, _ in points) / 1.3,
        high_ms=max(p99 for _, _, p99 in points) * 1.3,
    )
    parts = [_frame(title, note, scale)]
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        for column, style in ((1, ""), (2, ' stroke-dasharray="6 5"')):
            path = " ".join(f"{scale.x(p[0]):.1f},{scale.y(p[column]):.1f}" for p in line)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"{style}/>'
            )
            parts += [
                f'<circle cx="{scale.x(p[0]):.1f}" cy="{scale.y(p[column]):.1f}" r="3" '
                f'fill="{colour}"><title>{escape(name)}: {p[column]:,.0f} ms</title></circle>'
                for p in line
            ]
        y = TOP + 12 + 42 * index
        x = WIDTH - RIGHT + 14
        parts.append(
            f'<text x="{x}" y="{y}" fill="{colour}" font-weight="600">{escape(name)}</text>'
        )
        parts.append(f'<text x="{x}" y="{y + 16}" fill="#555">— p50   - - p99</text>')
    return "\n".join([*parts, "</svg>", ""])


def save(path: Path, svg: str) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg)


class _Scale:
    """From rate and time to the place in the picture."""

    def __init__(self, *, rate_max: float, low_ms: float, high_ms: float) -> None:
        self.rate_max = rate_max
        self.low_ms, self.high_ms = low_ms, high_ms

    def x(self, rate: float) -> float:
        return LEFT + rate / self.rate_max * (WIDTH - LEFT - RIGHT)

    def y(self, ms: float) -> float:
        share = math.log(ms / self.low_ms) / math.log(self.high_ms / self.low_ms)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, note: str, scale: _Scale) -> str:
    end = WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#222">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}" font-size="11" fill="#666">{escape(note)}</text>',
        f'<text x="{end}" y="{HEIGHT - BOTTOM + 32}" text-anchor="end" fill="#444">'
        "requests per second offered</text>",
    ]
    for ms in TICKS_MS:
        if scale.low_ms <= ms <= scale.high_ms:
            y = scale.y(ms)
            shown = f"{ms / 1000:g} s" if ms >= 1000 else f"{ms} ms"
            parts.append(f'<path d="M{LEFT} {y:.1f}H{end}" stroke="#e6e6e6"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{shown}</text>'
            )
    step = 1 if scale.rate_max > 4 else 0.5
    for index in range(int(scale.rate_max / step) + 1):
        x = scale.x(index * step)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#444">'
            f"{index * step:g}</text>"
        )
    return "\n".join(parts)
