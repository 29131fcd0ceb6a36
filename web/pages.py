"""Templates into answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from web import charts, csrf, formatting
from web.dependencies import Visitor
from web.sessions import delete_cookie, read_cookie, set_cookie
from web.settings import WebSettings
from web.static_files import StaticFiles

TEMPLATES = Path(__file__).parent / "templates"

NOBODY = Visitor(found=None, session_token=None, csrf_token=None)
"""For pages about a failure, made where it is not known who asked."""


class Pages:
    """Renders templates for one application."""

    def __init__(self, settings: WebSettings, static: StaticFiles) -> None:
        self._settings = settings
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "cut_dollars": formatting.dollars_and_rest,
            "small_dollars": formatting.leading_zeros_and_rest,
            "exact_dollars": formatting.exact_dollars,
            "trimmed_dollars": formatting.trimmed_dollars,
            "count": formatting.count,
            "compact": formatting.compact_count,
            "context": formatting.tokens_of_context,
            "duration": formatting.duration,
            "timestamp": formatting.timestamp,
            "iso": formatting.iso_timestamp,
            "day": formatting.day,
            "marked": formatting.marked,
        }
        self._environment.globals |= {
            "static": static.url,
            "csrf_field": csrf.TOKEN_FIELD,
            "zones": sorted(available_timezones()),
            "chart_height": charts.CHART_HEIGHT,
            "chart_baseline": charts.PLOT_TOP + charts.PLOT_HEIGHT,
        }

    def render(
        self,
        request: Request,
        template: str,
        visitor: Visitor,
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        **context: Any,
    ) -> HTMLResponse:
        """A page for `visitor`. Never stored by browser or proxy (see `web/security.py`)."""
        html = self._environment.get_template(template).render(
            visitor=visitor, path=request.url.path, csrf_token=visitor.csrf_token, **context
        )
        return HTMLResponse(html, status_code=status_code, headers=dict(headers or {}))

    def render_visitor_form(
        self, request: Request, template: str, visitor: Visitor, **context: Any
    ) -> HTMLResponse:
        """A page whose form is for people who are not signed in: gives the browser a visit cookie
        if it has none, and forgets a session cookie that is no longer valid."""
        visit = read_cookie(request, "visit", self._settings)
        is_new = visit is None
        visit = visit or csrf.new_visit()
        token = csrf.visit_token(visit, self._settings)
        response = self.render(
            request, template, Visitor(None, visitor.session_token, token), **context
        )
        if is_new:
            set_cookie(response, "visit", visit, self._settings)
        if visitor.session_token is not None:
            delete_cookie(response, "session", self._settings)
        return response


def get_pages(request: Request) -> Pages:
    """The application's templates."""
    pages: Pages = request.app.state.pages
    return pages
