"""The way of an inference request through FastAPI: none at all.

The key, the body and the answer of these routes are ours from end to end, and their addresses are
fixed. FastAPI describes them in the OpenAPI document; its routing, its dependencies and its
serialization would cost them 0.5 ms a request, and a stream a dozen frames of the stack.
"""

from collections.abc import Sequence

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from api.authentication import inference_caller
from api.dependencies import services_of
from api.errors import answer
from common.errors import PlatformError


class DirectRoute(APIRoute):
    """Calls `endpoint(request, services, principal)` and runs the response that it returns.

    What it raises goes to the handlers of `api.errors`, as from any other route.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer that the method is wrong."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        principal = await inference_caller(request)
        response = await self.endpoint(request, await services_of(request), principal)
        await response(scope, receive, send)


class DirectRoutes:
    """ASGI middleware that finds a `DirectRoute` by its address; FastAPI routes everything else."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, DirectRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_http = scope["type"] == "http"
        route = self._routes.get((scope["method"], scope["path"])) if is_http else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        try:
            await route.handle(scope, receive, send)
        except (PlatformError, ValidationError) as error:
            await answer(error).response(scope)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=400)(scope, receive, send)  # nobody reads it
