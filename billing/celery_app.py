"""The Celery application: `celery -A billing.celery_app worker`, with `-B` on one machine.

Celery only hastens what a database sweep does anyway; every task may run twice, or never.
"""

from celery import Celery
from celery.signals import setup_logging

from billing.settings import BillingSettings
from common import logging as platform_logging
from common.settings import CommonSettings

VISIBILITY_TIMEOUT_S = 600
TASK_TIME_LIMIT_S = 300


def create_celery(common: CommonSettings, billing: BillingSettings) -> Celery:
    """An application whose settings keep a lost worker from losing or doubling anything.

    The hard time limit lies below the visibility timeout: a task that still runs is never handed
    to a second worker.
    """
    app = Celery("billing", broker=common.redis_url.get_secret_value(), include=["billing.tasks"])
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        task_time_limit=TASK_TIME_LIMIT_S,
        task_soft_time_limit=TASK_TIME_LIMIT_S - 30,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT_S},
        task_default_queue="billing",
        timezone="UTC",
        beat_schedule_filename=str(common.var / "celerybeat-schedule"),
        beat_schedule={
            "close-lost-gateways": _every(billing.sweep_every_s, "close_lost_gateways"),
            "relay-outbox": _every(billing.outbox_every_s, "relay_outbox"),
            "reconcile": _every(billing.reconcile_every_s, "reconcile_books"),
            "purge": _every(billing.purge_every_s, "purge_expired"),
            "stripe-inbox": _every(billing.stripe_inbox_every_s, "process_stripe_inbox"),
            "recharge": _every(billing.recharge_every_s, "recharge_due"),
            "payment-sweep": _every(billing.payment_sweep_every_s, "sweep_payments"),
            "stripe-comparison": _every(billing.stripe_comparison_every_s, "compare_with_stripe"),
            "low-balance": _every(billing.low_balance_every_s, "warn_low_balances"),
            "expiry": _every(billing.expiry_every_s, "expire_credit"),
        },
    )
    return app


def _every(seconds: object, task: str) -> dict[str, object]:
    # A run that waited longer than its interval is worthless: the next one does its work.
    return {
        "task": f"billing.tasks.{task}",
        "schedule": seconds,
        "options": {"expires": seconds},
    }


@setup_logging.connect
def _configure_logging(**_: object) -> None:
    platform_logging.configure(CommonSettings(), process="celery")


app = create_celery(CommonSettings(), BillingSettings())
