"""The way of an inference request through FastAPI: none of it but the routing.

The key, the body and the answer of these routes are ours from end to end. FastAPI describes them in
the OpenAPI document; its dependencies and its serialization would cost them 0.3 ms a request.
"""

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from api.authentication import inference_caller
from api.dependencies import services_of


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
