"""What has to be there before anything runs: secrets, model, kernels, schema, accounts."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from accounts.settings import AccountsSettings
from billing.settings import BillingSettings
from infra.local import cpu_kernels, preflight
from infra.local.console import Display
from infra.local.default_model import convert_default_model, is_converted
from infra.local.secret_store import Secrets, load_or_make
from infra.local.seed import Seeder
from infra.local.wiring import database_url
from infra.settings import InfraSettings
from migrations.upgrade import upgrade


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the set-up made or found."""

    secrets: Secrets
    model_directory: Path


def prepare(settings: InfraSettings, display: Display) -> Prepared:
    """Do every stage that is not done yet. The caller holds the lock of `settings.var`."""
    var = settings.var.resolve()
    accounts = AccountsSettings()
    preflight.check_disk(var)
    (var / "logs").mkdir(parents=True, exist_ok=True)
    secrets = load_or_make(var)
    model_directory = _default_model(var / "models", display)
    _kernels(var / "kernels", display)
    with display.stage("database up to date"):
        upgrade(database_url(settings))
    with display.stage("accounts, prices and catalogue"):
        peppers = {1: secrets.api_key_pepper}
        seeder = Seeder(
            database_url=database_url(settings),
            accounts=accounts
            if accounts.api_key_peppers
            else AccountsSettings.model_validate(
                accounts.model_dump() | {"api_key_peppers": peppers}
            ),
            billing=BillingSettings(),
        )
        secrets = asyncio.run(seeder.seed(var, secrets, model_directory))
    return Prepared(secrets, model_directory)


def _default_model(models: Path, display: Display) -> Path:
    if is_converted(models):
        return convert_default_model(models)
    with display.stage("default model converted (a Q4_1-rounded SmolLM2 135M)"):
        return convert_default_model(models, display.note)


def _kernels(cache: Path, display: Display) -> None:
    with display.stage("CPU kernels"):
        built = cpu_kernels.build(cache)
    if not built.is_built:
        display.warn(f"no compiled kernels: {built.note}")
