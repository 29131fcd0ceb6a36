"""`POST /v1/embeddings`: texts, or their ids, to vectors."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from api.schemas.base import RequestBody
from api.schemas.completions import NUM_IDS_MAX, TokenId, prompt_branch

NUM_INPUTS_MAX = 2_048
"""OpenAI's limit."""

ModelName = Annotated[str, Field(min_length=1, max_length=300)]
Text = Annotated[str, Field(min_length=1)]
Input = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=NUM_INPUTS_MAX), Tag("<texts>")]
    | Annotated[list[TokenId], Field(min_length=1, max_length=NUM_IDS_MAX), Tag("<ids>")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]],
        Field(min_length=1, max_length=NUM_INPUTS_MAX),
        Tag("<lists of ids>"),
    ],
    Discriminator(prompt_branch),
]
"""A string, a list of strings, a list of token ids, or a list of such lists."""


class EmbeddingsBody(RequestBody):
    """The body of `POST /v1/embeddings`."""

    model: ModelName = Field(examples=["sentence-transformers/all-MiniLM-L6-v2"])
    input: Input = Field(examples=["Prefills go first.", ["One text.", "Another one."]])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    """Of the vectors: the first ones, brought back to length 1 where the model's have it."""
    input_type: str | None = Field(default=None, max_length=100, examples=["query"])
    """What the texts are for: `query`, `document` or another prompt of the model."""
    truncate: bool = False
    """Cut a text that is too long at its end, where it would be refused otherwise."""

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input as text or as token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[token_id for token_id in self.input if isinstance(token_id, int)]]
        return [each for each in self.input if not isinstance(each, int)]
