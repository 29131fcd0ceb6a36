"""The worker's compute loop: orders, a step of the model whose turn it is, news, again."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import torch

from engine.worker.mailbox import Bells
from engine.worker.served_model import ServedModel
from engine.worker.turns import Turns
from engine.worker.turnstile import Turnstile

logger = structlog.get_logger(__name__)

OnBroken = Callable[[str], None]
"""Hears the name of a model whose steps fail again and again."""


@dataclass(slots=True)
class _Errand:
    """What another thread wants done on a model."""

    name: str
    work: Callable[[ServedModel], None]
    is_over: threading.Event = field(default_factory=threading.Event)
    is_done: bool = False
    fault: Exception | None = None

    def run(self, model: ServedModel) -> None:
        try:
            self.work(model)
            self.is_done = True
        except Exception as fault:  # it is raised where the errand was asked for
            self.fault = fault


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
        self._errands: deque[_Errand] = deque()
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

    def between_steps(self, name: str, work: Callable[[ServedModel], None]) -> bool:
        """Have `work` done on a model while no step runs. Whether it was: the model may be gone.

        Raises what `work` raises.
        """
        errand = _Errand(name, work)
        with self._changes:
            if self._is_stopping:
                return False
            self._errands.append(errand)
        self._bells.ordered.set()
        errand.is_over.wait()
        if errand.fault is not None:
            raise errand.fault
        return errand.is_done

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
        try:
            self._run()
        finally:
            with self._changes:
                self._is_stopping = True
                self._changes.notify_all()
            self._run_errands()  # nobody waits for a thread that has ended

    def _run(self) -> None:
        while not self._is_stopping:
            self._change()
            self._run_errands()
            if busy := self._obey():
                self._step(self._turns.next(busy))
            elif not self._prepare():
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

    def _prepare(self) -> bool:
        """Nobody waits for a step: do a little of what later ones would wait for, if there is any."""
        with self._turnstile:
            return any(model.engine.prepare() for model in self._models.values())

    def _change(self) -> None:
        with self._changes:
            for name in self._models.keys() - self._wanted.keys():
                self._turns.forget(name)
            if self._models is not self._wanted:
                self._models = self._wanted
                self._changes.notify_all()

    def _run_errands(self) -> None:
        while self._errands:
            errand = self._errands.popleft()
            model = None if self._is_stopping else self._models.get(errand.name)
            if model is not None:
                with self._turnstile:
                    errand.run(model)
            errand.is_over.set()

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
