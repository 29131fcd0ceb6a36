"""Parts, the guardian and the fleet, with children that are real processes and do next to nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.catalog import HostedModel
from engine.worker.hosting import Hosting, HostingFile
from infra.errors import PartFailed
from infra.local.default_model import DEFAULT_MODEL
from infra.local.fleet import Fleet
from infra.local.guard import Guard
from infra.local.parts import Part, PartSpec
from infra.local.platform_parts import worker_part
from infra.local.secret_store import Secrets
from infra.local.wiring import Wiring
from infra.settings import InfraSettings

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('up', flush=True); time.sleep(60)",
]
FORKING = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']);"
    " print(child.pid, flush=True); time.sleep(60)",
]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(claim: object, timeout_s: float = 10.0) -> None:
    assert callable(claim)
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
async def guard(tmp_path: Path) -> AsyncIterator[Guard]:
    guard = Guard(tmp_path / "ready.json")
    yield guard
    guard.close()


def part_of(guard: Guard, tmp_path: Path, command: list[str], **facts: object) -> Part:
    spec = PartSpec("thing", command, dict(os.environ), 1.0, **facts)  # type: ignore[arg-type]
    return Part(spec, log=tmp_path / "thing.log", guard=guard, say=lambda line: None)


async def test_a_killed_part_is_started_again_and_a_stopped_one_is_not(
    guard: Guard, tmp_path: Path
) -> None:
    part = part_of(guard, tmp_path, SLEEPER)
    await part.start()
    keeping = asyncio.create_task(part.wait_forever())
    first = part.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: part.pid not in (None, first))
    assert part.num_restarts == 1
    assert await part.stop()
    await asyncio.wait_for(keeping, 5)
    assert part.pid is None


async def test_a_part_that_gave_up_for_good_is_left_alone(guard: Guard, tmp_path: Path) -> None:
    refusing = [sys.executable, "-c", "print('model refused'); raise SystemExit(3)"]
    part = part_of(guard, tmp_path, refusing, final_statuses=frozenset({3}))
    await part.start()
    await asyncio.wait_for(part.wait_forever(), 5)
    assert part.num_restarts == 0


async def test_a_part_that_ends_during_the_start_is_told_by_its_last_words(
    guard: Guard, tmp_path: Path
) -> None:
    part = part_of(
        guard, tmp_path, [sys.executable, "-c", "print('no such file'); raise SystemExit(2)"]
    )
    await part.start()
    with pytest.raises(PartFailed, match=r"exit status 2\): no such file"):
        await part.fail_when_ended()


async def test_a_part_that_will_not_drain_is_killed_with_all_it_forked(
    guard: Guard, tmp_path: Path
) -> None:
    part = part_of(guard, tmp_path, STUBBORN)
    await part.start()
    await until(lambda: "up" in (tmp_path / "thing.log").read_text())
    assert not await part.stop()
    assert part.pid is None


async def test_what_a_part_forked_ends_with_it(guard: Guard, tmp_path: Path) -> None:
    part = part_of(guard, tmp_path, FORKING)
    await part.start()
    await until(lambda: (tmp_path / "thing.log").read_text().strip())
    grandchild = int((tmp_path / "thing.log").read_text())
    assert not is_gone(grandchild)
    await part.stop()
    await until(lambda: is_gone(grandchild))


SUPERVISOR = """
import asyncio, os, sys, time
from pathlib import Path
from infra.local.guard import Guard
from infra.local.parts import Part, PartSpec
folder = Path(sys.argv[1])
async def main():
    guard = Guard(folder / "ready.json")
    spec = PartSpec("thing", sys.argv[2:], dict(os.environ), 1.0)
    part = Part(spec, log=folder / "thing.log", guard=guard, say=print)
    await part.start()
    print(part.pid, guard.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [FORKING, STUBBORN], ids=["forking", "stubborn"])
async def test_a_killed_supervisor_leaves_no_process_and_no_ready_file(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "ready.json").write_text("{}")
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        await until(lambda: (tmp_path / "thing.log").read_text().strip())
        if command is FORKING:
            pids.append(int((tmp_path / "thing.log").read_text()))
        supervisor.kill()
    await until(lambda: all(is_gone(pid) for pid in pids))
    assert not (tmp_path / "ready.json").exists()


def wiring_of(tmp_path: Path, **settings: object) -> Wiring:
    secrets = Secrets("redis", "pepper", "cookie", "demo", "operator")
    infra = InfraSettings(NCOMPASS_VAR=tmp_path, **settings)  # type: ignore[arg-type]
    return Wiring(infra, secrets, "redis://127.0.0.1:1/0", 9000)


def model(name: str, revision: str = "r1") -> HostedModel:
    return HostedModel(name=name, path=f"/models/{name}", revision=revision)


async def test_the_fleet_tells_its_workers_what_the_catalogue_says(
    guard: Guard, tmp_path: Path
) -> None:
    started: list[Part] = []

    async def start(spec: PartSpec) -> Part:
        asleep = PartSpec(spec.name, SLEEPER, dict(os.environ), 5.0)
        part = Part(asleep, log=tmp_path / f"{spec.name}.log", guard=guard, say=lambda line: None)
        await part.start()
        started.append(part)
        return part

    wiring = wiring_of(tmp_path, workers=2)
    told = HostingFile(wiring.hostings_file)
    fleet = Fleet(wiring, start, lambda line: None)
    await fleet.reconcile([model("a")])
    assert [part.spec.name for part in started] == ["worker", "worker-2"]
    assert told.changed() == [Hosting("a", "/models/a", "r1")]
    await fleet.reconcile([model("a"), model(DEFAULT_MODEL)])
    assert [each.name for each in told.changed() or ()] == [DEFAULT_MODEL, "a"]
    assert fleet.model_to_ask("a") == "a"
    assert fleet.model_to_ask("gone") == DEFAULT_MODEL
    await fleet.reconcile([model("a", "r2")])
    assert told.changed() == [Hosting("a", "/models/a", "r2")]
    await fleet.reconcile([model("a", "r2")])
    assert told.changed() is None, "nothing was written where nothing changed"
    await fleet.reconcile([])
    assert told.changed() == []
    assert fleet.model_to_ask("a") is None
    assert len(started) == 2
    assert None not in {part.pid for part in started}, "they wait for the next model"


def test_workers_share_the_cores_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    spec = worker_part(wiring_of(tmp_path, workers=4), "worker")
    assert spec.environment["NCOMPASS_ENGINE_NUM_THREADS"] == "2"
    assert float(spec.environment["NCOMPASS_ENGINE_MEMORY_SHARE"]) == pytest.approx(0.225)


def test_no_secret_stands_on_a_command_line(tmp_path: Path) -> None:
    spec = worker_part(wiring_of(tmp_path), "worker")
    assert not {"redis", "pepper", "cookie", "demo", "operator"} & set(spec.command)
