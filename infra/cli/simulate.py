"""simulate: what this product, or a peer's policy, would do with a load on a machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from engine.broker.gateway import GatewayBroker
from engine.errors import SimulationRefused
from engine.messages import Heartbeat
from engine.simulator.bound import mean_ttft_bound_s
from engine.simulator.curve import Line, draw_curve
from engine.simulator.machines import PRESETS, Machine, calibrated, read_machine
from engine.simulator.policies import POLICIES, Policy
from engine.simulator.report import RunReport, Spread, report
from engine.simulator.simulation import simulate as run_simulation
from engine.simulator.sizing import MACHINES_MAX, Sizing, Target, machines_needed
from engine.simulator.trace import TracedRequest, at_rate, mean_rate, read_trace, write_trace
from engine.simulator.workloads import WORKLOADS
from infra.cli.connections import run_with_broker
from infra.cli.tables import new_table, print_table
from infra.local import ready_file
from infra.settings import InfraSettings

DEFAULT_POLICIES = "ncompass,vllm,vllm-tuned,sglang"
CURVE_SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Rates of a curve, as parts of the rate that was asked for."""
THIS_MACHINE = "this"


@dataclass(frozen=True, slots=True)
class _Question:
    """What to simulate."""

    requests: list[TracedRequest]
    load: str
    machine: Machine
    num_machines: int
    policies: list[Policy]

    @property
    def subtitle(self) -> str:
        """What every figure of this question is a figure of."""
        count = "" if self.num_machines == 1 else f"{self.num_machines} x "
        return (
            f"simulated: {self.load}, {len(self.requests):,} requests,"
            f" {mean_rate(self.requests):.3g}/s on {count}{self.machine.name}"
        )


def simulate(
    load: Annotated[
        str,
        typer.Argument(help=f"A trace (JSON lines), or a kind of load: {', '.join(WORKLOADS)}."),
    ],
    machine: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(PRESETS)}; `{THIS_MACHINE}`: as the running platform's worker measured"
            " it; or a JSON file with cost_model, total_kv_tokens and context_length."
        ),
    ] = "h100",
    rate: Annotated[
        float, typer.Option(min=0, help="Requests per second; 0 keeps a trace's own times.")
    ] = 0.0,
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many to make up.")
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Of the made-up load.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=MACHINES_MAX, help="Replicas.")] = 1,
    policies: Annotated[
        str, typer.Option(help=f"Separated by commas, of: {', '.join(POLICIES)}.")
    ] = DEFAULT_POLICIES,
    curve: Annotated[
        Path | None, typer.Option(help="Draw mean TTFT against rates up to --rate into this SVG.")
    ] = None,
    how_many: Annotated[
        float | None,
        typer.Option(min=0.001, help="How many GPUs keep TTFT p99 below so many seconds?"),
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the load to this file as well.")
    ] = None,
) -> None:
    """Play a load through the real scheduler and queue in simulated time. No GPU is needed."""
    question = _Question(
        requests=_load(load, rate, requests, seed),
        load=Path(load).name,
        machine=_machine(machine),
        num_machines=gpus,
        policies=_policies(policies),
    )
    if save_trace is not None:
        write_trace(save_trace, question.requests)
    if how_many is not None:
        _print_sizing(question, Target(ttft_p99_s=how_many))
    elif curve is not None:
        _draw(question, curve)
    else:
        _print_reports(question)


def _load(name: str, rate: float, num_requests: int, seed: int) -> list[TracedRequest]:
    if name in WORKLOADS:
        if rate <= 0:
            raise SimulationRefused(
                f"a made-up load needs a --rate: ncompass simulate {name} --rate 5"
            )
        return WORKLOADS[name](rate, num_requests, seed)
    path = Path(name)
    if not path.exists():
        raise SimulationRefused(
            f"{name} is neither a file nor a kind of load: {', '.join(WORKLOADS)}"
        )
    found = read_trace(path)
    return at_rate(found, rate) if rate > 0 else found


def _policies(names: str) -> list[Policy]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in POLICIES]
    if unknown or not wanted:
        shown = f"unknown policy {unknown[0]}" if unknown else "no policy"
        raise SimulationRefused(f"{shown}; there are {', '.join(POLICIES)}")
    return [POLICIES[name] for name in wanted]


def _machine(name: str) -> Machine:
    if name != THIS_MACHINE:
        return read_machine(name)
    ready = ready_file.read(InfraSettings().var.resolve())
    for beat in run_with_broker(ready.redis_url, _heartbeats):
        if beat.cost_model is not None:
            return calibrated(
                f"{beat.model}, {beat.dtype}, this machine",
                beat.cost_model,
                kv_tokens=beat.total_kv_tokens,
                context_length=beat.context_length,
            )
    raise SimulationRefused("no worker of the running platform has told its cost model yet")


async def _heartbeats(broker: GatewayBroker) -> list[Heartbeat]:
    return await broker.heartbeats(None)


def _run(question: _Question, policy: Policy, requests: list[TracedRequest]) -> RunReport:
    ledger = run_simulation(requests, question.machine, policy, question.num_machines)
    return report(ledger, question.num_machines)


def _print_reports(question: _Question) -> None:
    bound_s = mean_ttft_bound_s(question.requests, question.machine, question.num_machines)
    found = {policy.name: _run(question, policy, question.requests) for policy in question.policies}
    columns = ["policy", "TTFT mean", "p50", "p90", "p99", "x bound", "TPOT p50", "ITL p99", "max"]
    columns += ["tokens/s", "busy", "preempted", "others' p99", "refused"]
    headline = new_table(*columns)
    for name, each in found.items():
        headline.add_row(name, *_cells(each, bound_s))
    typer.echo(question.subtitle)
    print_table(headline)
    typer.echo(
        f"\nTimes in ms; no scheduler's mean TTFT can be below {bound_s * 1e3:.1f} ms here (preemptive"
        " SRPT on the prefills' arithmetic); others: all tenants but the heaviest.\n\n"
        "TTFT by prompt tokens: p50 / p90 / p99 in ms"
    )
    print_table(_bucket_table(found))


def _cells(found: RunReport, bound_s: float) -> list[str]:
    return [
        *(_ms(seconds) for seconds in (found.ttft.mean, found.ttft.p50, found.ttft.p90)),
        _ms(found.ttft.p99),
        f"{found.ttft.mean / bound_s:.2f}",
        _ms(found.tpot.p50),
        _ms(found.gap.p99),
        _ms(found.gap.max),
        f"{found.tokens_per_s:,.0f}",
        f"{found.utilisation:.0%}",
        f"{found.num_preemptions:,}",
        _ms(found.others_ttft.p99),
        f"{found.num_refused:,}",
    ]


def _bucket_table(found: dict[str, RunReport]) -> Table:
    buckets = next(iter(found.values())).buckets
    table = new_table("policy", *(f"{each.name} ({each.num_requests:,})" for each in buckets))
    for name, each in found.items():
        table.add_row(name, *(_spread(bucket.ttft) for bucket in each.buckets))
    return table


def _print_sizing(question: _Question, target: Target) -> None:
    table = new_table("policy", "needed", "TTFT p50", "p99", "TPOT p50", "busy")
    for policy in question.policies:
        sizing = machines_needed(question.requests, question.machine, policy, target)
        table.add_row(policy.name, *_sizing_cells(sizing))
    typer.echo(
        f"simulated: {question.load}, {mean_rate(question.requests):.3g}/s with TTFT p99"
        f" <= {target.ttft_p99_s:g} s on {question.machine.name}"
    )
    print_table(table)


def _sizing_cells(sizing: Sizing) -> list[str]:
    found = sizing.report
    times = [_ms(seconds) for seconds in (found.ttft.p50, found.ttft.p99, found.tpot.p50)]
    count = f"> {MACHINES_MAX}" if sizing.num_machines is None else f"{sizing.num_machines}"
    return [count, *times, f"{found.utilisation:.0%}"]


def _draw(question: _Question, path: Path) -> None:
    top = mean_rate(question.requests)
    lines = []
    for policy in question.policies:
        points = []
        for share in CURVE_SHARES:
            requests = at_rate(question.requests, share * top)
            points.append((share * top, _run(question, policy, requests).ttft.mean))
        lines.append(Line(policy.name, points))
    path.write_text(draw_curve("Mean time to first token", question.subtitle, lines))
    typer.echo(f"{path}: {', '.join(line.name for line in lines)} at {len(CURVE_SHARES)} rates")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _spread(spread: Spread) -> str:
    return " / ".join(_ms(seconds) for seconds in (spread.p50, spread.p90, spread.p99))
