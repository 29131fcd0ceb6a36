"""The application: routes, middleware, and the one place where errors become answers."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api import errors, openapi
from api.dependencies import Services
from api.metrics import CountResponses
from api.middleware import DirectSend, RequestIds, TrailingSlashes
from api.routes import (
    admin,
    budgets,
    chat_completions,
    completions,
    credits,  # noqa: A004 - the thing's own name
    embeddings,
    health,
    hosting,
    keys,
    messages,
    model_requests,
    models,
    passwords,
    quote,
    rerank,
    responses,
    signup,
    statements,
    usage,
    webhooks,
)
from api.routes.direct import DirectRoutes

ROUTERS = (
    health.router,
    models.router,
    chat_completions.router,
    completions.router,
    messages.router,
    messages.counting,
    responses.router,
    embeddings.router,
    rerank.router,
    quote.router,
    signup.router,
    passwords.router,
    credits.router,
    keys.router,
    usage.router,
    statements.router,
    budgets.router,
    model_requests.router,
    admin.router,
    hosting.router,
    webhooks.router,
)


def create_app(services: Services) -> FastAPI:
    """The API over `services`, which the caller has opened and will close."""
    application = FastAPI(
        title="nCompass",
        version="0.1.0",
        description="Any open-source model behind one API, without rate limits.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    application.state.services = services
    for router in ROUTERS:
        application.include_router(router)
    errors.install(application)
    openapi.install(application)
    # The last one added is the outermost: CORS, then ids, then counting, then the boundary.
    # A stream passes them by once its head has gone through.
    routes = [route for router in ROUTERS for route in router.routes]
    application.add_middleware(DirectRoutes, routes=routes)
    application.add_middleware(TrailingSlashes)
    application.add_middleware(errors.ErrorBoundary)
    application.add_middleware(CountResponses, metrics=services.metrics)
    application.add_middleware(RequestIds)
    application.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        max_age=86_400,
    )
    application.add_middleware(DirectSend)
    return application
