"""The fake Stripe over HTTP: its API with true idempotency, and the page that a browser pays on."""

import copy
import json
import threading
from collections import deque
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from tests.billing.fake_stripe.state import API_VERSION, Object, Refused, State, invalid
from tests.services import free_port

API_KEY = "sk_test_fake"
TIMEOUT_S = 0.5
"""What tests give a client as its timeout; the fake sleeps longer when it "times out"."""


class FakeStripe:
    """A running server. `faults` are what the next calls suffer: `500` (remembered under the key,
    as Stripe does), `lost` (done, and the answer never comes), `down` (not done)."""

    def __init__(self) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.faults: deque[str] = deque()
        self.state = State(base_url=self.base_url)
        self._answers: dict[str, tuple[str, int, Object]] = {}
        config = uvicorn.Config(self._app(), port=self.port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            assert self._thread.is_alive()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def reset(self) -> None:
        self.state = State(base_url=self.base_url)
        self._answers.clear()
        self.faults.clear()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/favicon.ico", lambda: Response(status_code=204))
        app.add_api_route("/c/pay/{session_id}", self._show_page, methods=["GET"])
        app.add_api_route("/c/pay/{session_id}", self._submit_page, methods=["POST"])
        app.add_api_route("/v1/{path:path}", self._call, methods=["GET", "POST"])
        return app

    async def _call(self, request: Request, path: str) -> Response:
        """One call of the API: who asks, what was planned for it, and whether it was made before."""
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return _answer(401, {"error": {"type": "invalid_request_error", "message": "key"}})
        if request.headers.get("stripe-version") != API_VERSION:
            return _answer(400, {"error": {"type": "invalid_request_error", "message": "version"}})
        body = (await request.body()).decode()
        self.state.calls.append(f"{request.method} /v1/{path}")
        fault = self.faults.popleft() if self.faults else ""
        if fault == "down":
            return _lost()
        key = request.headers.get("idempotency-key")
        fingerprint = f"{request.method} {path} {sorted(parse_qsl(body))}"
        if request.method == "POST" and key in self._answers:
            first, status, content = self._answers[key]
            if first != fingerprint:
                return _answer(400, {"error": {"type": "idempotency_error", "message": "differs"}})
            return _answer(status, content)
        if fault == "500":
            status, content = 500, {"error": {"type": "api_error", "message": "sorry"}}
        else:
            status, content = self._do(request.method, path, _nested(body, request.url.query))
        if request.method == "POST" and key:
            self._answers[key] = (fingerprint, status, copy.deepcopy(content))
        return _lost() if fault == "lost" else _answer(status, content)

    def _do(self, method: str, path: str, params: Object) -> tuple[int, Object]:
        try:
            return 200, copy.deepcopy(self._route(method, path.split("/"), params))
        except Refused as refused:
            return refused.status, copy.deepcopy(refused.body)

    def _route(self, method: str, path: list[str], params: Object) -> Object:
        match method, path:
            case "POST", ["customers"]:
                return self.state.new("cus", "customer", **params)
            case "POST", ["checkout", "sessions"]:
                return self._create_session(params)
            case "GET", ["checkout", "sessions", session_id]:
                return self.state.find(session_id, "checkout.session")
            case "POST", ["payment_intents"]:
                return self._expanded(self._charge(params))
            case "GET", ["payment_intents", "search"]:
                wanted = params["query"].split("'")[3]
                found = self.state.all("payment_intent")
                return _list([i for i in found if i["metadata"].get("topup_id") == wanted])
            case "GET", ["payment_intents", intent_id]:
                return self._expanded(self.state.find(intent_id, "payment_intent"))
            case "POST", ["payment_intents", intent_id, "cancel"]:
                return self._cancel(intent_id)
            case "GET", ["payment_methods", method_id]:
                return self.state.find(method_id, "payment_method")
            case "POST", ["refunds"]:
                metadata = params.get("metadata")
                return self.state.refund(params["payment_intent"], int(params["amount"]), metadata)
            case "GET", ["refunds"]:
                refunds = self.state.all("refund")
                return _list([r for r in refunds if r["charge"] == params["charge"]])
            case "GET", ["refunds", refund_id]:
                return self.state.find(refund_id, "refund")
            case "GET", ["disputes", dispute_id]:
                return self.state.find(dispute_id, "dispute")
            case "GET", ["events"]:
                types = params["types"].values()
                assert len(types) <= 20, "Stripe takes 20 types at most"
                since = int(params["created"]["gte"])
                found = [e for e in self.state.events if e["created"] >= since]
                return _page([e for e in found if e["type"] in types], params)
            case "GET", ["balance_transactions"]:
                return _page(self.state.moves, params)
        raise Refused(404, "invalid_request_error", "url_invalid")

    def _create_session(self, params: Object) -> Object:
        (item,) = params["line_items"].values()
        amount = int(item["price_data"]["unit_amount"])
        intent = params["payment_intent_data"]
        session = self.state.new(
            "cs",
            "checkout.session",
            status="open",
            payment_status="unpaid",
            payment_intent=None,
            amount_subtotal=amount,
            currency=item["price_data"]["currency"],
            client_reference_id=params["client_reference_id"],
            success_url=params["success_url"],
            cancel_url=params["cancel_url"],
            customer=self.state.find(params["customer"], "customer")["id"],
        )
        session["url"] = f"{self.base_url}/c/pay/{session['id']}"
        session["intent_params"] = {
            "metadata": intent["metadata"],
            "setup_future_usage": intent.get("setup_future_usage"),
        }
        return session

    def _charge(self, params: Object) -> Object:
        assert params["off_session"] == params["confirm"] == "true"
        intent = self.state.create_intent(
            amount=int(params["amount"]),
            currency=params["currency"],
            customer=params["customer"],
            payment_method=params["payment_method"],
            metadata=params["metadata"],
        )
        card = self.state.cards[params["payment_method"]]
        self.state.pay(intent, card, is_owner_there=False)
        return intent

    def _cancel(self, intent_id: str) -> Object:
        intent = self.state.find(intent_id, "payment_intent")
        if intent["status"] == "succeeded":
            raise invalid("payment_intent_unexpected_state")
        intent["status"] = "canceled"
        self.state.tell("payment_intent.canceled", intent)
        return intent

    def _expanded(self, intent: Object) -> Object:
        charge = intent["latest_charge"]
        return intent if charge is None else intent | {"latest_charge": self.state.objects[charge]}

    async def _show_page(self, session_id: str) -> Response:
        session = self.state.find(session_id, "checkout.session")
        return HTMLResponse(PAGE.format(amount=session["amount_subtotal"], problem=""))

    async def _submit_page(self, session_id: str, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode()))
        problem = self.pay_session(session_id, form["card"].replace(" ", ""))
        session = self.state.find(session_id, "checkout.session")
        if problem:
            return HTMLResponse(PAGE.format(amount=session["amount_subtotal"], problem=problem))
        return RedirectResponse(session["success_url"], status_code=303)

    def pay_session(self, session_id: str, card: str) -> str | None:
        """What the page does when its button is pressed; returns what is wrong."""
        session = self.state.find(session_id, "checkout.session")
        assert session["status"] == "open"
        intent = (
            self.state.find(session["payment_intent"], "payment_intent")
            if session["payment_intent"]
            else self.state.create_intent(
                amount=session["amount_subtotal"],
                currency=session["currency"],
                customer=session["customer"],
                **session["intent_params"],
            )
        )
        intent["payment_method"] = None
        session["payment_intent"] = intent["id"]
        try:
            self.state.pay(intent, card, is_owner_there=True)
        except Refused as refused:
            code: str = refused.body["error"]["code"]
            return code
        session["status"] = "complete"
        is_paid = intent["status"] == "succeeded"
        session["payment_status"] = "paid" if is_paid else "unpaid"
        self.state.tell("checkout.session.completed", session)
        return None

    def expire_session(self, session_id: str) -> None:
        session = self.state.find(session_id, "checkout.session")
        session |= {"status": "expired", "url": None}
        self.state.tell("checkout.session.expired", session)


PAGE = """<!doctype html><html lang="en"><title>Pay</title><h1>Pay {amount} cents</h1>
<p role="alert">{problem}</p><form method="post"><label>Card number <input name="card"></label>
<button>Pay</button></form></html>"""


def _answer(status: int, content: Object) -> Response:
    return JSONResponse(content, status)


def _lost() -> Response:
    """The connection breaks off before the answer is complete."""
    return Response(b"", 200, headers={"content-length": "10"})


def _list(objects: list[Object]) -> Object:
    return {"object": "list", "data": objects, "has_more": False, "url": "/v1/list"}


def _page(objects: list[Object], params: Object) -> Object:
    """Newest first, `limit` at a time, after `starting_after`."""
    newest = objects[::-1]
    ids = [found["id"] for found in newest]
    start = ids.index(params["starting_after"]) + 1 if "starting_after" in params else 0
    end = start + min(int(params.get("limit", 10)), 3)  # so that every test turns pages
    kind = newest[0]["object"] + "s" if newest else "none"
    return {
        "object": "list",
        "data": newest[start:end],
        "has_more": end < len(newest),
        "url": f"/v1/{kind}",
    }


def _nested(*encoded: str) -> Object:
    """`a[b][0]=c` as `{"a": {"b": {"0": "c"}}}`."""
    nested: dict[str, Any] = {}
    for name, value in [pair for text in encoded for pair in parse_qsl(text)]:
        *path, last = name.replace("]", "").split("[")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def body_of(event: Object) -> bytes:
    return json.dumps(event).encode()
