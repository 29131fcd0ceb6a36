"""The worker's compute loop: orders, a step of the model whose turn it is, news, again."""

import threading
import time
from collections.abc import Callable

import structlog
import torch

from engine.worker.mailbox import Bells
from engine.worker.served_model import ServedModel
from engine.worker.turns import Turns
from engine.worker.turnstile import Turnstile

logger = structlog.get_logger(__name__)

OnBroken = Callable[[str], None]
"""Hears the name of a model whose steps fail again and again."""


class EngineThread:
    """Runs the loaded models until it is told to stop. `run` is the thread's whole life."""

    def __init__(self, bells: Bells, turnstile: Turnstile, *, quantum_s: float) -> None:
        self.on_broken: OnBroken | None = None
        """Who hears of a model that is given up; without anybody the thread ends."""
        self._bells = bells
        self._turnstile = turnstile
        self._turns = Turns(quantum_s)
        self._models: dict[str, ServedModel] = {}
        self._changes = threading.Condition()
        self._wanted: dict[str, ServedModel] = {}
        """What `_models` is to be; under `_changes`."""
        self._is_stopping = False
        self._num_torch_threads = 0

    def add(self, model: ServedModel) -> None:
        """Serve one more model."""
        with self._changes:
            self._wanted = self._wanted | {model.name: model}
        self._bells.ordered.set()

    def remove(self, name: str) -> None:
        """Forget the model; returns when no step of it runs and nothing refers to it any more."""
        with self._changes:
            self._wanted = {key: model for key, model in self._wanted.items() if key != name}
            self._bells.ordered.set()
            while name in self._models and not self._is_stopping:
                self._changes.wait()

    def stop(self) -> None:
        """End after the step that runs."""
        with self._changes:
            self._is_stopping = True
            self._changes.notify_all()
        self._bells.ordered.set()

    def run(self) -> None:
        """Steps while there is work, sleeps while there is none.

        Raises what made a model fail again and again when it is the only one.
        """
        while not self._is_stopping:
            self._change()
            if busy := self._obey():
                self._step(self._turns.next(busy))
            else:
                self._bells.ordered.wait()
            self._bells.ordered.clear()

    def _obey(self) -> dict[str, float | None]:
        """Let every model hear its orders; those that have work, with their first prompts' keys.

        (No name here outlives the call: what `remove` has forgotten is to be freed.)
        """
        for model in self._models.values():
            model.obey()
        return {
            name: model.engine.prefill_key
            for name, model in self._models.items()
            if model.engine.has_work
        }

    def _change(self) -> None:
        with self._changes:
            for name in self._models.keys() - self._wanted.keys():
                self._turns.forget(name)
            if self._models is not self._wanted:
                self._models = self._wanted
                self._changes.notify_all()

    def _step(self, name: str) -> None:
        model = self._models[name]
        began_s = time.perf_counter()
        with self._turnstile:
            if model.num_torch_threads not in (0, self._num_torch_threads):
                self._num_torch_threads = model.num_torch_threads
                torch.set_num_threads(self._num_torch_threads)
            try:
                model.step()
            except Exception:  # what failed again and again must not take the others down
                if len(self._models) == 1 or self.on_broken is None:
                    raise
                self._give_up(name)
                return
        self._turns.charge(name, time.perf_counter() - began_s)

    def _give_up(self, name: str) -> None:
        """One of several models cannot compute any more: the others go on."""
        logger.error("model given up", model=name)
        with self._changes:
            self._wanted = {key: model for key, model in self._wanted.items() if key != name}
        assert self.on_broken is not None
        self.on_broken(name)
