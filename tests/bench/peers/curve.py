"""The picture: TTFT against rate on a logarithmic scale, drawn as SVG."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 56, 56
PROMISE_MS = 1000
NUM_COLOURS = 5
STYLE = """<style>
text { fill: #333 } .faint { fill: #666 } .paper { fill: #fff } .grid { stroke: #e4e4e4 }
.promise { stroke: #888; stroke-dasharray: 2 3 }
.c0 { --c: #0b7a75 } .c1 { --c: #c8553d } .c2 { --c: #6b7a99 } .c3 { --c: #5e548e } .c4 { --c: #b5770d }
polyline { stroke: var(--c) } circle, text.name { fill: var(--c) }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .faint { fill: #aaa } .paper { fill: #14181d } .grid { stroke: #2c333b }
.c0 { --c: #3fc1b9 } .c1 { --c: #f08a70 } .c2 { --c: #a8b6d4 } .c3 { --c: #b3a6e6 } .c4 { --c: #e9b44c }
}
</style>"""
"""Readable on a light page and on a dark one: the picture has paper of its own."""
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
        parts.append(f'<g class="c{index % NUM_COLOURS}">')
        for column, style in ((1, ""), (2, ' stroke-dasharray="6 5"')):
            path = " ".join(f"{scale.x(p[0]):.1f},{scale.y(p[column]):.1f}" for p in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke-width="2.2"{style}/>')
            parts += [
                f'<circle cx="{scale.x(p[0]):.1f}" cy="{scale.y(p[column]):.1f}" r="3">'
                f"<title>{escape(name)}, {p[0]:g}/s: {p[column]:,.0f} ms</title></circle>"
                for p in line
            ]
        x, y = WIDTH - RIGHT + 14, TOP + 12 + 42 * index
        parts.append(f'<text class="name" x="{x}" y="{y}" font-weight="600">{escape(name)}</text>')
        parts.append(f'<text class="faint" x="{x}" y="{y + 16}">— p50   - - p99</text></g>')
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
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text class="faint" x="{LEFT}" y="38" font-size="11">milliseconds on a logarithmic '
        "scale</text>",
        f'<text class="faint" x="{LEFT}" y="{HEIGHT - 8}" font-size="11">{escape(note)}</text>',
        f'<text x="{end}" y="{HEIGHT - BOTTOM + 32}" text-anchor="end">'
        "requests per second offered</text>",
    ]
    for ms in TICKS_MS:
        if scale.low_ms <= ms <= scale.high_ms:
            y = scale.y(ms)
            kind = "promise" if ms == PROMISE_MS else "grid"
            parts.append(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{end}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ms:,}</text>')
    step = 1 if scale.rate_max > 4 else 0.5
    for index in range(int(scale.rate_max / step) + 1):
        x = scale.x(index * step)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{index * step:g}</text>"
        )
    return "\n".join(parts)
