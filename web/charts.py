"""The usage chart: bars by day, stacked by model, as geometry that a template draws in SVG.

Horizontal positions are percent of the width and vertical ones are pixels, so that the drawing fits
any screen while its letters keep their size (an SVG with a viewBox would shrink them on a phone).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from billing.money import NanoUsd
from billing.usage import DailyUsage
from web.formatting import compact_count, trimmed_dollars

PLOT_TOP = 18
PLOT_HEIGHT = 180
CHART_HEIGHT = PLOT_TOP + PLOT_HEIGHT + 26
MAX_SERIES = 5
"""Models with a colour of their own; the rest is drawn together as `other models`."""
OTHER_MODELS = "other models"
ROUND_STEPS = (1, 2, 3, 4, 5, 6, 8, 10)
BAR_SHARE = 0.7
"""Part of a day's width that its bar takes."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that the chart can count."""

    name: str
    title: str
    value: Callable[[DailyUsage], int]
    label: Callable[[int], str]


def _cost_label(value: int) -> str:
    return trimmed_dollars(NanoUsd(value))


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("cost", "Cost", lambda usage: usage.charge_nano_usd, _cost_label),
        Measure("requests", "Requests", lambda usage: usage.requests, compact_count),
        Measure(
            "tokens",
            "Tokens",
            lambda usage: usage.input_tokens + usage.output_tokens,
            compact_count,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Segment:
    """One model's part of one day's bar."""

    series: int
    """0 to MAX_SERIES: which colour."""
    y: float
    height: float
    label: str
    """What a pointer that rests on it is told."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One day. `x` and `width` in percent."""

    day: date
    x: float
    width: float
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class GridLine:
    """One horizontal line and its value."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class DayLabel:
    """A date under the plot; `x` in percent."""

    x: float
    text: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the legend."""

    series: int
    model: str
    total: int
    label: str


@dataclass(frozen=True, slots=True)
class UsageChart:
    """Everything that the template draws, and the rows of the table beside it."""

    measure: Measure
    first_day: date
    last_day: date
    bars: list[Bar]
    grid: list[GridLine]
    day_labels: list[DayLabel]
    legend: list[Series]
    rows: list[DailyUsage]
    """The numbers that were drawn, newest day first."""

    @property
    def total(self) -> int:
        """Sum of everything drawn."""
        return sum(series.total for series in self.legend)


def usage_chart(
    usage: Sequence[DailyUsage], *, measure: Measure, last_day: date, num_days: int
) -> UsageChart:
    """Lay out `num_days` days that end with `last_day`; days without usage stay empty."""
    first_day = last_day - timedelta(days=num_days - 1)
    rows = [row for row in usage if first_day <= row.day <= last_day]
    legend, ranks = _legend(rows, measure)
    top = nice_ceiling(max(_day_totals(rows, measure).values(), default=0))
    bars = []
    for index in range(num_days):
        day = first_day + timedelta(days=index)
        segments = _segments([row for row in rows if row.day == day], measure, ranks, top)
        slot = 100 / num_days
        x = slot * index + slot * (1 - BAR_SHARE) / 2
        bars.append(Bar(day, round(x, 3), round(slot * BAR_SHARE, 3), segments))
    return UsageChart(
        measure=measure,
        first_day=first_day,
        last_day=last_day,
        bars=bars,
        grid=_grid(top, measure),
        day_labels=_day_labels(first_day, num_days),
        legend=legend,
        rows=sorted(rows, key=lambda row: (row.day, row.model), reverse=True),
    )


def nice_ceiling(value: int) -> int:
    """The top of the axis: at least `value`, and a quarter of it is a round number, so that all
    four grid lines are labelled exactly."""
    quarter = -(-max(value, 4) // 4)
    power: int = 10 ** (len(str(quarter)) - 1)
    return 4 * next(step * power for step in ROUND_STEPS if step * power >= quarter)


def _day_totals(rows: Sequence[DailyUsage], measure: Measure) -> dict[date, int]:
    totals: defaultdict[date, int] = defaultdict(int)
    for row in rows:
        totals[row.day] += measure.value(row)
    return totals


def _legend(rows: Sequence[DailyUsage], measure: Measure) -> tuple[list[Series], dict[str, int]]:
    """Models by what they cost, whatever is drawn: a model keeps its colour from chart to chart."""
    totals: defaultdict[str, int] = defaultdict(int)
    charges: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        totals[row.model] += measure.value(row)
        charges[row.model] += row.charge_nano_usd
    ranked = sorted(totals, key=lambda model: (-charges[model], model))
    ranks = {model: min(rank, MAX_SERIES) for rank, model in enumerate(ranked)}
    legend = [
        Series(rank, model, totals[model], measure.label(totals[model]))
        for rank, model in enumerate(ranked[:MAX_SERIES])
    ]
    if rest := ranked[MAX_SERIES:]:
        total = sum(totals[model] for model in rest)
        legend.append(Series(MAX_SERIES, OTHER_MODELS, total, measure.label(total)))
    return legend, ranks


def _segments(
    rows: Sequence[DailyUsage], measure: Measure, ranks: Mapping[str, int], top: int
) -> list[Segment]:
    """One day's models from the baseline up, the dearest of the whole chart lowest."""
    baseline = float(PLOT_TOP + PLOT_HEIGHT)
    segments = []
    for row in sorted(rows, key=lambda row: (ranks[row.model], row.model)):
        value = measure.value(row)
        height = PLOT_HEIGHT * value / top
        baseline -= height
        label = f"{row.day:%b} {row.day.day}, {row.model}: {measure.label(value)}"
        segments.append(Segment(ranks[row.model], round(baseline, 2), round(height, 2), label))
    return segments


def _grid(top: int, measure: Measure) -> list[GridLine]:
    return [
        GridLine(PLOT_TOP + PLOT_HEIGHT * (4 - quarter) / 4, measure.label(top * quarter // 4))
        for quarter in range(5)
    ]


def _day_labels(first_day: date, num_days: int) -> list[DayLabel]:
    """Today at the right edge, and back from there in steps that leave at most six labels."""
    step = -(-num_days // 5)
    slot = 100 / num_days
    labels = []
    for index in range(num_days - 1, -1, -step):
        day = first_day + timedelta(days=index)
        is_last = index == num_days - 1
        x = 100.0 if is_last else slot * (index + 0.5)
        labels.append(DayLabel(round(x, 3), f"{day:%b} {day.day}", "end" if is_last else "middle"))
    return labels[::-1]
