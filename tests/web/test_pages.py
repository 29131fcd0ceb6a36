"""Every page answers, says what it should, and tells the browser what it may do."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from billing.hold_operations import UsageFacts
from common.clock import to_datetime
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.messages import Heartbeat, WorkerState
from tests.web.site import KEY, MODEL, ORIGIN, PASSWORD, Site, Tab, make_services, make_site
from tests.web.test_isolation import organization_of
from web.failures import FAILURES

PUBLIC = [
    *("/", "/signup", "/login", "/forgot", "/forgot/sent", "/models", f"/models/{MODEL}"),
    *("/playground", "/docs/quickstart", "/status", "/reset?token=x", "/reset/done"),
]
PRIVATE = ["/welcome", "/usage", "/billing", "/keys"]


def heartbeat(state: WorkerState, **changed: int) -> Heartbeat:
    return Heartbeat(
        worker="worker-one",
        model=MODEL,
        revision="main",
        state=state,
        sent_ms=0,
        pid=1,
        dtype="bfloat16",
        context_length=8192,
        **changed,
    )


@pytest.mark.parametrize("path", [*PUBLIC, *PRIVATE, "/nowhere", "/models/no/such"])
@pytest.mark.parametrize("is_signed_in", [False, True])
async def test_every_page_is_private_to_the_browser_and_runs_no_foreign_code(
    tab: Tab, path: str, is_signed_in: bool
) -> None:
    if is_signed_in:
        await tab.sign_up("ada@example.com")
    response = await tab.client.get(path)
    if path in PRIVATE and not is_signed_in:
        assert response.status_code == 303
        assert response.headers["location"].startswith("/login?next=%2F")
    elif path in ("/nowhere", "/models/no/such"):
        assert response.status_code == 404
    elif is_signed_in and path in ("/signup", "/login"):
        assert response.status_code == 303
    else:
        assert response.status_code == 200
        assert response.text.count("<h1") == 1
        assert "style=" not in response.text
        assert "<script>" not in response.text
    headers = response.headers
    assert headers["cache-control"] == "no-store"
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert "strict-transport-security" not in headers
    assert (await tab.client.head(path)).status_code == response.status_code


async def test_the_home_page_shows_models_prices_and_a_command(tab: Tab) -> None:
    page = (await tab.open("/")).text
    for text in ("No rate limits", MODEL, "$0.02", "$0.005", "$0.08", "curl -N", "8K"):
        assert text in page


async def test_the_docs_begin_at_the_quickstart(tab: Tab) -> None:
    response = await tab.client.get("/docs")
    assert (response.status_code, response.headers["location"]) == (303, "/docs/quickstart")


async def test_a_hostile_model_name_or_next_cannot_break_out_of_the_page(
    site: Site, tab: Tab
) -> None:
    nasty = "x/<script>alert('1')</script>"
    await site.host(nasty)
    for path in ("/", "/models", "/models/x/%3Cscript%3Ealert('1')%3C/script%3E"):
        page = (await tab.open(path)).text
        assert "&lt;script&gt;alert(" in page
        assert "<script>alert" not in page
    page = (await tab.open("/login?next=/%22%3E%3Cscript%3E")).text
    assert "<script>" not in page


async def test_the_usage_page_shows_the_command_until_there_is_something_to_show(
    site: Site, tab: Tab
) -> None:
    await tab.sign_up("ada@example.com")
    page = (await tab.open("/usage")).text
    assert "No requests yet" in page
    assert "curl -N" in page
    assert '<svg class="chart"' not in page

    organization = await organization_of(site, "ada@example.com")
    await site.use(organization, tokens=(1_000, 234, 56))
    facts = UsageFacts(ttft_us=None, finish_reason=None)
    await site.use(organization, tokens=(10, 0, 0), outcome="aborted", facts=facts)
    page = (await tab.open("/usage")).text
    # 1000 · $0.02 + 234 · $0.005 + 56 · $0.08 per million, and 10 · $0.02
    assert '<span class="nano">$0.0000</span>25650' in page
    assert '<span class="nano">$0.000000</span>200' in page
    assert '$99.99<span class="nano">9974150' in page
    for text in ("1,234", "84 ms", "stop", "aborted", "<title id=", "<desc id=", "Data table"):
        assert text in page
    today = to_datetime(site.services.clock()).date()
    assert f'<td>{today}</td><td>{MODEL}</td><td class="n">2</td>' in page
    by_tokens = (await tab.open("/usage?by=tokens")).text
    assert "Tokens by day" in by_tokens
    assert (await tab.open("/usage?by=%22%3E")).status_code == 200


async def test_keys_are_made_shown_once_and_revoked_after_a_question(site: Site, tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/keys")
    response = await tab.submit("/keys", name="laptop & <co>")
    assert response.url.path == "/keys/created"
    key = KEY.search(response.text)
    assert key is not None
    assert (await tab.open("/keys/created")).url.path == "/keys"
    assert key[0] not in tab.page
    assert f"{key[0][:24]}_…{key[0][-4:]}" in tab.page
    assert "laptop &amp; &lt;co&gt;" in tab.page

    key_id = tab.page.split('href="/keys/')[1].split("/")[0]
    question = await tab.open(f"/keys/{key_id}/revoke")
    assert "Revoke “laptop" in question.text
    await tab.submit(f"/keys/{key_id}/revoke")
    assert "Revoked" in tab.page
    assert (await tab.open(f"/keys/{key_id}/revoke")).url.path == "/keys"


@pytest.mark.parametrize(("name", "problem"), [("  ", "Give the key a name"), ("x" * 101, "100")])
async def test_a_key_needs_a_sane_name(tab: Tab, name: str, problem: str) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/keys")
    response = await tab.send("/keys", name=name)
    assert response.status_code == 422
    assert problem in response.text


async def test_asking_for_a_model(tab: Tab) -> None:
    assert "Log in to ask" in (await tab.open("/models")).text
    await tab.sign_up("ada@example.com")
    await tab.open("/models")
    address = "https://huggingface.co/Qwen/Qwen3-0.6B"
    response = await tab.submit("/models", name=address, reason="small")
    assert "Thank you" in response.text
    assert '<span class="asked-name">Qwen/Qwen3-0.6B</span>' in response.text
    for name, reason in (("not a model", ""), ("../../etc", ""), ("a/b", "x" * 1_001)):
        refused = await tab.send("/models", name=name, reason=reason)
        assert refused.status_code == 422
        assert f'value="{name}"' in refused.text


async def test_more_wishes_than_fit_are_refused_in_words(tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    await tab.open("/models")
    statuses = {
        (await tab.send("/models", name=f"owner/model-{number}")).status_code
        for number in range(50)
    }
    assert statuses == {303}
    refused = await tab.send("/models", name="owner/one-more")
    assert refused.status_code == 422
    assert "You already asked for 50 models" in refused.text


async def test_status_shows_the_workers_as_they_describe_themselves(
    site: Site, redis_url: str
) -> None:
    import redis as synchronous

    settings = BrokerSettings(heartbeat_cache_s=0.0)
    broker = GatewayBroker(site.services.redis, "node", settings=settings)
    await broker.start()
    client = synchronous.Redis.from_url(redis_url)
    worker = WorkerBroker(client, "worker-one", MODEL, settings=settings)
    tab = make_site(replace(site.services, broker=broker)).tab()
    assert "offline" in (await tab.open("/status")).text
    worker.heartbeat(heartbeat("loading"))
    assert "starting" in (await tab.open("/")).text
    worker.heartbeat(
        heartbeat("ready", num_running=7, free_kv_tokens=1_000, total_kv_tokens=262_000)
    )
    page = (await tab.open("/status")).text
    for text in ("worker-one", "ready", ">7<", "261K / 262K"):
        assert text in page
    page = (await tab.open(f"/models/{MODEL}")).text
    assert "<dd>bfloat16</dd>" in page, "as it is computed, not as the checkpoint stores it"
    await broker.stop()
    client.close()
    await tab.client.aclose()


async def test_without_redis_pages_still_stand_and_forms_say_when_to_return(
    site: Site, tab: Tab
) -> None:
    await tab.sign_up("ada@example.com")
    nowhere = Redis.from_url("redis://127.0.0.1:1/0")
    services = make_services(site.services.sessions, nowhere)
    broker = GatewayBroker(nowhere, "node", settings=BrokerSettings(patience_s=0.1))
    lonely = make_site(replace(services, broker=broker)).tab()
    assert "cannot be read" in (await lonely.open("/status")).text
    assert (await lonely.open("/models")).status_code == 200
    await lonely.open("/signup")
    refused = await lonely.send("/signup", email="bob@example.com", password=PASSWORD)
    assert refused.status_code == 503

    lonely.client.cookies = tab.client.cookies
    await lonely.open("/keys")
    assert (await lonely.send("/keys", name="lost")).status_code == 503
    assert "lost" not in (await lonely.open("/keys")).text, "no key that nobody ever saw"
    await lonely.client.aclose()
    await nowhere.aclose()
    services.password_hasher.close()


async def test_our_own_fault_is_a_page_with_a_reference_and_no_detail(
    site: Site, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("web.catalogue.pricing.current_prices", broken)
    response = await tab.open("/models")
    assert response.status_code == 500
    assert "That was us" in response.text
    assert "err_" in response.text
    assert "secret detail" not in response.text
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["content-security-policy"]


async def test_the_wrong_method_is_a_page_too(tab: Tab) -> None:
    response = await tab.client.post("/usage", data={"a": "b"}, headers={"origin": ORIGIN})
    assert response.status_code == 405
    assert "<h1>" in response.text


def test_every_failure_that_has_a_page_has_words_and_a_way_on() -> None:
    for failure in FAILURES.values():
        assert 400 <= failure.status < 600
        assert failure.title
        assert failure.message
        assert failure.links


@pytest.mark.parametrize("name", ["app.css", "copy.js", "icon.svg"])
async def test_static_files_are_kept_for_a_year_under_their_version_only(
    tab: Tab, name: str
) -> None:
    page = (await tab.open("/")).text
    address = page.split(f'"/static/{name}?v=')[1].split('"')[0]
    exact = await tab.client.get(f"/static/{name}?v={address}")
    assert exact.status_code == 200
    assert "immutable" in exact.headers["cache-control"]
    bare = await tab.client.get(f"/static/{name}")
    assert bare.headers["cache-control"] == "public, no-cache"
    etag = {"if-none-match": bare.headers["etag"]}
    assert (await tab.client.get(f"/static/{name}", headers=etag)).status_code == 304
    assert (await tab.client.head(f"/static/{name}")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/static/../settings.py", "/static/%2e%2e%2fsettings.py", "/static/", "/static/nope"]
)
async def test_nothing_but_the_static_files_is_served(tab: Tab, path: str) -> None:
    assert (await tab.client.get(path)).status_code == 404


async def test_no_page_names_another_host(tab: Tab) -> None:
    await tab.sign_up("ada@example.com")
    for path in (*PUBLIC, *PRIVATE):
        page = (await tab.open(path)).text
        for attribute in ('src="http', 'href="http', 'action="http', "url(", "@import"):
            assert attribute not in page
    for name in ("app.css", "copy.js"):
        content = (await tab.client.get(f"/static/{name}")).text
        assert "http:" not in content
        assert "https:" not in content


async def test_a_model_that_pools_is_shown_with_its_own_request(site: Site, tab: Tab) -> None:
    await site.host("AAA/embedder", price=(10, 10, 0), kind="embed")
    await site.host("AAA/reranker", price=(10, 10, 0), kind="rerank")
    embedder = (await tab.open("/models/AAA/embedder")).text
    assert "/v1/embeddings" in embedder
    assert "client.embeddings.create(" in embedder
    assert "/chat/completions" not in embedder
    assert "<dd>fp32</dd>" in embedder
    reranker = (await tab.open("/models/AAA/reranker")).text
    assert "/v1/rerank" in reranker
    assert "&#34;documents&#34;" in reranker
    home = (await tab.open("/")).text
    assert "/v1/chat/completions" in home
    assert MODEL in home.split("curl -N")[1], "not the first of the list"


async def test_the_program_that_checks_a_bill_can_be_fetched(tab: Tab) -> None:
    response = await tab.client.get("/docs/recompute_bill.py")
    assert response.headers["content-type"].startswith("text/plain")
    compile(response.text, "recompute_bill.py", "exec")
