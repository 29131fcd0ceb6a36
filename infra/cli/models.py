"""models add, list, drain: the running supervisor follows the catalogue."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncSession

from billing import pricing
from billing.money import format_usd, parse_usd
from billing.pricing import Price
from common.clock import MICROSECONDS_PER_SECOND, utc_now_us
from engine import catalog
from engine.catalog import HostedModel
from infra.cli.connections import run_in_transaction
from infra.local.checkpoints import fetch
from infra.local.model_files import read_model_facts
from infra.settings import InfraSettings

app = typer.Typer(no_args_is_help=True)


@app.command()
def add(
    source: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, or a hub's owner/name.")
    ],
    input_price: Annotated[str, typer.Option(help="Dollars per million input tokens.")],
    cached_price: Annotated[str, typer.Option(help="Dollars per million cached input tokens.")],
    output_price: Annotated[str, typer.Option(help="Dollars per million output tokens.")],
    name: Annotated[str, typer.Option(help="Public name; that of the source by default.")] = "",
    description: Annotated[str, typer.Option()] = "",
) -> None:
    """Host a model. A running platform starts a worker for it at once."""
    checkpoint = fetch(source, InfraSettings().var / "models", typer.echo)
    facts = read_model_facts(checkpoint.directory)
    public_name = name or checkpoint.name
    prices = [parse_usd(price) for price in (input_price, cached_price, output_price)]

    async def work(session: AsyncSession) -> None:
        await pricing.set_price(
            session, public_name, input=prices[0], cached=prices[1], output=prices[2]
        )
        await catalog.add_model(
            session,
            name=public_name,
            path=str(checkpoint.directory),
            revision=facts.revision,
            architecture=facts.architecture,
            context_length=facts.context_length,
            dtype=facts.dtype,
            description=description,
        )

    run_in_transaction(work)
    typer.echo(
        f"{public_name}: {facts.architecture}, {facts.weight_bytes / 1e6:,.0f} MB of weights,"
        f" context {facts.context_length:,}. Watch it start: ncompass status"
    )


@app.command()
def promote(
    name: Annotated[str, typer.Argument(help="The model's public name.")],
    input_price: Annotated[str, typer.Option(help="Dollars per million input tokens.")],
    cached_price: Annotated[str, typer.Option(help="Dollars per million cached input tokens.")],
    output_price: Annotated[str, typer.Option(help="Dollars per million output tokens.")],
    days: Annotated[int, typer.Option(min=1, max=366, help="After so many days it ends.")],
) -> None:
    """Charge a promotional price for some days; then today's price comes back by itself."""
    prices = [parse_usd(price) for price in (input_price, cached_price, output_price)]
    until = utc_now_us() + days * 86_400 * MICROSECONDS_PER_SECOND

    async def work(session: AsyncSession) -> None:
        await pricing.promote(
            session, name, input=prices[0], cached=prices[1], output=prices[2], until=until
        )

    run_in_transaction(work)


@app.command("list")
def list_models() -> None:
    """Print the hosted models with their prices."""

    async def work(session: AsyncSession) -> tuple[list[HostedModel], dict[str, Price]]:
        return await catalog.live_models(session), await pricing.current_prices(session)

    hosted, prices = run_in_transaction(work)
    table = Table()
    for column in ("model", "architecture", "context", "$ / M in", "$ / M cached", "$ / M out"):
        table.add_column(column)
    for model in hosted:
        price = prices.get(model.name)
        shown = ["-"] * 3
        if price is not None:
            shown = [
                format_usd(price.input_nano_usd_per_million),
                format_usd(price.cached_input_nano_usd_per_million),
                format_usd(price.output_nano_usd_per_million),
            ]
        table.add_row(model.name, model.architecture, f"{model.context_length:,}", *shown)
    Console().print(table)


@app.command()
def drain(name: Annotated[str, typer.Argument(help="The public name.")]) -> None:
    """Take no more requests for a model; its workers finish what runs, then end."""

    async def work(session: AsyncSession) -> None:
        await catalog.set_state(session, name, "draining")

    run_in_transaction(work)
    typer.echo(f"{name} is draining")
