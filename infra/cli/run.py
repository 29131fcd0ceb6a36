"""up, demo, migrate, status."""

import asyncio
import signal
import sys

import typer

from accounts.settings import AccountsSettings
from engine.messages import Heartbeat
from infra.cli.connections import run_with_broker
from infra.cli.tables import new_table, print_table
from infra.local import preflight, ready_file
from infra.local.console import Display
from infra.local.instance_lock import instance_lock
from infra.local.set_up import prepare
from infra.local.supervisor import Supervisor
from infra.local.wiring import database_url
from infra.settings import InfraSettings
from migrations.upgrade import upgrade


def up() -> None:
    """Start everything and stay in the foreground until Ctrl-C."""
    _start(is_demo=False)


def demo() -> None:
    """Start everything, answer one real request, stop."""
    _start(is_demo=True)


def migrate() -> None:
    """Bring the database up to date."""
    settings = InfraSettings()
    upgrade(database_url(settings))
    typer.echo("the database is up to date")


COLUMNS = (
    *("model", "worker", "state", "dtype", "running", "waiting", "free KV tokens"),
    *("compute", "bandwidth"),
)
"""The last two: parts of the last seconds that each was in use, at the rate that was measured."""


def status() -> None:
    """Show the running workers."""
    var = InfraSettings().var.resolve()
    ready = ready_file.read(var)
    beats = run_with_broker(ready.redis_url, lambda broker: broker.heartbeats(None))
    beats = sorted(beats, key=lambda beat: (beat.model, beat.worker))
    table = new_table(*COLUMNS, num_words=4)
    for beat in beats:
        table.add_row(*_cells(beat))
    typer.echo(ready.base_url)
    print_table(table)
    for beat in beats:
        if beat.load_report:
            typer.echo(f"{beat.model} on {beat.worker}: {beat.load_report}")


def _cells(beat: Heartbeat) -> tuple[str, ...]:
    counts = (beat.num_running, beat.num_waiting, beat.free_kv_tokens)
    use = (beat.utilisation.compute, beat.utilisation.bandwidth)
    return (
        *(beat.model, beat.worker, beat.state, beat.dtype),
        *(f"{count:,}" for count in counts),
        *(f"{part:.0%}" for part in use),
    )


def _start(*, is_demo: bool) -> None:
    settings, display = InfraSettings(), Display()
    # A terminated set-up takes its compiler and its conversion with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    preflight.check_settings(settings, AccountsSettings())
    with instance_lock(settings.var):
        preflight.listen(settings).close()  # a busy port is known before minutes of set-up
        prepared = prepare(settings, display)
        supervisor = Supervisor(settings, prepared.secrets, display, is_demo)
        asyncio.run(supervisor.run())
