"""Keeps the engine workers of one machine running, and tells them which models to host."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from common.db import create_engine, create_sessions, read_only
from engine import catalog
from engine.catalog import HostedModel
from engine.worker.hosting import Hosting, write_hostings
from infra.local.default_model import DEFAULT_MODEL
from infra.local.parts import Part, PartSpec
from infra.local.platform_parts import numbered, worker_part
from infra.local.wiring import Wiring

StartPart = Callable[[PartSpec], Awaitable[Part]]


@dataclass(slots=True)
class Fleet:
    """The workers of one machine; each of them hosts every model of the catalogue."""

    wiring: Wiring
    start: StartPart
    say: Callable[[str], None]
    has_read: asyncio.Event = field(default_factory=asyncio.Event)
    """The catalogue has been read once, and the workers have been started."""
    candidate: Hosting | None = None
    """Hosted as well, while nobody may call it: a model that is being added."""
    _hostings: list[Hosting] | None = None
    """What the workers were told last."""

    def model_to_ask(self, preferred: str) -> str | None:
        """`preferred` when it is hosted, else any hosted model, else None."""
        names = [hosting.name for hosting in self._hostings or ()]
        return preferred if preferred in names else next(iter(names), None)

    async def follow(self) -> None:
        """Look at the catalogue again and again, and make the workers be like it."""
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

    async def reconcile(self, models: Sequence[HostedModel]) -> None:
        """Tell the workers what changed; start them the first time."""
        hostings = [
            Hosting(model.name, model.path, model.revision, model.base or "") for model in models
        ]
        if self.candidate is not None and self.candidate.name in {each.name for each in hostings}:
            self.candidate = None  # it is live
        if self.candidate is not None:
            hostings.append(self.candidate)
        # The default model is loaded first: the platform is ready with it.
        hostings.sort(key=lambda hosting: (hosting.name != DEFAULT_MODEL, hosting.name))
        if hostings == self._hostings:
            return
        is_first = self._hostings is None
        await asyncio.to_thread(write_hostings, self.wiring.hostings_file, hostings)
        self._hostings = hostings
        if is_first:
            for index in range(self.wiring.settings.workers):
                await self.start(worker_part(self.wiring, numbered("worker", index)))
