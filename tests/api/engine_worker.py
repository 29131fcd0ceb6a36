"""A worker of the real engine over a model that the test decides, behind the API under test."""

from typing import Any

import msgspec
import redis

from engine.broker.worker import WorkerBroker
from engine.engine import Engine
from engine.messages import CostModel, Heartbeat
from engine.model_runner import ModelRunner
from engine.models.model import Model
from engine.settings import EngineSettings
from tests.api.conftest import BROKER, MODEL
from tests.engine.worker_threads import WorkerThreads

VOCAB_SIZE = 49_152
"""Of the default model's tokenizer, which the API uses."""


class EngineWorker(WorkerThreads):
    """The threads of a worker; `settings` are the engine's."""

    def __init__(
        self,
        url: str,
        model: Model,
        num_blocks: int,
        cost_model: CostModel | None = None,
        **settings: Any,
    ) -> None:
        engine_settings = EngineSettings(heartbeat_s=0.1, renew_s=0.2, **settings)
        runner = ModelRunner(model, num_blocks)
        self.engine = Engine(runner, engine_settings, num_blocks, cost_model=cost_model)
        self.redis = redis.Redis.from_url(url, socket_timeout=5.0, retry=None)
        broker = WorkerBroker(self.redis, "worker-1", MODEL, settings=BROKER)
        super().__init__(self.engine, broker, engine_settings)

    def describe(self, state: Any, integrity: Any) -> Heartbeat:
        return msgspec.structs.replace(super().describe(state, integrity), model=MODEL)

    def stop(self) -> None:
        super().stop()
        self.redis.close()
        assert self.engine.problems() == []
