"""The comparison with other engines: what is asked, what is stored, and what is said of it."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer

from engine.settings import EngineSettings
from tests.bench.peers import benchmark
from tests.bench.peers import matrix as matrix_module
from tests.bench.peers.benchmark import Plan, options, parser
from tests.bench.peers.cells import BURST, Cell, CellKey, CellStore
from tests.bench.peers.client import Client
from tests.bench.peers.curve import draw
from tests.bench.peers.figures import (
    Attribution,
    Comparison,
    Results,
    attribution,
    figures_of,
    losses,
    rows_of,
)
from tests.bench.peers.matrix import Matrix, TimeIsUp, alternating
from tests.bench.peers.search import bracket, next_rate
from tests.bench.peers.servers import OUR_SETTINGS, Contestant, Server
from tests.bench.peers.targets import PEER_TARGETS, peer_targets
from tests.bench.peers.traces import TRACES, make_requests, vocabulary
from tests.bench.verdict import Target, verdict

AGAINST = Comparison("", "bf16", "ours", "vllm_tuned")


def cell(
    contestant: str, ttft_s: float, *, trace: str = "chat", rate: float = 3, seed: int = 1,
    num_failed: int = 0, other_cores: float = 0.0, num_requests: int = 10,
) -> Cell:  # fmt: skip
    return Cell(
        key=CellKey(trace, rate, num_requests, seed, contestant),
        num_failed=num_failed,
        duration_s=10 * ttft_s,
        input_tokens=2560,
        output_tokens=640,
        ttft_s=[ttft_s] * num_requests,
        tpot_s=[ttft_s / 10] * num_requests,
        other_cores=other_cores,
        engine_cores=1.5,
        client_cores=0.2,
        facts={"machine": "a machine", "commit": "abc", "date": "2026-11-30T12:00:00"},
    )


@pytest.mark.parametrize("trace", TRACES)
def test_a_prompt_has_as_many_tokens_as_words(trace: str, default_model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_directory / "tokenizer.json"))
    for request in make_requests(trace, "3/1", 40, vocabulary(default_model_directory)):
        assert len(tokenizer.encode(request.prompt).ids) == len(request.words)
        assert len(request.words) + request.output_tokens <= 2048


def test_no_two_cells_share_a_prompt_and_every_engine_gets_the_same() -> None:
    words = [f"w{index}" for index in range(1000)]
    keys = [CellKey("chat", rate, 20, seed, "ours") for rate in (1, 2, BURST) for seed in (1, 2)]
    prompts = [
        request.prompt for key in keys for request in make_requests("chat", key.content, 20, words)
    ]
    assert len(set(prompts)) == 6 * 20
    contents = {CellKey("chat", 1, 20, 1, name).content for name in ("ours", "vllm_tuned")}
    assert len(contents) == 1


def test_the_traces_are_what_their_titles_say() -> None:
    words = [f"w{index}" for index in range(1000)]
    mixed = make_requests("mixed", "1/1", 200, words)
    assert sum(len(request.words) == 1536 for request in mixed) == 10
    assert all(32 <= len(r.words) <= 512 for r in mixed if len(r.words) != 1536)
    shared = make_requests("prefix", "1/1", 20, words)
    assert len({tuple(request.words[:512]) for request in shared}) == 1
    assert len({tuple(request.words) for request in shared}) == 20


def test_a_ratio_above_one_says_that_we_are_better() -> None:
    results = Results.of(
        [
            cell("ours", 0.1),
            cell("vllm_tuned", 0.4),
            cell("ours", 0.2, rate=BURST),
            cell("vllm_tuned", 0.3, rate=BURST),
            cell("ours", 0.5, trace="mixed", rate=2.5),
            cell("vllm_tuned", 0.25, trace="mixed", rate=2.5),
        ]
    )
    figures, missing = figures_of(results, [AGAINST], 2.5)
    assert figures["ttft_p50_ratio_bf16_at_3rps"] == pytest.approx(4)
    assert figures["tpot_p50_ratio_bf16_at_3rps"] == pytest.approx(4)
    assert figures["burst_throughput_ratio_bf16"] == pytest.approx(1.5)
    assert figures["ttft_p99_ratio_bf16_mixed_90"] == pytest.approx(0.5)
    assert "ttft_p50_ratio_bf16_at_1rps" in missing
    assert "max_rate_ttft_1s_ratio_bf16" in missing
    lost = losses(results, [AGAINST])
    assert any(line.startswith("mixed 2.5/s: vllm_tuned is 2.00x better") for line in lost)
    assert all(line.startswith("mixed") for line in lost)
    assert [row["engine"] for row in rows_of(results, ["ours", "vllm_tuned"])[:2]] == [
        "ours",
        "vllm_tuned",
    ]


def test_a_highest_rate_is_compared_by_what_is_certain() -> None:
    """The peer's lies below the lowest rate that it failed at, wherever that is."""
    known = [cell("ours", 0.9, rate=1.5), cell("ours", 1.1, rate=2), cell("vllm_tuned", 3, rate=1)]
    figures, _ = figures_of(Results.of(known), [AGAINST], None)
    assert figures["max_rate_ttft_1s_ratio_bf16"] == pytest.approx(1.5)
    _, missing = figures_of(
        Results.of([*known[:2], cell("vllm_tuned", 0.5, rate=1)]), [AGAINST], None
    )
    assert "max_rate_ttft_1s_ratio_bf16" in missing


def test_only_seeds_that_both_have_are_compared() -> None:
    results = Results.of([cell("ours", 0.1), cell("ours", 9, seed=2), cell("vllm_tuned", 0.2)])
    assert figures_of(results, [AGAINST], None)[0]["ttft_p50_ratio_bf16_at_3rps"] == 2


def test_kernels_and_scheduling_multiply_to_the_whole() -> None:
    cells = [cell("ours", 0.1), cell("ours_as_vllm", 0.2), cell("vllm_tuned", 0.6)]
    (line,) = attribution(Results.of(cells), Attribution("ours", "ours_as_vllm", "vllm_tuned"))
    assert "ttft_p50 3.00x by kernels, 2.00x by scheduling" in line


def test_the_search_narrows_down_the_highest_rate_that_holds() -> None:
    limit = 4.3
    cells: list[Cell] = []
    while (rate := next_rate(cells)) is not None:
        cells.append(cell("ours", 0.5 if rate <= limit else 1.5, rate=rate))
        assert len(cells) <= 8
    holding, failing = bracket(cells)
    assert holding is not None
    assert failing is not None
    assert holding <= limit < failing <= holding * 1.07


def test_a_rate_at_which_a_request_failed_does_not_hold() -> None:
    assert bracket([cell("ours", 0.1, num_failed=1)]) == (None, 3)
    assert bracket([cell("ours", 0.1, rate=2), cell("ours", 0.1, rate=BURST)]) == (2, None)


class CountingClient(Client):
    """Answers at once and keeps what it was asked."""

    asked: list[CellKey] = []

    def drive(self, key: CellKey, server: Server, facts: Mapping[str, Any]) -> Cell:
        self.asked.append(key)
        return cell(key.contestant, 0.1, rate=key.rate, seed=key.seed, other_cores=0.5)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> CountingClient:
    async def no_burst(*_: object) -> None: ...

    monkeypatch.setattr(matrix_module, "burst", no_burst)
    monkeypatch.setattr(CountingClient, "asked", [])
    return CountingClient(Path(), Path(), ["word"])


def matrix_of(client: Client, directory: Path, **changes: Any) -> Matrix:
    @contextmanager
    def start() -> Iterator[Server]:
        yield Server("http://127.0.0.1:1", "key", "model", 1)

    engines = {name: Contestant(name, name, "bf16", start) for name in ("ours", "vllm_tuned")}
    options = {"deadline_s": math.inf} | changes
    return Matrix(engines, client, CellStore(directory), {}, **options)


def test_an_interrupted_matrix_goes_on(client: CountingClient, tmp_path: Path) -> None:
    keys = alternating(
        ["chat"], [1, BURST], [1, 2], ["ours", "vllm_tuned"], num_requests=10, num_in_burst=10
    )
    assert len(set(keys)) == 8
    assert [key.contestant for key in keys[:4]] == ["ours", "vllm_tuned", "vllm_tuned", "ours"]
    with matrix_of(client, tmp_path) as matrix:
        matrix.run(keys[:3])
    with matrix_of(client, tmp_path) as matrix:
        matrix.run(keys)
    assert client.asked == keys
    assert {stored.key for stored in CellStore(tmp_path).all()} == set(keys)
    with matrix_of(client, tmp_path, is_redoing_disturbed=True) as matrix:
        matrix.run(keys[:1])
    assert client.asked == [*keys, keys[0]]


def test_no_cell_begins_that_would_end_too_late(client: CountingClient, tmp_path: Path) -> None:
    with matrix_of(client, tmp_path, deadline_s=time.monotonic() + 60) as matrix:
        matrix.measure(CellKey("chat", 1, 30, 1, "ours"))
        with pytest.raises(TimeIsUp):
            matrix.measure(CellKey("chat", 1, 200, 1, "ours"))
    assert len(client.asked) == 1


def test_the_curve_is_a_picture_of_every_engine() -> None:
    svg = draw(
        "TTFT <here>", "a note", {"ours": [(1, 80, 120), (3, 90, 400)], "vLLM": [(1, 200, 900)]}
    )
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4


@pytest.mark.parametrize("name", OUR_SETTINGS)
def test_our_configurations_are_settings_of_the_engine(name: str) -> None:
    _, _, settings = OUR_SETTINGS[name]
    validated = EngineSettings.model_validate(settings)
    assert validated.model_fields_set == settings.keys() <= EngineSettings.model_fields.keys()


def test_every_target_gets_a_verdict() -> None:
    figures = {
        "ttft_p50_ratio_bf16_at_3rps": 2.5,
        "ttft_p99_ratio_bf16_at_3rps": 2.49,
        "burst_throughput_ratio_int8": 3.0,
    }
    lines = verdict(figures, peer_targets(["bf16"]))
    assert lines[0] == "1 of 7 targets reached, 1 missed"
    assert lines[1].startswith("reached: TTFT p50 at 3 requests/s 2.50 x")
    assert lines[2].startswith("missed: TTFT p99 at 3 requests/s 2.49 x (target: at least 2.5 x)")
    assert sum(line.startswith("not measured") for line in lines) == 5
    most = Target("start_s", 5, "start", " s", is_most=True)
    assert verdict({"start_s": 4}, [most])[1] == "reached: start 4.00 s (target: at most 5 s)"
    assert verdict({"start_s": 6}, [most])[1].startswith("missed")
    assert any(
        "int8: throughput of a burst 3.00 x" in line
        for line in verdict(figures, peer_targets(["int8"]))
    )


def test_every_target_is_a_figure_of_the_comparison() -> None:
    _, missing = figures_of(
        Results.of([]), [AGAINST, Comparison("", "int8", "ours_int8", "vllm_tuned")], None
    )
    assert {target.figure for target in PEER_TARGETS} <= set(missing)


def test_a_summary_says_what_was_won_what_was_lost_and_draws_the_readmes_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From stored cells alone, as `--minutes 0` does it."""
    store = CellStore(tmp_path / "vllm" / "cells")
    for rate, ours, peer in ((1.0, 0.1, 0.3), (3.0, 0.2, 0.9), (BURST, 0.5, 0.8)):
        store.save(cell("ours", ours, rate=rate))
        store.save(cell("vllm_tuned", peer, rate=rate))
    store.save(cell("ours", 0.4, rate=2.0, trace="mixed"))
    store.save(cell("vllm_tuned", 0.3, rate=2.0, trace="mixed"))
    store.save(cell("ours", 0.001, rate=2.0, num_requests=3))  # another benchmark's size
    (tmp_path / "vllm" / "capacity.json").write_text('{"rate_90": 2.0}')

    @contextmanager
    def start() -> Iterator[Server]:
        raise AssertionError("nothing is measured")
        yield

    plan = Plan(
        name="vllm",
        output=tmp_path / "vllm",
        contestants=[Contestant(n, n.title(), "bf16", start) for n in ("ours", "vllm_tuned")],
        comparisons=[AGAINST],
        capacity_peer="vllm_tuned",
        versions={},
        notes=["a small model"],
        has_targets=True,
    )
    picture = tmp_path / "docs" / "picture.svg"
    command = ["--minutes", "0", "--requests", "10", "--burst", "10", "--seeds", "1"]
    chosen = options(parser("").parse_args([*command, "--picture", str(picture)]))
    benchmark.run(plan, chosen, Client(Path(), Path(), ["word"]))
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "vllm.json").read_text())
    assert report["figures"]["ttft_p50_ratio_bf16_at_3rps"] == 4.5
    assert report["figures"]["tpot_p50_ratio_bf16_least"] == 1.6
    assert report["figures"]["ttft_p50_ratio_bf16_mixed_90"] == 0.75
    for line in (
        "reached: TTFT p50 at 3 requests/s 4.50 x",
        "missed: TTFT p50, mixed lengths at 90 % of its capacity 0.75 x (target: at least 4 x)",
        "not measured: highest rate with p99 TTFT within 1 s",
        "lost: mixed 2/s: vllm_tuned is 1.33x better than ours in ttft_p50",
        "a small model",
    ):
        assert line in said
        assert any(line in note for note in report["notes"])
    svg = picture.read_text()
    assert "prefers-color-scheme: dark" in svg
    assert "40 requests, 2026-11-30" in svg
    assert len(list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline"))) == 4
