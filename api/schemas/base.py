"""How every request body is validated: strictly, ignoring what it does not know.

An explicit null is the same as an absent field; unknown fields are ignored, so that clients may
send what newer or other servers understand.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class RequestBody(BaseModel):
    """Base of everything that is read from a body."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if value is not None}
        return content


class ResponseBody(BaseModel):
    """Base of everything that is written as a whole (frames are not: see `api.streaming`)."""

    model_config = ConfigDict(frozen=True)


def _is_printable(text: str) -> str:
    """A line for people: no control characters, which a log or a page would have to escape."""
    if not text.isprintable():
        raise ValueError("control characters are not allowed")
    if not text.strip():
        raise ValueError("it must not be empty")
    return text.strip()


Line = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_is_printable)]
"""A name or a reason: one printable line."""
