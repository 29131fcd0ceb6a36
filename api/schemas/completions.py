"""`POST /v1/completions`: the older form, a prompt without roles."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from api.errors import InvalidRequest, UnsupportedParameter
from api.schemas.base import INT32_MAX
from api.schemas.sampling import GenerationBody, Tokens, refuse

LEGACY_MAX_TOKENS = 16
"""OpenAI's default for this route, which old clients count on."""
TOP_LOGPROBS_MAX = 5
NUM_PROMPTS_MAX = 10_000_000
"""Above any context; the byte limit of the body is reached first."""

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


def _prompt_branch(prompt: Any) -> str:
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
    | Annotated[list[TokenId], Field(min_length=1, max_length=NUM_PROMPTS_MAX), Tag("<ids>")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]],
        Field(min_length=1, max_length=NUM_PROMPTS_MAX),
        Tag("<lists of ids>"),
    ],
    Discriminator(_prompt_branch),
]
"""A string, a list of one string, a list of token ids, or a list of one such list."""


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt = Field(examples=["A prefill is"])
    max_tokens: Tokens | None = LEGACY_MAX_TOKENS
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: bool = False
    suffix: str = ""
    best_of: int | None = Field(default=None, ge=1, le=20)

    @model_validator(mode="after")
    def _is_supported(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest("'best_of' must not be less than 'n'.", param="best_of")
        refuse("best_of", self.best_of is not None and self.best_of > self.n)
        refuse("echo", self.echo)
        refuse("suffix", bool(self.suffix))
        is_batch = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        if is_batch and len(self.prompt) > 1:
            raise UnsupportedParameter(
                "Several prompts in one request are not supported yet; send one request each.",
                param="prompt",
            )
        return self

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        if isinstance(first, int):
            return [token_id for token_id in self.prompt if isinstance(token_id, int)]
        return first
