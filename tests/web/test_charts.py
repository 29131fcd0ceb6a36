"""The chart draws the numbers that it was given, and all of them."""

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.usage import DailyUsage
from web.charts import (
    MAX_SERIES,
    MEASURES,
    PLOT_HEIGHT,
    PLOT_TOP,
    Measure,
    nice_ceiling,
    usage_chart,
)

TODAY = date(2026, 3, 9)

usages = st.lists(
    st.builds(
        DailyUsage,
        day=st.integers(0, 40).map(lambda days: TODAY - timedelta(days=days)),
        model=st.sampled_from([f"owner/model-{number}" for number in range(8)]),
        requests=st.integers(0, 10**6),
        input_tokens=st.integers(0, 10**9),
        cached_tokens=st.just(0),
        output_tokens=st.integers(0, 10**9),
        charge_nano_usd=st.integers(0, 10**13),
    ),
    max_size=60,
    unique_by=lambda row: (row.day, row.model),
)


@given(usages, st.sampled_from(list(MEASURES.values())))
def test_every_bar_is_as_high_as_its_numbers_and_stays_in_the_plot(
    rows: list[DailyUsage], measure: Measure
) -> None:
    chart = usage_chart(rows, measure=measure, last_day=TODAY, num_days=30)
    shown = [row for row in rows if (TODAY - row.day).days < 30]
    assert len(chart.bars) == 30
    assert chart.bars[-1].day == TODAY
    assert chart.total == sum(chart.measure.value(row) for row in shown)
    assert sum(len(bar.segments) for bar in chart.bars) == len(shown) == len(chart.rows)
    assert len(chart.legend) <= MAX_SERIES + 1
    top = nice_ceiling(
        max(sum(chart.measure.value(r) for r in shown if r.day == b.day) for b in chart.bars)
    )
    for bar in chart.bars:
        assert bar.x >= 0
        assert bar.x + bar.width <= 100
        total = sum(chart.measure.value(row) for row in shown if row.day == bar.day)
        height = sum(segment.height for segment in bar.segments)
        assert height == pytest.approx(PLOT_HEIGHT * total / top, abs=0.05)
        edge = PLOT_TOP + PLOT_HEIGHT
        for segment in bar.segments:
            assert segment.y + segment.height == pytest.approx(edge, abs=0.05)
            assert segment.y >= PLOT_TOP - 0.05
            edge = segment.y


@given(st.integers(0, 2**63 - 1))
def test_the_axis_ends_at_a_round_number_not_far_above(value: int) -> None:
    top = nice_ceiling(value)
    assert top >= max(value, 4)
    assert top % 4 == 0
    assert len(str(top // 4).rstrip("0")) == 1
    assert value <= 4 or top <= 2 * value


def test_models_beyond_the_colours_are_drawn_together() -> None:
    rows = [DailyUsage(TODAY, f"owner/m{n}", n + 1, 0, 0, 0, 10 * (n + 1)) for n in range(7)]
    chart = usage_chart(rows, measure=MEASURES["requests"], last_day=TODAY, num_days=7)
    assert [series.model for series in chart.legend] == [
        *(f"owner/m{n}" for n in (6, 5, 4, 3, 2)),
        "other models",
    ]
    assert chart.legend[-1].total == 1 + 2
    labels = [segment.label for segment in chart.bars[-1].segments]
    assert labels[0] == "Mar 9, owner/m6: 7"
    assert len(labels) == 7


def test_a_model_keeps_its_colour_whatever_is_counted() -> None:
    rows = [
        DailyUsage(TODAY, "owner/dear", 1, 10, 0, 10, 900),
        DailyUsage(TODAY, "owner/cheap", 50, 9_000, 0, 9_000, 100),
    ]
    for measure in MEASURES.values():
        chart = usage_chart(rows, measure=measure, last_day=TODAY, num_days=7)
        assert [series.model for series in chart.legend] == ["owner/dear", "owner/cheap"]


def test_days_are_labelled_from_today_backwards() -> None:
    chart = usage_chart([], measure=MEASURES["cost"], last_day=TODAY, num_days=30)
    assert [label.text for label in chart.day_labels][-2:] == ["Mar 3", "Mar 9"]
    assert len(chart.day_labels) <= 6
    assert [line.label for line in chart.grid] == [
        "$0.00",
        "$0.000000001",
        "$0.000000002",
        "$0.000000003",
        "$0.000000004",
    ]
