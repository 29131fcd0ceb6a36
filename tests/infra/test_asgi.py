"""Which of the two applications serves a request."""

from typing import Any

import pytest

from accounts import key_format
from common.settings import CommonSettings
from infra.asgi import Platform
from infra.settings import InfraSettings

KEY = key_format.generate().encode()


@pytest.mark.parametrize(
    ("path", "headers", "served_by"),
    [
        ("/v1", [], "api"),
        ("/v1/models", [], "api"),
        ("/health/", [], "api"),
        ("/", [], "web"),
        ("/v1x", [], "web"),
        ("/chat/completions", [(b"authorization", b"Bearer " + KEY)], "api"),
        ("/messages", [(b"x-api-key", KEY)], "api"),
        ("/models", [(b"authorization", b"Basic b3BlcmF0b3I6")], "web"),
        ("/models", [(b"authorization", b"Bearer token-of-a-proxy")], "web"),
        ("/models", [(b"cookie", b"session=" + KEY)], "web"),
    ],
)
async def test_a_key_leads_to_the_api_wherever_it_is_sent(
    path: str, headers: list[tuple[bytes, bytes]], served_by: str
) -> None:
    asked: list[str] = []

    def application(name: str) -> Any:
        async def serve(scope: Any, receive: Any, send: Any) -> None:
            asked.append(name)

        return serve

    platform = Platform(CommonSettings(), InfraSettings())
    platform._api, platform._web = application("api"), application("web")
    await platform({"type": "http", "path": path, "headers": headers}, None, None)  # type: ignore[arg-type]
    assert asked == [served_by]
