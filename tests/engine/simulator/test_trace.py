"""Traces, machines and pictures: what is read, what is refused, what is drawn."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from engine.errors import MachineUnknown, TraceRejected
from engine.simulator.curve import Line, draw_curve
from engine.simulator.machines import PRESETS, read_machine
from engine.simulator.prompts import prompt_token_ids
from engine.simulator.trace import at_rate, mean_rate, read_trace, write_trace
from engine.simulator.workloads import WORKLOADS
from tests.engine.simulator.machine import A_MS_A_TOKEN, request


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_trace_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    requests = WORKLOADS[kind](3.0, 30, 5)
    write_trace(tmp_path / "trace", requests)
    assert read_trace(tmp_path / "trace") == requests


def test_lines_may_come_in_any_order_and_say_little(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        '{"arrival": 2, "prompt": 9, "output": 1}\n\n'
        '{"arrival": 1, "prompt": 5, "output": 2, "prefix": "all of it"}\n'
    )
    first, second = read_trace(path)
    assert (first.arrival_s, first.prefix_tokens, second.prefix_tokens) == (1, 5, 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"arrival": 1, "prompt": 5}', "output"),
        ('{"arrival": -1, "prompt": 5, "output": 1}', "arrival"),
        ('{"arrival": 1, "prompt": 0, "output": 1}', "prompt"),
        ('{"arrival": 1, "prompt": 5, "output": 1, "tenants": "x"}', "tenants"),
        ('{"arrival": 1, "prompt": 5, "output": 1, "prefix_tokens": 3}', "without a `prefix`"),
        (
            '{"arrival": 1, "prompt": 5, "output": 1, "prefix": "p", "prefix_tokens": 6}',
            "more than",
        ),
        ("\xff", ":2:"),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b'{"arrival": 1, "prompt": 5, "output": 1}\n' + line.encode("latin-1"))
    with pytest.raises(TraceRejected, match=complaint) as refusal:
        read_trace(path)
    assert f"{path}:2" in refusal.value.message


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing", "."):
        with pytest.raises(TraceRejected):
            read_trace(tmp_path / name)


def test_a_trace_can_be_played_faster() -> None:
    requests = at_rate([request(10.0 + 2 * index, 5, 1) for index in range(5)], 4.0)
    assert mean_rate(requests) == pytest.approx(4.0)
    assert requests[0].arrival_s == 0
    with pytest.raises(TraceRejected, match="no rate"):
        at_rate([request(1.0, 5, 1)] * 2, 4.0)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    one = prompt_token_ids(request(0, 300, 1, prefix="p", prefix_tokens=200), 0)
    other = prompt_token_ids(request(0, 300, 1, prefix="p", prefix_tokens=200), 1)
    assert len(one) == len(other) == 300
    assert one[:200] == other[:200]
    assert not set(one[200:]) & set(other[200:])
    assert all(0 <= token < 2**31 for token in one)


def test_a_heartbeat_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    beat = {"cost_model": A_MS_A_TOKEN, "total_kv_tokens": 4096, "context_length": 2048, "pid": 1}
    path.write_bytes(msgspec.json.encode(beat))
    machine = read_machine(str(path))
    assert (machine.cost_model, machine.kv_tokens) == (A_MS_A_TOKEN, 4096)


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "{}",
        '{"cost_model": {"base_s": 1}, "total_kv_tokens": 4096, "context_length": 99}',
        '{"cost_model": {"base_s": 1, "per_token_s": -1, "per_prefill_context_s": 0,'
        ' "per_decode_context_s": 0}, "total_kv_tokens": 4096, "context_length": 99}',
    ],
)
def test_a_file_that_describes_no_machine_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(MachineUnknown):
        read_machine(str(path))
    with pytest.raises(MachineUnknown, match="h100"):
        read_machine("tpu")


def test_presets_are_ordered_as_the_machines_are() -> None:
    h100, h200, a100 = (PRESETS[name].cost_model for name in ("h100", "h200", "a100"))
    assert h200.weights_s < h100.weights_s < a100.weights_s
    assert h100.per_token_s < a100.per_token_s
    assert 150 < h100.ridge_tokens < 300, "bf16 on an H100"


def test_a_curve_is_a_picture_with_a_line_for_each_policy() -> None:
    lines = [Line("ours", [(1.0, 0.05), (2.0, 0.2)]), Line("a < b", [(1.0, 0.1), (2.0, 30.0)])]
    picture = ElementTree.fromstring(draw_curve("TTFT", "on & on", lines))
    names = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours", "a < b", "on & on", "10 ms", "100 s"} <= set(names)
    places = [
        [tuple(map(float, place.split(","))) for place in line.get("points", "").split()]
        for line in picture.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert len(places) == 2
    assert places[1][1][1] < places[0][1][1], "more seconds are higher up"
    assert places[0][0][0] < places[0][1][0], "a greater rate is farther right"
