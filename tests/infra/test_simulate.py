"""`ncompass simulate`: answers, and clear refusals of what makes no sense."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import SimulationRefused
from infra.cli.main import app

RUNNER = CliRunner()


def run(*arguments: str) -> str:
    answer = RUNNER.invoke(app, ["simulate", *arguments])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer.output


def test_policies_stand_beside_each_other_and_the_figures_are_called_simulated() -> None:
    output = run("chat", "--rate", "20", "--requests", "10", "--policies", "ncompass,vllm")
    assert "simulated" in output
    for word in ("ncompass", "vllm", "h100", "TTFT", "x bound", "preemptive SRPT"):
        assert word in output


@pytest.mark.slow
def test_a_trace_comes_back_from_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "load.jsonl"
    made = run("chat", "--rate", "20", "--requests", "5", "--save-trace", str(trace))
    read = run(str(trace))
    assert made.split("\n")[1:] == read.split("\n")[1:], "the same requests, the same figures"


def test_it_says_how_many_machines_a_load_needs() -> None:
    output = run("chat", "--rate", "60", "--requests", "30", "--how-many", "0.5",
                 "--policies", "ncompass")  # fmt: skip
    assert "needed" in output
    assert "TTFT p99 <= 0.5 s" in output


@pytest.mark.slow
def test_it_draws_the_curve(tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    run("chat", "--rate", "20", "--requests", "5", "--policies", "ncompass,vllm", "--curve",
        str(picture))  # fmt: skip
    text = picture.read_text()
    assert text.startswith("<svg")
    assert "simulated" in text
    assert text.count("<polyline") == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["chat"], "needs a --rate"),
        (["nothing.jsonl"], "neither a file nor a kind of load"),
        (["chat", "--rate", "5", "--policies", "fifo"], "unknown policy fifo"),
        (["chat", "--rate", "5", "--policies", ","], "no policy"),
        (["chat", "--rate", "5", "--machine", "tpu"], "neither a machine"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments: list[str], complaint: str) -> None:
    with pytest.raises(SimulationRefused, match=complaint) as refusal:
        run(*arguments)
    assert "\n" not in refusal.value.message


def test_values_out_of_range_are_usage_errors() -> None:
    assert "--gpus" in run("chat", "--rate", "5", "--gpus", "0")
    assert "--rate" in run("chat", "--rate", "-1")
