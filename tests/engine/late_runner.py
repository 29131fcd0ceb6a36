"""A runner whose results come one step late, as a GPU's do, over the model of the tests."""

from engine.batch import AdjustedRow, StepBatch
from engine.model_runner import ModelRunner
from engine.models.model import Model
from engine.sampler import NOTHING_SAMPLED, Sampled
from engine.scheduling.slots import SlotTable


class LateResult:
    """Of a step that was computed, or failed, long ago."""

    def __init__(self, runner: "LateRunner", sampled: Sampled) -> None:
        self._runner = runner
        self._sampled = sampled
        self._failure = runner.failure

    def result(self) -> Sampled:
        if self._failure is not None:
            self._runner.failure = None
            raise self._failure
        return self._sampled


class LateRunner(ModelRunner):
    """Computes at once and tells late; each step takes the tokens that nobody was told of yet.

    After a failure nothing is computed until somebody has heard of it.
    """

    is_ahead = True

    def __init__(self, model: Model, num_blocks: int, num_slots: int) -> None:
        super().__init__(model, num_blocks)
        self.last_tokens = [0] * num_slots
        self.num_started = 0
        self.failure: RuntimeError | None = None

    def start(  # type: ignore[override]  # its result comes late
        self, batch: StepBatch, slots: SlotTable, adjusted: list[AdjustedRow]
    ) -> LateResult:
        self.num_started += 1
        num_decodes = len(batch.decode_slots)
        if num_decodes:
            tokens = [self.last_tokens[slot] for slot in batch.decode_slots.tolist()]
            batch.token_ids[-num_decodes:] = tokens
        sampled = NOTHING_SAMPLED
        if self.failure is None:
            try:
                sampled = self.run(batch, slots, adjusted)
            except RuntimeError as failure:
                self.failure = failure
        if len(sampled.token_ids):
            sampled_slots = batch.sample_slots.tolist()
            for slot, token in zip(sampled_slots, sampled.token_ids.tolist(), strict=True):
                self.last_tokens[slot] = max(0, token)
        return LateResult(self, sampled)
