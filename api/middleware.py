"""Raw ASGI middleware: request ids, trailing slashes, and the way past all middleware."""

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.ids import new_id

SERVER_SEND = "ncompass.send"
"""The server's own `send` in a connection's scope."""
DIRECT_BODY = "ncompass.body"
"""An `api.streaming.DirectBody` in it, where the server is ours."""


class DirectSend:
    """Stands outermost and lends a stream the server's own `send`.

    Middleware has something to say of an answer's head and nothing of its body; four wrappers
    around each frame cost a sixth of it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        scope[SERVER_SEND] = send
        try:
            await self.app(scope, receive, send)
        finally:
            # Both lead back to the scope, and only a collection of garbage would free it.
            del scope[SERVER_SEND]
            scope.pop(DIRECT_BODY, None)


class RequestIds:
    """Gives every answer an `x-request-id` and binds it to every log line of the request.

    The id is always ours: one sent by the caller could forge log lines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["request-id"] = request_id  # the name that Anthropic's clients read
            await send(message)

        with structlog.contextvars.bound_contextvars(http_request_id=request_id):
            await self.app(scope, receive, send_with_id)


class TrailingSlashes:
    """Serves `/v1/models/` as `/v1/models`.

    A redirect instead would lose the key: behind TLS it points to `http`, and clients drop the
    `authorization` header when the scheme changes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self.app(scope, receive, send)
