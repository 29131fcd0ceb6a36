"""Hosting models: what an operator sends and is told."""

from typing import Annotated

from pydantic import Field

from api.schemas.account import Dollars
from api.schemas.base import Line, RequestBody, ResponseBody


class AddModelBody(RequestBody):
    """`POST /v1/admin/models`."""

    source: Annotated[str, Field(min_length=1, max_length=4_096, examples=["owner/name"])]
    """A directory or `.gguf` file of the machine that hosts it, or a hub's `owner/name`."""
    input_price: Dollars
    """Dollars per million tokens, like the next two."""
    cached_price: Dollars
    output_price: Dollars
    name: Line | None = None
    """The public name; that of the source by default."""
    description: str = Field(default="", max_length=1_000)
    licence: str = Field(default="", max_length=100)
    """Where the checkpoint names none."""
    base: Line | None = None
    """The hosted model that it is a LoRA adapter of."""
    allow_pickles: bool = False
    """Read weights from `*.bin` where it has no others: as tensors only, once."""


class AdditionObject(ResponseBody):
    """A model on its way into the catalogue."""

    id: str
    object: str = "model.addition"
    source: str
    model: str
    state: str
    """waiting, fetching, checking, loading, testing; at the end live or failed."""
    failed_step: str | None
    detail: str
    """What is being done, what was found, or why it failed."""
    created: int
    updated: int


class AdditionList(ResponseBody):
    """`GET /v1/admin/models`: the newest first."""

    object: str = "list"
    data: list[AdditionObject]
