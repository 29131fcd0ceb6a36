"""reconcile and check-integrity: proofs that an operator can ask for at any time."""

import asyncio

import typer

from billing.payment_sweeps import compare_with_stripe
from billing.reconcile import Check
from billing.reconcile import reconcile as reconcile_books
from billing.stripe_client import Payments
from common.db import Sessions
from common.ids import new_id
from engine.broker.gateway import GatewayBroker
from engine.messages import CheckIntegrity, IntegrityReport
from infra.cli.connections import run_with_broker, run_with_payments
from infra.errors import ChecksFailed
from infra.local import ready_file
from infra.settings import InfraSettings

ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.3


def reconcile() -> None:
    """Prove from the tables that the books are right; exit status 1 on any difference."""
    checks = run_with_payments(_all_checks)
    for check in checks:
        mark = typer.style("ok  ", fg="green") if check.is_ok else typer.style("DIFF", fg="red")
        typer.echo(f"{mark}  {check.name}: {check.detail}")
    failed = [check.name for check in checks if not check.is_ok]
    if failed:
        raise ChecksFailed(f"{len(failed)} of {len(checks)} checks found a difference")


async def _all_checks(sessions: Sessions, payments: Payments | None) -> list[Check]:
    async with sessions.begin() as session:
        checks = await reconcile_books(session)
    if payments is not None:
        checks.append(await compare_with_stripe(sessions, payments))
    return checks


def check_integrity() -> None:
    """Ask every worker to count its KV blocks; exit status 1 when one finds a fault."""
    ready = ready_file.read(InfraSettings().var.resolve())
    reports = run_with_broker(ready.redis_url, _ask_all)
    for worker, report in sorted(reports.items()):
        typer.echo(f"{worker}: {'; '.join(report.problems) or 'ok'}")
    if any(report.problems for report in reports.values()):
        raise ChecksFailed("a worker's KV blocks are not owned as they are referenced")


async def _ask_all(broker: GatewayBroker) -> dict[str, IntegrityReport]:
    """Every worker's answer. Raises ChecksFailed when one does not answer in time."""
    token = new_id("check")
    asked = {beat.worker: beat.model for beat in await broker.heartbeats(None)}
    for worker, model in asked.items():
        await broker.tell(model, worker, CheckIntegrity(token=token))
    answers: dict[str, IntegrityReport] = {}
    deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
    while answers.keys() != asked.keys():
        if asyncio.get_running_loop().time() > deadline:
            silent = ", ".join(sorted(asked.keys() - answers.keys()))
            raise ChecksFailed(f"no answer within {ANSWER_TIMEOUT_S:.0f} s from {silent}")
        await asyncio.sleep(POLL_S)
        for beat in await broker.heartbeats(None):
            if beat.integrity is not None and beat.integrity.token == token:
                answers[beat.worker] = beat.integrity
    return answers
