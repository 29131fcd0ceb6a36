"""The only types that cross a process boundary, named by what they say.

API node → worker: `GenerateRequest`, `Extend`, `Cancel`, `EndChoice`.
Operator → worker: `Drain`, `CheckIntegrity`.
Worker → API node: `StepFrames`. Worker → everybody: `Heartbeat`.

Encoded with msgspec's msgpack. Times that cross machines are UTC (`_ms` since the epoch); durations
are microseconds measured by one process.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end-of-sequence or stop id. `length`: as many tokens as were asked for."""

WorkerState = Literal["unloaded", "loading", "warming", "ready", "draining", "failed"]
"""Of one model on one worker. `unloaded`: hosted, and loaded when somebody asks for it. `failed`: it
could not be loaded, the load report says why."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose the next token. `temperature == 0` is greedy; `top_k == 0` means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    """Always set by the API node (drawn at random when the caller gave none)."""
    stop_token_ids: tuple[int, ...] = ()
    """The model's own end-of-sequence ids included, unless the caller asked to ignore them."""
    min_tokens: int = 0
    num_logprobs: int | None = None
    """None: no logprobs. 0: the chosen token's only. k: the k most likely as well."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""


StructureKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
WHITESPACE_MAX = 8
"""Longest run of white space in JSON: without a bound a model can pad to its limit (vllm#44619)."""


class Structure(msgspec.Struct, frozen=True):
    """The form that every choice must have: a grammar, compiled by the worker before any token."""

    kind: StructureKind
    source: str
    """JSON text of a schema or of a structural tag (free text with bound parts), a regular
    expression, or a grammar in GBNF (root rule `root`)."""
    begins_after: int | None = None
    """A token id: the form binds only what follows its first occurrence in the output."""


class GenerateRequest(msgspec.Struct, frozen=True, tag=True):
    """One prompt to continue, validated completely by the API node."""

    request_id: str
    model: str
    node: str
    """The API node that wants the frames."""
    tenant: str
    prompt_token_ids: list[int]
    sampling: Sampling
    authorized_tokens: int
    """The fence: output tokens per choice that are paid for by now; never passed. `Extend` moves it."""
    max_tokens: int
    """Output tokens per choice after which it ends; the fence moves up to here."""
    arrival_ms: int
    key: float
    """Static priority inside the tenant: prefill seconds + alpha · arrival. The least goes first."""
    num_choices: int = 1
    attempt: int = 1
    epoch: int = 1
    weight: float = 1.0
    """The tenant's share under contention."""
    work_s: float = 0.0
    """Predicted prefill seconds: what a take charges the tenant in advance."""
    emitted_token_ids: tuple[tuple[int, ...], ...] = ()
    """What the caller has of each choice, when this goes on after a worker's death; else empty."""
    ended_choices: tuple[int, ...] = ()
    """Choices that were complete before that; with `emitted_token_ids` only."""
    first_prompt_logprob: int = 1
    """The first prompt token whose logprob the caller has not: nothing comes before the first token,
    which has none. More than 1 when this goes on after a worker's death."""
    structure: Structure | None = None
    is_pooled: bool = False
    """Asks for a vector of the prompt and for no token; see `TokenFrame.vector`."""
    second_text_at: int = 0
    """Where the second text of a pair begins in the prompt, if the model tells them apart."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop generating; the caller is gone or has heard enough."""

    request_id: str
    attempt: int = 1
    epoch: int = 1


class EndChoice(msgspec.Struct, frozen=True, tag=True):
    """One choice has said enough, such as a stop string; the others go on. Holds for every attempt.

    Where it is lost, the choice goes on for nothing until the request ends.
    """

    request_id: str
    choice: int


class Extend(msgspec.Struct, frozen=True, tag=True):
    """More output is paid for: the new fence of every attempt, so that repeating it is harmless."""

    request_id: str
    authorized_tokens: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, take nothing more, then exit."""


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    """Answer with an `IntegrityReport` in the next heartbeat."""

    token: str


ControlMessage = Cancel | EndChoice | Extend | Drain | CheckIntegrity


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of the chosen token and of the most likely ones, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities of prompt tokens that follow each other, as flat arrays: a long prompt has
    many. Numbers are little-endian, four bytes each.
    """

    first_position: int
    """Index in the prompt of the first token that is told of."""
    num_tokens: int
    logprobs: bytes
    """[num_tokens] fp32: of the token that stands there, given all before it."""
    ranks: bytes
    """[num_tokens] int32: 1 where it was the likeliest."""
    num_top: int = 0
    top_ids: bytes = b""
    """[num_tokens, num_top] int32: the likeliest tokens there, likeliest first."""
    top_logprobs: bytes = b""
    """[num_tokens, num_top] fp32"""

    @property
    def end(self) -> int:
        """The position behind the last token that is told of."""
        return self.first_position + self.num_tokens

    def from_position(self, position: int) -> "PromptLogprobs":
        """The same without the tokens before `position`."""
        count = position - self.first_position
        return PromptLogprobs(
            first_position=position,
            num_tokens=self.num_tokens - count,
            logprobs=self.logprobs[4 * count :],
            ranks=self.ranks[4 * count :],
            num_top=self.num_top,
            top_ids=self.top_ids[4 * count * self.num_top :],
            top_logprobs=self.top_logprobs[4 * count * self.num_top :],
        )


class Timing(msgspec.Struct, frozen=True):
    """Durations of one request on the worker, in microseconds."""

    queued_us: int = 0
    """From arrival at the API node until a worker took it and its prefill started."""
    behind_own_us: int = 0
    """The part of it that the worker spent on other requests of the same tenant."""
    behind_others_us: int = 0
    """The part of it that the worker spent on requests of other tenants."""
    num_tenants: int = 0
    """Tenants that the worker served meanwhile, the own included."""
    prefill_us: int = 0
    """From the start of prefill to the first token."""
    decode_us: int = 0
    """From the first token to the last."""


class TokenFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one choice of one request, as produced by one engine step."""

    request_id: str
    attempt: int
    first_index: int
    """Position of `token_ids[0]` in the choice's output; a gap means that a frame was lost."""
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """No tokens yet: a part of the prompt is computed. All parts come before the choice's tokens,
    once for all choices."""
    num_drafts: int = 0
    """Tokens that were guessed and computed with these; all of `token_ids` but the last were right."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended the choice; counted as output, never part of the text."""
    error: str | None = None
    """Why the worker gave up (finish_reason `error`): a platform fault, unless `is_refused`."""
    is_refused: bool = False
    """The error is the caller's: its structure cannot be compiled."""
    is_accepted: bool = False
    """No tokens yet: the structure is compiled and the answer may begin."""
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache; on the first frame of a request."""
    timing: Timing | None = None
    """On the first and on the last frame of each choice."""
    vector: bytes | None = None
    """The whole answer of a model that pools: fp32, little-endian."""

    @property
    def is_plain(self) -> bool:
        """Whether it has tokens and nothing else: it neither ends nor tells anything."""
        return (
            self.finish_reason is None
            and self.error is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.vector is None
            and not self.is_accepted
        )


class StepFrames(msgspec.Struct, frozen=True, tag=True):
    """Everything one engine step produced for one API node: one message."""

    worker: str
    step: int
    frames: list[TokenFrame]


class CostModel(msgspec.Struct, frozen=True):
    """Predicted seconds of a step: a roofline, calibrated by the worker when it starts.

    seconds = base + products(tokens) + per_prefill_context · pairs + per_decode_context · context
              + per_sample · samples
    products(n) = max(weights, per_token · n) + (1 - overlap) · min(weights, per_token · n)

    `pairs` are (token, earlier token) pairs that prefill attends to: arithmetic. `context` are the
    tokens whose keys and values decoding sequences read: bandwidth, often ten times as dear.
    """

    base_s: float
    """However little is computed: launches, and what runs between two steps."""
    per_token_s: float
    """Arithmetic of one more token, once the step is compute-bound."""
    per_prefill_context_s: float
    per_decode_context_s: float
    weights_s: float = 0.0
    """Reading the weights once; 0 where it is not known."""
    overlap: float = 1.0
    """Part of the lesser of the two, reading weights and arithmetic, that hides under the other."""
    per_sample_s: float = 0.0
    """One more sampled token: its row of the model's head, and what Python does for it."""

    @property
    def ridge_tokens(self) -> float:
        """Tokens in a step from which arithmetic, and no more memory, bounds its products."""
        return self.weights_s / self.per_token_s if self.per_token_s > 0 else 0.0

    def products_s(self, num_tokens: float) -> float:
        """Multiplying `num_tokens` rows by all weights; nothing for no rows."""
        if num_tokens <= 0:
            return 0.0
        arithmetic_s, weights_s = self.per_token_s * num_tokens, self.weights_s
        exposed = 1 - self.overlap
        if arithmetic_s > weights_s:
            return arithmetic_s + exposed * weights_s
        return weights_s + exposed * arithmetic_s

    def work_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Arithmetic of prefilling `num_tokens` tokens after `num_cached` cached ones."""
        pairs = num_tokens * num_cached + num_tokens * num_tokens / 2
        return self.per_token_s * num_tokens + self.per_prefill_context_s * pairs

    def arithmetic_s(self, work: "StepWork") -> float:
        """What a step's arithmetic takes by itself, as if all that it needs were at hand."""
        samples_s = self.per_sample_s * work.num_samples
        attention_s = self.per_prefill_context_s * work.prefill_pairs
        return self.per_token_s * work.num_tokens + attention_s + samples_s

    def reading_s(self, work: "StepWork") -> float:
        """What reading the weights and the decodes' caches takes by itself."""
        return self.weights_s + self.per_decode_context_s * work.decode_context

    def step_s(self, work: "StepWork") -> float:
        """A whole step; nothing where there is nothing to compute."""
        if work.num_tokens <= 0:
            return 0.0
        return (
            self.base_s
            + self.products_s(work.num_tokens)
            + self.per_prefill_context_s * work.prefill_pairs
            + self.per_decode_context_s * work.decode_context
            + self.per_sample_s * work.num_samples
        )

    def scaled(self, factor: float) -> "CostModel":
        """The same machine, `factor` times as slow."""
        return CostModel(
            base_s=self.base_s * factor,
            per_token_s=self.per_token_s * factor,
            per_prefill_context_s=self.per_prefill_context_s * factor,
            per_decode_context_s=self.per_decode_context_s * factor,
            weights_s=self.weights_s * factor,
            overlap=self.overlap,
            per_sample_s=self.per_sample_s * factor,
        )


class StepWork(msgspec.Struct, frozen=True):
    """What a step computes, as `CostModel` counts it."""

    num_tokens: int
    num_samples: int = 0
    prefill_pairs: float = 0.0
    decode_context: float = 0.0


class Utilisation(msgspec.Struct, frozen=True):
    """What the worker's machine was busy with. Totals are seconds since it started."""

    ridge_tokens: float = 0.0
    """Tokens in a step from which it is compute-bound; 0 where it is not known."""
    compute: float = 0.0
    """Part of the last seconds that arithmetic took, at the rate that calibration measured."""
    bandwidth: float = 0.0
    """Part of the last seconds that reading weights, keys and values took, at that rate."""
    compute_s_total: float = 0.0
    bandwidth_s_total: float = 0.0
    compute_bound_s_total: float = 0.0
    """Steps that arithmetic bound; the next two: reading, and neither of them."""
    bandwidth_bound_s_total: float = 0.0
    neither_bound_s_total: float = 0.0
    prediction_error: float = 0.0
    """Of the seconds of the last steps, relative, after correction."""
    is_prediction_trusted: bool = False
    """False: steps are budgeted in tokens, because the cost model is not there or not right."""


class IntegrityReport(msgspec.Struct, frozen=True):
    """What a worker found when it counted its KV blocks."""

    token: str
    problems: list[str]
    """Empty when every KV block is owned exactly as often as it is referenced."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """What a worker says of itself, at least twice a second."""

    worker: str
    model: str
    revision: str
    state: WorkerState
    sent_ms: int
    pid: int
    dtype: str
    context_length: int
    num_running: int = 0
    num_waiting: int = 0
    """Taken from the queue and not yet prefilled."""
    free_kv_tokens: int = 0
    total_kv_tokens: int = 0
    num_steps: int = 0
    output_tokens_total: int = 0
    prefill_tokens_total: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    """Tokens that were guessed and computed beside those that were due, since it started."""
    num_accepted_drafts: int = 0
    cost_model: CostModel | None = None
    """Calibrated when the worker started, corrected by its last steps."""
    utilisation: Utilisation = Utilisation()
    load_report: str = ""
    """How the model was loaded, or why it could not be."""
    memory_total_bytes: int = 0
    """Of the worker, for all its models: weights and KV caches."""
    memory_free_bytes: int = 0
    """What of it no loaded model has."""
    integrity: IntegrityReport | None = None

    @property
    def is_serving(self) -> bool:
        """Whether requests may wait for this worker: it runs the model, or will when asked."""
        return self.state != "failed"

    @property
    def is_loaded(self) -> bool:
        """Whether a request that is taken now can start now."""
        return self.state in ("ready", "draining")
