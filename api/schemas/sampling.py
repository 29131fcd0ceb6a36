"""The parameters that every generation route shares, and what they mean to the engine."""

import random
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from api.errors import InvalidRequest, UnsupportedParameter
from api.schemas.base import INT32_MAX, INT64_MAX, INT64_MIN, RequestBody
from engine.messages import Sampling

NUM_CHOICES_MAX = 16
NUM_STOPS_MAX = 16
STOP_LENGTH_MAX = 1_000
NUM_BIASES_MAX = 4_096
PROMPT_LOGPROBS_MAX = 20
GREEDY_BELOW = 1e-4
"""A temperature this low would overflow logits / temperature and samples the maximum anyway."""

Tokens = Annotated[int, Field(ge=1, le=INT64_MAX)]
"""A count of output tokens. More than the context holds is clamped to what is left of it."""
Stop = Annotated[str, Field(max_length=STOP_LENGTH_MAX)]


FORMS_ELSEWHERE = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""How vLLM is told of a required form. Other unknown fields are ignored; whoever sends one of these
relies on the form of the answer."""


class StreamOptions(RequestBody):
    """`stream_options`: whether the last chunk tells the usage."""

    include_usage: bool = False


class SamplingBody(RequestBody):
    """What every generation route has in common; those of other protocols are extensions."""

    model: str = Field(
        min_length=1, max_length=300, examples=["HuggingFaceTB/SmolLM2-135M-Instruct"]
    )
    stream: bool = False
    """Send tokens as server-sent events, as they are made."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy: the same prompt gives the same text."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Sample from the most likely tokens that make up this much probability."""
    top_k: int = Field(default=0, ge=-1, le=INT32_MAX)
    """Sample from so many tokens; 0 or -1: from all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out what is less likely than this part of the most likely token."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from a token's logit for each time that it was generated."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from a token's logit once it was generated."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    """Divides the logits of tokens of the prompt and the answer; 1 is off."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=NUM_BIASES_MAX
    )
    """Token ids, as strings, to what is added to their logits: 100 forces, -100 forbids."""
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    """The same seed and parameters give the same text, whatever else is running."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(
        default=[], max_length=NUM_STOPS_MAX
    )
    """Ids that end the answer beside the model's own."""
    min_tokens: int = Field(default=0, ge=0, le=INT32_MAX)
    """The answer does not end before so many tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end, to the limit."""

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _bias_keys_are_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError("keys must be token ids written in digits")
        return bias

    def sampling(
        self,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
    ) -> Sampling:
        """The same for the engine. Raises InvalidRequest for ids outside of the vocabulary."""
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        _check_vocabulary(bias, vocab_size, "logit_bias")
        _check_vocabulary(self.stop_token_ids, vocab_size, "stop_token_ids")
        eos = () if self.ignore_eos else eos_token_ids
        return Sampling(
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_p=self.top_p or 1.0,
            # top_p = 0 keeps the most likely token alone, which is what top_k = 1 says exactly.
            top_k=1 if self.top_p == 0 else max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=bias or None,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
            stop_token_ids=tuple(sorted({*eos, *self.stop_token_ids})),
            min_tokens=self.min_tokens,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )


class GenerationBody(SamplingBody):
    """What OpenAI's `/v1/chat/completions` and `/v1/completions` have in common."""

    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=NUM_CHOICES_MAX)
    max_tokens: Tokens | None = None
    stop: list[Stop] = Field(default=[], max_length=NUM_STOPS_MAX)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=PROMPT_LOGPROBS_MAX)
    """Tell how likely each token of the prompt was, and so many of the likeliest beside it, as vLLM
    does; not streamed."""

    @model_validator(mode="before")
    @classmethod
    def _a_form_is_never_ignored(cls, content: Any) -> Any:
        for name in FORMS_ELSEWHERE:
            if isinstance(content, dict) and content.get(name) is not None:
                raise UnsupportedParameter(
                    f"'{name}' is not known here: ask /v1/chat/completions for a form by "
                    "'response_format' (json_schema, regex or grammar).",
                    param=name,
                )
        return content

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "'stream_options' is only allowed with 'stream': true.", param="stream_options"
            )
        return self

    @model_validator(mode="after")
    def _scores_are_not_streamed(self) -> "GenerationBody":
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


def stop_strings(stops: Iterable[str]) -> tuple[str, ...]:
    """The stops that can match: an empty one never does."""
    return tuple(stop for stop in stops if stop)


def _check_vocabulary(token_ids: Any, vocab_size: int, param: str) -> None:
    if any(token_id >= vocab_size for token_id in token_ids):
        raise InvalidRequest(
            f"'{param}' names a token outside of this model's vocabulary of {vocab_size}.",
            param=param,
        )


def refuse(param: str, is_used: bool) -> None:
    """Raise UnsupportedParameter when a parameter that is not built yet is really used."""
    if is_used:
        raise UnsupportedParameter(f"'{param}' is not supported yet.", param=param)
