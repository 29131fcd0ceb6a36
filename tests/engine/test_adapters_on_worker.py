"""Adapters as models of their own: one worker process, a real Redis, a real gateway."""

import asyncio
from pathlib import Path

import pytest

from engine.broker.gateway import GatewayBroker
from engine.worker.hosting import Hosting
from kernels.cpu.build import NATIVE
from tests.engine.lora import merge, save_adapter
from tests.engine.test_several_models import (
    PROMPT,
    Start,
    asked,
    frames_of,
    gateway,
    start,
    state_of,
    tokens_of,
)
from tests.engine.tiny import generated, save_tiny
from tests.kernels.cpu_builds import built

__all__ = ["gateway", "start"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built(NATIVE)  # a worker that compiled them would not be ready in time
    folder = tmp_path_factory.mktemp("adapters")
    for name, hidden in (("base", 64), ("other", 128)):
        (folder / name).mkdir()
        save_tiny("LlamaConfig", folder / name, hidden_size=hidden)
    save_adapter(folder / "base", folder / "one", seed=1)
    save_adapter(folder / "base", folder / "two", seed=2, rank=16)
    save_adapter(folder / "other", folder / "misfit")
    return folder


def hosting(folder: Path, name: str, base: str = "") -> Hosting:
    return Hosting(name, str(folder / name), "r1", base)


async def gone(gateway: GatewayBroker, model: str) -> None:
    async with asyncio.timeout(10):
        while await gateway.heartbeats(model):
            await asyncio.sleep(0.05)


async def test_adapters_answer_beside_their_base_and_leave_without_it_noticing(
    start: Start, gateway: GatewayBroker, folder: Path
) -> None:
    base, one, two = (
        hosting(folder, *names) for names in (("base",), ("one", "base"), ("two", "base"))
    )
    misfit, orphan = hosting(folder, "misfit", "base"), Hosting("orphan", one.path, "r1", "nobody")
    worker = start(base, one, two, misfit, orphan)
    report = (await state_of(gateway, "one", "ready")).load_report
    assert report.startswith("adapter of base, added to the rows of its requests; fused")
    told = (await state_of(gateway, "misfit", "failed")).load_report
    assert "made for another base: its model.layers.0.mlp.down_proj is [128, 96]" in told
    told = (await state_of(gateway, "orphan", "failed")).load_report
    assert told == "its base nobody is not hosted here"
    # 1. all at once, and each as if it were alone
    await state_of(gateway, "two", "ready")
    names = ("base", "one", "two") * 3
    answers = await asyncio.gather(
        *(
            tokens_of(gateway, asked(f"{name}-{index}", name, 24))
            for index, name in enumerate(names)
        )
    )
    for name in ("base", "one", "two"):
        whole = folder / name
        if name != "base":
            whole = merge(folder / "base", folder / name, folder / f"merged-{name}")
        (expected,) = generated(whole, [PROMPT], 24)
        mine = [answer for own, answer in zip(names, answers, strict=True) if own == name]
        assert mine == [expected] * 3, name
    # 2. one leaves while it is busy: it ends what runs, and the others go on
    running = asyncio.create_task(tokens_of(gateway, asked("last", "two", 200)))
    beside = asyncio.create_task(tokens_of(gateway, asked("beside", "base", 200)))
    while not (await gateway.heartbeats("two"))[0].num_running:
        await asyncio.sleep(0.01)
    worker.host([base, one])
    assert len(await running) == 200
    assert len(await beside) == 200
    await gone(gateway, "two")
    await gone(gateway, "misfit")
    # 3. it comes back under its name with other weights
    worker.host([base, one, Hosting("two", one.path, "r2", "base")])
    await state_of(gateway, "two", "ready")
    assert await tokens_of(gateway, asked("again", "two", 24)) == answers[1]


async def test_a_request_for_an_adapter_loads_its_base(
    start: Start, gateway: GatewayBroker, folder: Path
) -> None:
    base, one = hosting(folder, "base"), hosting(folder, "one", "base")
    start(base, one, idle_unload_s=0.5)
    await state_of(gateway, "one", "ready")
    await state_of(gateway, "base", "unloaded")
    await state_of(gateway, "one", "unloaded")
    frames = await frames_of(gateway, asked("wake", "one", 4))
    assert sum(len(frame.token_ids) for frame in frames) == 4
    assert (await state_of(gateway, "base", "ready")).load_report.startswith("fused")
