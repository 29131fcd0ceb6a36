"""What the API process must never load, and what it counts."""

import asyncio
import subprocess
import sys

import httpx

from api.metrics import metrics_application
from tests.api.conftest import MODEL, Platform

HEAVY = ("torch", "transformers", "triton", "kernels", "celery")


def test_importing_the_api_loads_no_tensor_library() -> None:
    code = (
        "import sys, api.app, api.dependencies\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


async def test_metrics_show_requests_and_workers(platform: Platform) -> None:
    platform.say("counted")
    await platform.chat()
    await platform.client.get("/v1/nothing/at/all")
    worker = f'{{model="{MODEL}",worker="fake-worker"}}'
    application = metrics_application(platform.services.metrics, platform.services.broker)
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
        async with asyncio.timeout(3):
            while True:
                text = (await client.get("/metrics")).text
                if f"ncompass_worker_running_sequences{worker} 0.0" in text:
                    break
                await asyncio.sleep(0.05)
        assert (await client.get("/elsewhere")).status_code == 404
    assert f"ncompass_worker_ready{worker} 1.0" in text
    assert f"ncompass_worker_compute_utilisation{worker} 0.75" in text
    assert f"ncompass_worker_neither_bound_seconds{worker} 3.0" in text
    assert f'ncompass_generations_total{{model="{MODEL}",outcome="completed"}} 1.0' in text
    assert f'ncompass_time_to_first_token_seconds_count{{model="{MODEL}"}} 1.0' in text
    served = 'ncompass_http_responses_total{route="/v1/chat/completions",status="200"} 1.0'
    assert served in text
    assert 'route="unknown",status="404"' in text
    assert "/v1/nothing" not in text, "a path of the caller's making is no label"
    assert platform.customer.organization_id not in text


async def test_a_worker_that_is_gone_leaves_the_metrics(platform: Platform) -> None:
    metrics, broker = platform.services.metrics, platform.services.broker
    async with asyncio.timeout(5):
        while b'worker="fake-worker"' not in await metrics.render(broker):
            await asyncio.sleep(0.05)
        platform.worker.is_dead = True
        while b'worker="fake-worker"' in await metrics.render(broker):
            await asyncio.sleep(0.05)
