"""Whose line hears of a request: where adapters share an engine, each has a line of its own."""

from dataclasses import replace

from engine.costs.step_meter import NO_STEPS
from engine.output import EngineStats, StepOutput


class Routes:
    """The requests of adapters by id; all others belong to the base."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._model_of: dict[str, str] = {}

    def note(self, request_id: str, model: str) -> None:
        """The request was taken from the line of `model`."""
        if model != self._base:
            self._model_of[request_id] = model

    def forget(self, model: str) -> None:
        """The line of an adapter is there no more."""
        self._model_of = {each: own for each, own in self._model_of.items() if own != model}

    def split(self, output: StepOutput, models: list[str]) -> dict[str, StepOutput]:
        """One step's news by line.

        A tenant's seconds are told to every line: they share the machine, so what a tenant uses
        by one of them lets the others go first in all.
        """
        parts = {model: StepOutput(output.step, charges=output.charges) for model in models}
        for node, frames in output.frames.items():
            for frame in frames:
                part = parts[self._model_of.get(frame.request_id, self._base)]
                part.frames.setdefault(node, []).append(frame)
        for ended in output.finished:
            parts[self._model_of.pop(ended.request_id, self._base)].finished.append(ended)
        return parts


def of_adapter(stats: EngineStats) -> EngineStats:
    """What the line of an adapter tells of the engine that it shares: totals are its base's."""
    return replace(
        stats,
        num_steps=0,
        output_tokens_total=0,
        prefill_tokens_total=0,
        num_preemptions=0,
        totals=NO_STEPS,
    )
