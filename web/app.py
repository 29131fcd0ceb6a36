"""The web application: pages under `/`, mounted beside the API by `infra`."""

from pathlib import Path

from fastapi import Depends, FastAPI
from starlette.routing import Route

from web.dependencies import get_posted_form
from web.failures import add_failure_pages
from web.pages import Pages
from web.routes import (
    billing,
    docs,
    home,
    keys,
    login,
    models,
    playground,
    reset,
    signup,
    status,
    usage,
    verify,
)
from web.security import SecurityHeaders
from web.services import WebServices
from web.static_files import StaticFiles

STATIC = Path(__file__).parent / "static"


def create_app(services: WebServices) -> FastAPI:
    """An ASGI application on `services`, which stay the caller's to close.

    Every route depends on `get_posted_form`: no form is read that is not ours.
    """
    settings = services.web_settings
    app = FastAPI(
        title="nCompass",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(get_posted_form)],
    )
    static = StaticFiles(STATIC)
    app.state.services = services
    app.state.pages = Pages(settings, static)
    for group in (
        home,
        signup,
        verify,
        login,
        reset,
        usage,
        billing,
        keys,
        models,
        playground,
        docs,
        status,
    ):
        app.include_router(group.router)
    app.router.routes.append(Route("/static/{name}", static.serve, methods=["GET"]))
    add_failure_pages(app, settings)
    app.add_middleware(SecurityHeaders, settings=settings)
    return app
