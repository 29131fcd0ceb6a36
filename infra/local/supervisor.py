"""`make run`: starts every part in order, proves that they work together, keeps them running.

Order up: Redis, Celery, workers and API. Order down: the API stops admitting and settles what runs,
the workers drain, Celery ends, Redis last. Whatever kills the supervisor, the guardian ends the rest.
"""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.db import create_engine, create_sessions
from engine.broker.gateway import GatewayBroker
from infra.connections import open_broker
from infra.errors import PartFailed
from infra.local import first_request, preflight, ready_file
from infra.local.additions import Additions
from infra.local.console import Display
from infra.local.default_model import DEFAULT_MODEL
from infra.local.fleet import Fleet
from infra.local.guard import Guard
from infra.local.hub import HubAccess
from infra.local.parts import Part, PartSpec
from infra.local.platform_parts import api_part, celery_part, redis_part
from infra.local.redis_server import find_redis_server
from infra.local.secret_store import Secrets
from infra.local.seed import DEMO_EMAIL
from infra.local.wiring import Wiring
from infra.settings import InfraSettings

POLL_S = 0.1


@dataclass(slots=True)
class Supervisor:
    """One run of the platform on this machine."""

    settings: InfraSettings
    secrets: Secrets
    display: Display
    is_demo: bool
    """End after the first request has been answered."""
    _parts: dict[str, Part] = field(default_factory=dict)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _is_ready: bool = False
    _guard: Guard | None = None
    _fleet: Fleet | None = None

    async def run(self) -> None:
        """Start, prove, serve until a signal, stop. Raises InfraError when it cannot start."""
        var = self.settings.var.resolve()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        ready_file.remove(var)
        listener = preflight.listen(self.settings)
        self._guard = Guard(var / ready_file.READY_FILE)
        try:
            starting = asyncio.create_task(self._start(listener.fileno()))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                wiring = await starting
                if not self.is_demo:
                    await self._serve(wiring)
            stopping.cancel()
        finally:
            ready_file.remove(var)
            listener.close()  # from now on new callers are refused instead of left waiting
            await self._stop_all()
            self._guard.close()

    def _on_signal(self) -> None:
        """The first signal drains; the second ends everything at once."""
        if not self._stop.is_set():
            self._stop.set()
            return
        self.display.warn("told twice: ending everything at once")
        for part in self._parts.values():
            part.kill()

    # starting

    async def _start(self, listener_fd: int) -> Wiring:
        begun = time.monotonic()
        wiring = await self._start_redis()
        self._fleet = Fleet(wiring, self._start_part, self.display.note)
        with self.display.stage("API, engine worker and Celery are up"):
            await self._start_part(celery_part(wiring))
            following = asyncio.create_task(self._fleet.follow())
            self._watch(following)
            self._watch(asyncio.create_task(self._follow_additions(wiring)))
            for index in range(self.settings.api_processes):
                await self._start_part(api_part(wiring, index, listener_fd))
            try:
                async with asyncio.timeout(self.settings.start_timeout_s):
                    await self._until_ready(wiring)
            except TimeoutError:
                raise PartFailed(
                    f"not everything was ready within {self.settings.start_timeout_s:.0f} s:"
                    f" see {wiring.var / 'logs'}, or give it longer: NCOMPASS_START_TIMEOUT_S"
                ) from None
        self._is_ready = True
        await self._ask(wiring)
        self._publish(wiring)
        self._introduce(wiring, time.monotonic() - begun)
        return wiring

    async def _start_redis(self) -> Wiring:
        """Connect to the Redis that was named, or start the embedded one."""
        metrics_port = self.settings.metrics_port or preflight.free_port()
        if self.settings.redis_url is not None:
            url = self.settings.redis_url.get_secret_value()
            wiring = Wiring(self.settings, self.secrets, url, metrics_port)
        else:
            port = preflight.free_port()
            url = f"redis://:{self.secrets.redis_password}@127.0.0.1:{port}/0"
            wiring = Wiring(self.settings, self.secrets, url, metrics_port)
            binary = find_redis_server()
            with self.display.stage(f"Redis {binary.version} ({binary.origin})"):
                await self._start_part(redis_part(binary, wiring, port))
        async with asyncio.timeout(30), Redis.from_url(url) as redis:
            while True:
                try:
                    await redis.ping()
                    return wiring
                except RedisError:
                    await asyncio.sleep(POLL_S)

    async def _follow_additions(self, wiring: Wiring) -> None:
        """Host what operators ask for, from the moment at which workers can."""
        assert self._fleet is not None
        await self._fleet.has_read.wait()
        engine = create_engine(wiring.database_url)
        try:
            async with open_broker(wiring.redis_url) as broker:
                sessions = create_sessions(engine)
                models = wiring.var / "models"
                await Additions(sessions, self._fleet, broker, models, self._hub()).follow()
        finally:
            await engine.dispose()

    def _hub(self) -> HubAccess:
        token = self.settings.hub_token
        secret = None if token is None else token.get_secret_value()
        return HubAccess(self.settings.hub_endpoint, secret)

    async def _start_part(self, spec: PartSpec) -> Part:
        assert self._guard is not None
        log = self.settings.var.resolve() / "logs" / f"{spec.name}.log"
        _set_aside(log, self.settings.log_bytes_max)
        part = Part(spec, log=log, guard=self._guard, say=self.display.warn)
        await part.start()
        self._parts[spec.name] = part
        self._watch(asyncio.create_task(self._keep(part)))
        return part

    async def _keep(self, part: Part) -> None:
        """While the platform starts, a part that ends is fatal; later it is started again."""
        ended = asyncio.create_task(part.fail_when_ended())
        try:
            while not self._is_ready:
                done, _ = await asyncio.wait({ended}, timeout=POLL_S)
                if done:
                    await ended
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        await part.wait_forever()

    def _watch(self, task: asyncio.Task[None]) -> None:
        self._watchers.add(task)

    async def _until_ready(self, wiring: Wiring) -> None:
        """Wait for the API and for a ready worker. Raises PartFailed when a part ends meanwhile."""
        async with httpx.AsyncClient(timeout=5.0) as client, open_broker(wiring.redis_url) as queue:
            while True:
                for task in [task for task in self._watchers if task.done()]:
                    await task
                model = await self._model()
                if await _is_serving(client, wiring) and await _is_loaded(queue, model):
                    return
                await asyncio.sleep(POLL_S)

    async def _model(self) -> str | None:
        """The model to prove the platform with: the default one unless it was drained."""
        assert self._fleet is not None
        await self._fleet.has_read.wait()
        return self._fleet.model_to_ask(DEFAULT_MODEL) if self.settings.workers else None

    async def _ask(self, wiring: Wiring) -> None:
        model = await self._model()
        if model is None:
            self.display.warn("no model is served here, so no request was tried")
            return
        self.display.say(f"\n  {first_request.QUESTION}", "bold")
        self.display.stream("  ")
        answer = await asyncio.to_thread(
            first_request.ask,
            wiring.base_url,
            self.secrets.demo_api_key,
            model,
            self.display.stream,
        )
        self.display.say(
            f"\n  first token after {answer.ttft_s * 1e3:.0f} ms · {answer.num_tokens} tokens"
            f" · cost ${answer.cost} · balance left ${answer.balance}\n",
            "dim",
        )

    def _publish(self, wiring: Wiring) -> None:
        pids = {"supervisor": os.getpid()}
        pids |= {name: part.pid for name, part in self._parts.items() if part.pid is not None}
        ready_file.write(
            wiring.var,
            ready_file.Ready(
                base_url=wiring.base_url,
                api_key=self.secrets.demo_api_key,
                admin_api_key=self.secrets.operator_api_key,
                model=DEFAULT_MODEL,
                redis_url=wiring.redis_url,
                database_url=wiring.database_url,
                metrics_url=wiring.metrics_url,
                pids=pids,
            ),
        )

    def _introduce(self, wiring: Wiring, seconds: float) -> None:
        body = f'{{"model": "{DEFAULT_MODEL}", "stream": true,'
        body += ' "messages": [{"role": "user", "content": "Hello!"}]}'
        self.display.say(f"nCompass is ready (started in {seconds:.1f} s).", "bold green")
        if self.is_demo:
            self.display.say("  It stops now; `make run` keeps it running.", "dim")
            return
        self.display.say(f"  dashboard   {wiring.origin}/signup")
        self.display.say(f"  demo login  {DEMO_EMAIL} · {self.secrets.demo_password}")
        self.display.say(f"  demo key    {self.secrets.demo_api_key}")
        self.display.say(
            f"\n  curl -N {wiring.base_url}/chat/completions \\\n"
            f"    -H 'Authorization: Bearer {self.secrets.demo_api_key}' \\\n"
            f"    -H 'Content-Type: application/json' \\\n"
            f"    -d '{body}'\n"
        )
        self.display.say("  Ctrl-C drains and stops.", "dim")

    # serving and stopping

    async def _serve(self, wiring: Wiring) -> None:
        """Keep ready.json true until somebody wants to stop."""
        published = {name: part.pid for name, part in self._parts.items()}
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), timeout=1.0)
            for task in [task for task in self._watchers if task.done()]:
                self._watchers.discard(task)
                if (fault := task.exception()) is not None:
                    self.display.warn(f"{fault}")
            current = {name: part.pid for name, part in self._parts.items()}
            if current != published and not self._stop.is_set():
                self._publish(wiring)
                published = current

    async def _stop_all(self) -> None:
        """End every part, those that feed others first."""
        if self._parts:
            self.display.say("\nstopping: draining what runs …", "dim")
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for group in ("api", "worker", "celery", "redis"):
            members = [part for name, part in self._parts.items() if name.split("-")[0] == group]
            await asyncio.gather(*(part.stop() for part in members))
        if self._parts:
            self.display.say("stopped; nothing is left running", "dim")


async def _is_serving(client: httpx.AsyncClient, wiring: Wiring) -> bool:
    """Whether the API answers, and its metrics do."""
    try:
        health = await client.get(f"{wiring.origin}/health")
        metrics = await client.get(wiring.metrics_url)
    except httpx.HTTPError:
        return False
    return health.status_code == metrics.status_code == 200


async def _is_loaded(queue: GatewayBroker, model: str | None) -> bool:
    """Whether a worker runs `model`. Raises PartFailed when one says that it cannot."""
    if model is None:
        return True
    beats = await queue.heartbeats(model)
    if any(beat.is_loaded for beat in beats):
        return True
    for beat in beats:
        if beat.state == "failed":
            raise PartFailed(f"{beat.worker} cannot host {model}: {beat.load_report}")
    return False


def _set_aside(log: Path, bytes_max: int) -> None:
    """Begin a new log when the old one has grown too long; keep one."""
    if log.exists() and log.stat().st_size > bytes_max:
        log.replace(log.with_suffix(".log.1"))
