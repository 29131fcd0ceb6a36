"""What this process counts, for Prometheus. Served by `infra` on a loopback port, never in public.

Labels are models, outcomes and routes: never an organization or a key.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.running import Running
from api.summary import Timings
from engine.broker.gateway import GatewayBroker
from engine.errors import ModelUnavailable
from engine.messages import Heartbeat

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
WORKER_LABELS = ["model", "worker"]


class Metrics:
    """The registry of one API process, and the gauges of the workers as their heartbeats say."""

    def __init__(self, running: Running) -> None:
        registry = self.registry = CollectorRegistry()
        self.responses = Counter(
            "ncompass_http_responses",
            "Answers by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.generations = Counter(
            "ncompass_generations", "Closed requests.", ["model", "outcome"], registry=registry
        )
        self.prompt_tokens = Counter(
            "ncompass_prompt_tokens",
            "Prompt tokens, cached ones included.",
            ["model"],
            registry=registry,
        )
        self.output_tokens = Counter(
            "ncompass_output_tokens", "Tokens accepted into answers.", ["model"], registry=registry
        )
        self.extensions = Counter(
            "ncompass_hold_extensions",
            "Slices asked for by running requests: granted, granted partly, or refused.",
            ["outcome"],
            registry=registry,
        )
        self.paused = Gauge(
            "ncompass_generations_paused", "Requests that wait for credit.", registry=registry
        )
        self.ttft = Histogram(
            "ncompass_time_to_first_token_seconds",
            "From arrival at this process to the first token here.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queued = Histogram(
            "ncompass_queued_seconds",
            "From arrival until a worker began the prefill.",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        running_gauge = Gauge(
            "ncompass_generations_running", "Requests that are not closed yet.", registry=registry
        )
        running_gauge.set_function(lambda: len(running))
        self._workers = WorkerGauges(registry)

    def observe_generation(
        self, *, model: str, outcome: str, timings: Timings, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Count one closed request."""
        self.generations.labels(model, outcome).inc()
        self.prompt_tokens.labels(model).inc(prompt_tokens)
        self.output_tokens.labels(model).inc(output_tokens)
        if timings.ttft_us is not None:
            self.ttft.labels(model).observe(timings.ttft_us / 1e6)
        if timings.queued_us is not None:
            self.queued.labels(model).observe(timings.queued_us / 1e6)

    async def render(self, broker: GatewayBroker) -> bytes:
        """Prometheus's text format, the workers' gauges brought up to date."""
        try:
            self._workers.update(await broker.heartbeats(None))
        except ModelUnavailable:
            self._workers.update([])
        return generate_latest(self.registry)


class WorkerGauges:
    """One gauge per figure of a heartbeat; a worker that is gone disappears."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"ncompass_worker_{name}", description, WORKER_LABELS, registry=registry)

        self._gauges = {
            "num_running": gauge("running_sequences", "Sequences that hold KV blocks."),
            "num_waiting": gauge("waiting_sequences", "Taken and not yet prefilled."),
            "free_kv_tokens": gauge("free_kv_tokens", "Tokens that the KV cache has room for."),
            "total_kv_tokens": gauge("total_kv_tokens", "Tokens that the KV cache holds in all."),
            "num_steps": gauge("steps", "Engine steps since the worker started."),
            "output_tokens_total": gauge("output_tokens", "Tokens sampled since it started."),
            "num_preemptions": gauge("preemptions", "Sequences whose blocks were taken away."),
            "num_drafts": gauge("drafts", "Tokens guessed and computed since it started."),
            "num_accepted_drafts": gauge("accepted_drafts", "Guesses that were right."),
            "prefill_tokens_total": gauge("prefill_tokens", "Tokens prefilled since it started."),
        }
        self._ready = gauge("ready", "1 where the worker takes requests.")
        self._utilisation = {
            "ridge_tokens": gauge("ridge_tokens", "Tokens from which a step is compute-bound."),
            "compute": gauge("compute_utilisation", "Arithmetic, part of the last 10 s."),
            "bandwidth": gauge("bandwidth_utilisation", "Memory reads, part of the last 10 s."),
            "compute_s_total": gauge("compute_seconds", "Arithmetic since it started."),
            "bandwidth_s_total": gauge("bandwidth_seconds", "Memory reads since it started."),
            "compute_bound_s_total": gauge("compute_bound_seconds", "Steps bound by arithmetic."),
            "bandwidth_bound_s_total": gauge("bandwidth_bound_seconds", "Steps bound by memory."),
            "neither_bound_s_total": gauge("neither_bound_seconds", "Steps bound by neither."),
            "prediction_error": gauge("prediction_error", "Relative, of the last steps' seconds."),
            "is_prediction_trusted": gauge(
                "prediction_trusted", "0: steps are budgeted in tokens."
            ),
        }

    def update(self, heartbeats: list[Heartbeat]) -> None:
        """Show exactly the workers of `heartbeats`."""
        for gauge in (*self._gauges.values(), *self._utilisation.values(), self._ready):
            gauge.clear()
        for beat in heartbeats:
            self._ready.labels(beat.model, beat.worker).set(beat.state == "ready")
            for field, gauge in self._gauges.items():
                gauge.labels(beat.model, beat.worker).set(getattr(beat, field))
            for field, gauge in self._utilisation.items():
                gauge.labels(beat.model, beat.worker).set(getattr(beat.utilisation, field))


class CountResponses:
    """ASGI middleware that counts answers by route template and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The template and not the path: paths are the caller's, and without number.
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.responses.labels(route, message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counting_send)


def metrics_application(metrics: Metrics, broker: GatewayBroker) -> ASGIApp:
    """An ASGI application that answers every request with the metrics; `infra` chooses its port."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        is_metrics = request.url.path.rstrip("/") in ("", "/metrics")
        body = await metrics.render(broker) if is_metrics else b"Not found\n"
        response = Response(body, 200 if is_metrics else 404, media_type=CONTENT_TYPE)
        await response(scope, receive, send)

    return application
