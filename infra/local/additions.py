"""Carries out what operators asked to host: fetch, check, load, test, and only then let callers in.

Part of the supervisor. One at a time, beside everything that runs; a fault ends the addition with the
step and one sentence, and takes back whatever the addition itself has made.
"""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy.exc import DataError, SQLAlchemyError

from billing import pricing
from billing.pricing import Terms
from common.db import Sessions, read_only
from common.errors import PlatformError
from engine import additions, catalog
from engine.adapter_config import is_adapter
from engine.additions import AdditionState, ModelAddition
from engine.broker.gateway import GatewayBroker
from engine.catalog import HostedModel
from engine.memory.footprint import StoredWeights
from engine.worker.hosting import Hosting
from infra.local import checkpoints, hub
from infra.local.adapter_inspection import base_of, inspect_adapter
from infra.local.checkpoints import Checkpoint
from infra.local.child import Progress
from infra.local.fleet import Fleet
from infra.local.hub import HubAccess, is_hub_name
from infra.local.inspection import Inspection, inspect, worker_dtype
from infra.local.smoke_test import SmokeTest

logger = structlog.get_logger(__name__)

POLL_S = 0.5
LOAD_TIMEOUT_S = 1800.0
SHOWN_ANSWER = 120

Result = TypeVar("Result")


@dataclass(slots=True)
class Additions:
    """The line of additions of one platform."""

    sessions: Sessions
    fleet: Fleet
    broker: GatewayBroker
    models_directory: Path
    hub_access: HubAccess = field(default_factory=HubAccess)
    _progress: dict[str, str] = field(default_factory=dict)

    async def follow(self) -> None:
        """Carry out one after the other, for ever; those of an earlier run begin anew."""
        while True:
            try:
                async with read_only(self.sessions) as session:
                    waiting = await additions.unfinished(session)
                    session.expunge_all()
                if waiting:
                    await self.carry_out(waiting[0])
            except (SQLAlchemyError, OSError) as fault:
                logger.warning("additions wait for the database", reason=type(fault).__name__)
            await asyncio.sleep(POLL_S)

    async def carry_out(self, addition: ModelAddition) -> None:
        """One addition from its first step to the end."""
        name = addition.name
        created: Path | None = None
        try:
            await self._note(addition, "fetching", f"looking for {addition.source}")
            before = await asyncio.to_thread(_folders, self.models_directory)
            checkpoint = await self._fetch(addition)
            if checkpoint.directory not in before and self._owns(checkpoint.directory):
                created = checkpoint.directory
            name = name or checkpoint.name
            additions.require_short(name=name)
            await self._note(addition, "checking", "reading its files", name=name)
            inspection, base = await self._check(addition, name, checkpoint.directory)
            await self._note(addition, "loading", inspection.fit)
            directory = str(checkpoint.directory)
            hosting = Hosting(name, directory, inspection.facts.revision, base.name if base else "")
            self.fleet.candidate = hosting
            test = SmokeTest(self.broker, name, Path(base.path if base else directory))
            report = (await test.load(LOAD_TIMEOUT_S)).load_report
            await self._note(addition, "testing", report)
            answer = await test.run()
            await self._go_live(addition, hosting, inspection, f"{report}; {_shown(answer)}")
        except PlatformError as fault:
            await self._fail(addition, fault.message, created)
        except DataError:  # what is longer or larger than its column never goes in
            reason = "the catalogue has no room for what its files say of it"
            await self._fail(addition, reason, created)
        except SQLAlchemyError:
            raise  # it begins anew once the database is back
        except Exception as fault:  # a foreign checkpoint may fail in any way
            logger.exception("model not added", source=addition.source)
            reason = (str(fault).strip() or "no more is known").splitlines()[0]
            await self._fail(addition, f"{type(fault).__name__}: {reason}", created)

    async def _fetch(self, addition: ModelAddition) -> Checkpoint:
        """Find it, convert it, or download it; a download that fails leaves nothing."""
        source, directory = addition.source, self.models_directory
        if not is_hub_name(source):
            may = addition.allows_pickles
            fetch = partial(checkpoints.fetch, source, directory, allows_pickles=may)
            return await self._watched(addition, fetch)
        try:
            return await self._fetch_from_hub(addition)
        except Exception:  # whatever it was: the addition fails with it, and its files go
            unfinished = hub.partial_directory(directory, source)
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
            raise

    async def _fetch_from_hub(self, addition: ModelAddition) -> Checkpoint:
        """Its descriptions first: what may not be hosted, or does not fit, is not downloaded."""
        source = addition.source
        name = addition.name or source
        access = replace(self.hub_access, allows_pickles=addition.allows_pickles)
        look = partial(hub.describe, source, self.models_directory, access)
        model = await self._watched(addition, look)
        if not is_adapter(model.directory):
            await self._note(addition, "checking", "reading what describes it", name=name)
            inspection, _ = await self._check(addition, name, model.directory, model.stored)
            await self._note(addition, "fetching", inspection.fit)
        whole = await self._watched(addition, partial(hub.fetch_weights, model))
        return Checkpoint(source, whole)

    async def _watched(self, addition: ModelAddition, work: Callable[[Progress], Result]) -> Result:
        """Do it in a thread; the row hears of the progress once a poll."""

        def progress(line: str) -> None:
            self._progress[addition.id] = line

        fetching = asyncio.create_task(asyncio.to_thread(work, progress))
        try:
            while not fetching.done():
                await asyncio.wait({fetching}, timeout=POLL_S)
                if line := self._progress.pop(addition.id, ""):
                    await self._note(addition, "fetching", line)
        finally:
            self._progress.pop(addition.id, None)
        return await fetching

    async def _check(
        self,
        addition: ModelAddition,
        name: str,
        directory: Path,
        stored: StoredWeights | None = None,
    ) -> tuple[Inspection, HostedModel | None]:
        """What is known of its files, and its base if it is an adapter."""
        base = None
        async with read_only(self.sessions) as session:
            await additions.refuse_hosted(session, name)
            if addition.base or is_adapter(directory):
                base = await catalog.find(session, base_of(directory, addition.base))
                session.expunge(base)
        beats = await self.broker.heartbeats(None)
        if base is None:
            licence = addition.licence
            return await asyncio.to_thread(inspect, directory, licence, beats, stored), None
        dtype = worker_dtype(beats)
        found = await asyncio.to_thread(inspect_adapter, directory, addition.licence, base, dtype)
        return found, base

    async def _go_live(
        self, addition: ModelAddition, hosting: Hosting, inspection: Inspection, detail: str
    ) -> None:
        """Price and catalogue change in one transaction; whoever wished for it is told so."""
        facts = inspection.facts
        terms = Terms.decode(addition.terms)
        async with self.sessions.begin() as session:
            await pricing.set_price(
                session,
                hosting.name,
                input=terms.input,
                cached=terms.cached,
                output=terms.output,
            )
            await catalog.add_model(
                session,
                name=hosting.name,
                path=hosting.path,
                revision=hosting.revision,
                architecture=facts.architecture,
                context_length=facts.context_length,
                dtype=facts.dtype,
                description=addition.description,
                kind=facts.kind,
                base=hosting.base or None,
                licence=inspection.licence,
            )
            await catalog.answer_requests(session, hosting.name)
            await additions.note(
                session, addition.id, "live", f"{detail}; licence: {inspection.licence}"
            )

    async def _fail(self, addition: ModelAddition, reason: str, created: Path | None) -> None:
        """Take back what the addition has made, then say why."""
        self.fleet.candidate = None
        if created is not None:
            await asyncio.to_thread(shutil.rmtree, created, ignore_errors=True)
        await self._note(addition, "failed", reason)

    async def _note(
        self, addition: ModelAddition, state: AdditionState, detail: str, *, name: str | None = None
    ) -> None:
        async with self.sessions.begin() as session:
            await additions.note(session, addition.id, state, detail, name=name)

    def _owns(self, directory: Path) -> bool:
        """Whether we made the folder: an operator's own is never removed."""
        return directory.parent == self.models_directory.resolve()


def _folders(directory: Path) -> set[Path]:
    return {path.resolve() for path in directory.glob("*")} if directory.is_dir() else set()


def _shown(answer: str) -> str:
    one_line = " ".join(answer.split())[:SHOWN_ANSWER]
    return f'it answers "{one_line}"'
