"""Forms as browsers send them, and forms as pages show them again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from starlette.requests import Request

from web.errors import FormTooLarge, FormUnreadable

FORM_MEDIA_TYPE = "application/x-www-form-urlencoded"
MAX_FIELDS = 32


class PostedForm:
    """The fields of one form. Its `repr` shows their names only: one of them is a password."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def __repr__(self) -> str:
        return f"PostedForm({', '.join(self._fields)})"

    def text(self, name: str) -> str:
        """A field without the white space around it; empty when it was not sent."""
        return self._fields.get(name, "").strip()

    def exact(self, name: str) -> str:
        """A field as it was typed: a password may start or end with a space."""
        return self._fields.get(name, "")


NOTHING_POSTED = PostedForm({})


@dataclass(frozen=True, slots=True)
class FormState:
    """A form to show: what was typed, and what is wrong with it. Never holds a password."""

    values: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """A sentence by field; the empty name is the form as a whole."""

    def value(self, name: str) -> str:
        """What stands in the field."""
        return self.values.get(name, "")

    def error(self, name: str) -> str | None:
        """What is wrong with the field."""
        return self.errors.get(name)


async def read_posted_form(request: Request, *, max_bytes: int) -> PostedForm:
    """Read the body as a form.

    Raises FormTooLarge as soon as more than `max_bytes` have come, FormUnreadable for another
    media type, for bytes that are not UTF-8 and for control characters (PostgreSQL stores no NUL).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != FORM_MEDIA_TYPE:
        raise FormUnreadable("Send the form as application/x-www-form-urlencoded.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise FormTooLarge(f"A form may have at most {max_bytes:,} bytes.")
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise FormUnreadable("The form could not be read.") from error
    if any(not _is_printable(value) for pair in pairs for value in pair):
        raise FormUnreadable("The form holds control characters.")
    return PostedForm(dict(pairs))


def _is_printable(value: str) -> bool:
    return not any(ord(character) < 32 and character not in "\r\n\t" for character in value)
