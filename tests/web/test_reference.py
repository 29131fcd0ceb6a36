"""The page of the API's own description."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx

from api.app import create_app
from api.dependencies import Services
from api.metrics import Metrics
from api.running import Running
from tests.web.site import Site, make_site
from web import formatting, reference


def api_document() -> dict[str, Any]:
    services = cast(Services, SimpleNamespace(metrics=Metrics(Running())))
    return create_app(services).openapi()


def test_a_field_says_its_type_its_bounds_and_what_it_is_for() -> None:
    (inference, *_) = reference.groups(api_document())
    (chat, *_) = inference.operations
    fields = {field.name: field for field in chat.body}
    assert chat.path == "/v1/chat/completions"
    assert fields["model"].is_required
    assert fields["temperature"].bounds == "≥ 0, ≤ 2, default 1.0"
    assert fields["stop"].kind == "list of string"
    assert '"low"' in fields["reasoning_effort"].kind
    assert "enable_thinking" in fields["chat_template_kwargs"].text
    assert chat.stream.endswith("data: [DONE]")


async def test_the_page_shows_every_operation_and_none_for_operators(site: Site) -> None:
    described = make_site(replace(site.services, api_document=api_document()))
    transport = httpx.ASGITransport(described.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
        page = await client.get("/docs/api")
    assert page.status_code == 200
    for path, methods in api_document()["paths"].items():
        for operation in methods.values():
            is_shown = f"<code>{path}</code>" in page.text
            assert is_shown != (operation["tags"][0] in reference.HIDDEN_TAGS), path
    assert "No key is needed." in page.text


def test_ticks_become_code_and_markup_stays_text() -> None:
    assert formatting.marked("send `a<b` & <i>") == "send <code>a&lt;b</code> &amp; &lt;i&gt;"
