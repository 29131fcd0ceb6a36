"""`POST /v1/completions`: the older form, a prompt without roles."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from api.errors import InvalidRequest
from api.prompt_scoring import ScoringWish
from api.schemas.base import INT32_MAX, INT64_MAX
from api.schemas.sampling import GenerationBody

LEGACY_MAX_TOKENS = 16
"""OpenAI's default for this route, which old clients count on."""
TOP_LOGPROBS_MAX = 5
NUM_PROMPTS_MAX = 256
NUM_IDS_MAX = 10_000_000
"""Above any context; the byte limit of the body is reached first."""

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


def prompt_branch(prompt: Any) -> str:
    """Which of the four forms of a prompt this is, told by its first element."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return "<texts>"
    return "<lists of ids>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=NUM_PROMPTS_MAX), Tag("<texts>")]
    | Annotated[list[TokenId], Field(min_length=1, max_length=NUM_IDS_MAX), Tag("<ids>")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]],
        Field(min_length=1, max_length=NUM_PROMPTS_MAX),
        Tag("<lists of ids>"),
    ],
    Discriminator(prompt_branch),
]
"""A string, a list of strings, a list of token ids, or a list of such lists."""


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(examples=["A prefill is"])
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = LEGACY_MAX_TOKENS
    """0 only with `echo` or `prompt_logprobs`: the prompt alone is told of."""
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: bool = False
    suffix: str = ""
    best_of: int | None = Field(default=None, ge=1, le=20)

    @model_validator(mode="after")
    def _is_supported(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest("'best_of' must not be less than 'n'.", param="best_of")
        if self.is_contest and self.stream:
            raise InvalidRequest("'best_of' cannot be streamed.", param="best_of")
        if self.echo and self.suffix:
            raise InvalidRequest("'echo' and 'suffix' exclude each other.", param="echo")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "'max_tokens' must be at least 1, unless 'echo' or 'prompt_logprobs' asks about "
                "the prompt.",
                param="max_tokens",
            )
        return self

    @property
    def is_contest(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def scoring(self) -> ScoringWish:
        """What is to be told of the prompt."""
        return ScoringWish(self.prompt_logprobs, self.logprobs if self.echo else None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]
