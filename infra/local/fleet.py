"""Keeps as many engine workers running as the catalogue asks for."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from common.db import create_engine, create_sessions, read_only
from engine import catalog
from engine.catalog import HostedModel
from infra.local.parts import Part, PartSpec
from infra.local.platform_parts import numbered, worker_part
from infra.local.wiring import Wiring

StartPart = Callable[[PartSpec], Awaitable[Part]]
Replica = tuple[str, str]
"""(model, revision): another revision is another set of workers."""


@dataclass(slots=True)
class Fleet:
    """The workers of one machine, by (model, revision)."""

    wiring: Wiring
    start: StartPart
    say: Callable[[str], None]
    workers: dict[Replica, list[Part]] = field(default_factory=dict)
    has_read: asyncio.Event = field(default_factory=asyncio.Event)
    """The catalogue has been read once, and its workers have been started."""
    _num_started: int = 0

    def model_to_ask(self, preferred: str) -> str | None:
        """`preferred` when it is live, else any live model, else None."""
        names = [name for name, _ in self.workers]
        return preferred if preferred in names else next(iter(names), None)

    async def follow(self) -> None:
        """Look at the catalogue again and again, and make the machine be like it."""
        engine = create_engine(self.wiring.database_url)
        sessions = create_sessions(engine)
        try:
            while True:
                try:
                    async with read_only(sessions) as session:
                        models = await catalog.live_models(session)
                except (SQLAlchemyError, OSError) as fault:
                    self.say(f"cannot read the catalogue, the workers stay as they are: {fault}")
                else:
                    await self.reconcile(models)
                    self.has_read.set()
                await asyncio.sleep(self.wiring.settings.catalogue_interval_s)
        finally:
            await engine.dispose()

    async def reconcile(self, models: list[HostedModel]) -> None:
        """Start what is missing, drain what nobody asks for."""
        wanted = {(model.name, model.revision): model for model in models}
        for replica in [replica for replica in self.workers if replica not in wanted]:
            self.say(f"draining {replica[0]}")
            await asyncio.gather(*(part.stop() for part in self.workers.pop(replica)))
        for replica, model in wanted.items():
            if replica not in self.workers:
                self.workers[replica] = [
                    await self.start(self._spec(model)) for _ in range(self.wiring.settings.workers)
                ]

    def _spec(self, model: HostedModel) -> PartSpec:
        name = numbered("worker", self._num_started)
        self._num_started += 1
        return worker_part(self.wiring, name, model.name, Path(model.path), model.revision)
