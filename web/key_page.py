"""A new key on its way through the browser: pad into a cookie, and both halves together again."""

from fastapi import Request
from fastapi.responses import Response

from web.one_time import KeyHandover
from web.services import WebServices
from web.sessions import read_cookie, set_cookie


async def leave_key(services: WebServices, session_token: str, plaintext: str) -> str:
    """Leave a new key for this session's next page; returns the pad for `give_pad`.

    Called inside the transaction that makes the key: where it raises HandoverFailed, no key is left
    behind that nobody has ever seen.
    """
    return await _handover(services).put(session_token, plaintext)


def give_pad(response: Response, services: WebServices, pad: str) -> None:
    """Let this browser, and no other, put the key together."""
    settings = services.web_settings
    set_cookie(response, "key", pad, settings, max_age_s=settings.key_handover_s)


async def take_key(request: Request, services: WebServices, session_token: str) -> str | None:
    """The key, the first time that it is asked for; None otherwise. HEAD does not use it up."""
    pad = read_cookie(request, "key", services.web_settings)
    if pad is None or request.method != "GET":
        return None
    return await _handover(services).take(session_token, pad)


def _handover(services: WebServices) -> KeyHandover:
    return KeyHandover(services.redis, ttl_s=services.web_settings.key_handover_s)
