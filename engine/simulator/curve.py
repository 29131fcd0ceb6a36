"""TTFT against the rate of arrivals as an SVG: one line a policy, both axes in round numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 48, 52
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8a5a83", "#b08900", "#5f6b6d", "#7f4f24", "#2a9d8f")
RATE_TICKS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """One policy: (requests per second, seconds to first token) from left to right."""

    name: str
    points: list[tuple[float, float]]


def draw_curve(title: str, subtitle: str, lines: Sequence[Line]) -> str:
    """The picture. The vertical axis is logarithmic: near saturation times grow without bound."""
    assert any(line.points for line in lines)
    scale = _Scale.of(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="37" fill="#777">{escape(subtitle)}</text>',
        *_axes(scale),
    ]
    for index, line in enumerate(lines):
        parts += _drawn(line, COLOURS[index % len(COLOURS)], index, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From rates and seconds to places in the picture."""

    rate_max: float
    decade_low: int
    decade_high: int

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "_Scale":
        rates = [rate for line in lines for rate, _ in line.points]
        seconds = [max(value, 1e-6) for line in lines for _, value in line.points]
        low, high = floor(log10(min(seconds))), ceil(log10(max(seconds)))
        return cls(max(rates), low, max(high, low + 1))

    def x(self, rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rate / self.rate_max

    def y(self, seconds: float) -> float:
        share = (log10(max(seconds, 1e-6)) - self.decade_low) / (self.decade_high - self.decade_low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for decade in range(scale.decade_low, scale.decade_high + 1):
        y = scale.y(10.0**decade)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_seconds(10.0**decade)}</text>'
        )
    for number in range(RATE_TICKS + 1):
        rate = scale.rate_max * number / RATE_TICKS
        parts.append(
            f'<text x="{scale.x(rate):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{rate:.3g}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">requests per second</text>'
    )
    return parts


def _drawn(line: Line, colour: str, index: int, scale: _Scale) -> list[str]:
    places = [(scale.x(rate), scale.y(seconds)) for rate, seconds in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    y = TOP + 8 + 18 * index
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<g fill="{colour}">{dots}<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10"'
        f' height="10"/><text x="{WIDTH - RIGHT + 30}" y="{y}">{escape(line.name)}</text></g>',
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"
