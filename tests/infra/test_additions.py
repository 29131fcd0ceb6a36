"""A model is added while a worker runs: on a real worker, queue and database."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file
from sqlalchemy.exc import DataError

from billing import pricing
from common.db import create_engine, create_sessions
from common.ids import new_id
from engine import additions, catalog
from engine.additions import ModelAddition
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.errors import AdditionRefused, ModelHasAdapters, ModelRefused
from engine.messages import Heartbeat
from engine.tokenization import Tokenizer
from infra.connections import open_broker
from infra.local import inspection
from infra.local.additions import Additions
from infra.local.fleet import Fleet
from infra.local.smoke_test import SmokeTest
from kernels.cpu.build import NATIVE
from tests.engine.lora import save_adapter
from tests.engine.test_several_models import Worker
from tests.engine.tiny import save_tiny
from tests.engine.tiny_pooled import save_pooled, write_stages
from tests.infra.test_supervision import wiring_of
from tests.kernels.cpu_builds import built

TERMS = '{"input": 100, "cached": 10, "output": 200}'


def checkpoint(folder: Path, *, licence: str = "apache-2.0") -> Path:
    folder.mkdir()
    save_tiny("LlamaConfig", folder)
    if licence:
        (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n# A model\n")
    return folder


class Hosts:
    """A supervisor's part of it: the fleet follows the catalogue, additions are carried out."""

    def __init__(self, database_url: str, runner: Additions) -> None:
        self.sessions = runner.sessions
        self.runner = runner
        self.database_url = database_url

    async def add(self, source: Path, **facts: str) -> ModelAddition:
        async with self.sessions.begin() as session:
            asked = await additions.ask(session, source=str(source), terms=TERMS, **facts)
            session.expunge(asked)
        await self.runner.carry_out(asked)
        async with self.sessions() as session:
            return await additions.find(session, asked.id)


@asynccontextmanager
async def hosts(database_url: str, redis_url: str, var: Path) -> AsyncIterator[Hosts]:
    built(NATIVE)
    wiring = wiring_of(var, workers=0, catalogue_interval_s=0.1, database_url=database_url)
    fleet = Fleet(wiring, start=_nobody, say=lambda line: None)
    engine = create_engine(database_url)
    following = asyncio.create_task(fleet.follow())
    worker = Worker(redis_url, wiring.hostings_file, [])
    try:
        async with open_broker(redis_url) as broker:
            runner = Additions(create_sessions(engine), fleet, broker, var / "models")
            yield Hosts(database_url, runner)
    finally:
        worker.process.kill()
        worker.process.wait(timeout=10)
        following.cancel()
        await engine.dispose()


async def _nobody(spec: object) -> object:
    raise AssertionError("no worker is started here")


@pytest.mark.slow
async def test_a_model_is_checked_loaded_tested_and_live_and_a_bad_one_leaves_nothing(
    sqlite_url: str, clean_redis: str, tmp_path: Path
) -> None:
    good, bad = checkpoint(tmp_path / "org--good"), checkpoint(tmp_path / "bad")
    config = bad / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 80}))
    async with hosts(sqlite_url, clean_redis, tmp_path) as platform:
        async with platform.sessions.begin() as session:
            wish = await catalog.request_model(session, name="org/good", email="a@b.example")
        added = await platform.add(good)
        assert (added.state, added.name) == ("live", "org/good"), added.detail
        assert 'it answers "' in added.detail
        assert "licence: apache-2.0" in added.detail
        async with platform.sessions() as session:
            hosted = await catalog.find(session, "org/good")
            assert (hosted.path, hosted.licence) == (str(good), "apache-2.0")
            assert (await pricing.current_price(session, "org/good")).output_nano_usd_per_million
            wishes = await catalog.list_requests(session, organization_id=None)
            assert [(each.id, each.status) for each in wishes] == [(wish.id, "hosted")]

        failed = await platform.add(bad)
        assert (failed.state, failed.failed_step) == ("failed", "loading")
        assert "shape (64, 96), the config says (64, 80)" in failed.detail
        again = await platform.add(good)
        assert (again.state, again.failed_step) == ("failed", "checking")
        assert "org/good is hosted already" in again.detail
        async with platform.sessions() as session:
            assert [model.name for model in await catalog.live_models(session)] == ["org/good"]
            assert set(await pricing.current_prices(session)) == {"org/good"}
        assert bad.exists(), "an operator's own folder is never removed"
        async with asyncio.timeout(10):
            while len(await platform.runner.broker.heartbeats("bad")):
                await asyncio.sleep(0.1)
        (beat,) = await platform.runner.broker.heartbeats("org/good")
        assert beat.state == "ready", "the other one went on"


@pytest.mark.slow
async def test_models_that_pool_are_added_like_any_other(
    sqlite_url: str, clean_redis: str, tmp_path: Path
) -> None:
    embedder, reranker = tmp_path / "org--embedder", tmp_path / "org--reranker"
    for folder in (embedder, reranker):
        folder.mkdir()
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    save_pooled("BertConfig", embedder)
    write_stages(embedder)
    save_pooled("BertConfig", reranker, "AutoModelForSequenceClassification", num_labels=1)
    async with hosts(sqlite_url, clean_redis, tmp_path) as platform:
        for folder, kind in ((embedder, "embed"), (reranker, "rerank")):
            added = await platform.add(folder)
            assert added.state == "live", added.detail
            assert f"a vector of {64 if kind == 'embed' else 1}" in added.detail
            async with platform.sessions() as session:
                model = await catalog.find(session, added.name)
            assert (model.kind, model.context_length) == (kind, 160)
        (beat,) = await platform.runner.broker.heartbeats("org/embedder")
        assert beat.load_report.startswith("embed: mean pooling, normalised")


@pytest.mark.slow
async def test_an_adapter_is_added_to_its_base_and_keeps_it_hosted(
    sqlite_url: str, clean_redis: str, tmp_path: Path
) -> None:
    base, other = checkpoint(tmp_path / "org--base"), checkpoint(tmp_path / "other")
    for name, own in (("org--tuned", base), ("foreign", other)):
        save_adapter(own, tmp_path / name, base_model_name_or_path="org/base")
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n")
    path = tmp_path / "foreign" / "adapter_model.safetensors"
    tensors = {
        name: torch.cat([x, x]) if "_B" in name else x for name, x in load_file(path).items()
    }
    save_file(tensors, path)
    async with hosts(sqlite_url, clean_redis, tmp_path) as platform:
        early = await platform.add(tmp_path / "org--tuned")
        assert (early.state, early.failed_step) == ("failed", "checking")
        assert early.detail == "There is no hosted model 'org/base'."
        assert (await platform.add(base)).state == "live"
        added = await platform.add(tmp_path / "org--tuned")
        assert (added.state, added.name) == ("live", "org/tuned"), added.detail
        assert added.detail.startswith(
            "adapter of org/base, added to the rows of its requests; fused"
        )
        assert "licence: mit" in added.detail
        foreign = await platform.add(tmp_path / "foreign", base="org/base")
        assert (foreign.state, foreign.failed_step) == ("failed", "loading")
        assert "the adapter was made for another base" in foreign.detail
        chained = await platform.add(tmp_path / "foreign", base="org/tuned")
        assert chained.detail == "org/tuned is an adapter itself: name its base, org/base"
        plain = await platform.add(other, base="org/base")
        assert plain.detail.endswith("has no adapter_config.json")
        async with platform.sessions.begin() as session:
            tuned = await catalog.find(session, "org/tuned")
            assert (tuned.base, tuned.kind, tuned.context_length) == ("org/base", "generate", 1024)
            assert (await pricing.current_price(session, "org/tuned")).output_nano_usd_per_million
            with pytest.raises(ModelHasAdapters, match="drain or remove org/tuned first"):
                await catalog.set_state(session, "org/base", "draining")
            await catalog.set_state(session, "org/tuned", "removed")
        async with asyncio.timeout(10):
            while await platform.runner.broker.heartbeats("org/tuned"):
                await asyncio.sleep(0.1)
        (beat,) = await platform.runner.broker.heartbeats("org/base")
        assert beat.state == "ready", "the base went on"
        async with platform.sessions.begin() as session:
            await catalog.set_state(session, "org/base", "draining")


def beat_of(total: int, free: int) -> Heartbeat:
    return Heartbeat(
        worker=new_id("worker"),
        model="m",
        revision="r",
        state="ready",
        sent_ms=0,
        pid=0,
        dtype="bf16",
        context_length=0,
        memory_total_bytes=total,
        memory_free_bytes=free,
    )


async def test_a_tested_model_is_quoted_to_the_end_of_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path / "m")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))

    async def answer(test: SmokeTest, prompt: list[int]) -> list[int]:
        return [40, 41, 7, 42]

    monkeypatch.setattr(SmokeTest, "_answer", answer)
    tokenizer = Tokenizer.load(directory)
    broker = GatewayBroker(Redis(), "node", settings=BrokerSettings())
    said = await SmokeTest(broker, "m", directory).run()
    assert said.encode() == tokenizer.token_text(40) + tokenizer.token_text(41)


def test_what_pools_needs_no_memory_but_its_weights(tmp_path: Path) -> None:
    save_pooled("BertConfig", tmp_path)
    found = inspection.inspect(tmp_path, "mit", [beat_of(10**9, 10**8)])
    assert found.footprint.weight_bytes == 4 * found.footprint.num_parameters
    assert "of weights in fp32" in found.fit
    assert found.fit.startswith("0.1"), "of a million parameters, not 0 million"
    assert found.fit.endswith("nothing of it is kept")


def test_before_loading_it_says_what_fits_beside_the_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m")
    found = inspection.inspect(directory, "", [beat_of(10**9, 10**8)])
    assert found.licence == "apache-2.0"
    # 3 layers of 2 heads of 16 channels, keys and values, 2 bytes each
    assert found.footprint.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert "of weights in bf16, 384 B of KV cache per token" in found.fit
    assert "requests of 1,024 tokens at once" in found.fit
    crowded = inspection.inspect(directory, "", [beat_of(10**9, 10)])
    assert crowded.fit.endswith("once idle models have been unloaded for it")
    with pytest.raises(ModelRefused, match=r"it does not fit: .* a worker has 10 KB"):
        inspection.inspect(directory, "", [beat_of(10_000, 10_000)])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "README.md").unlink(), "names no licence .*--licence"),
        (
            lambda folder: (folder / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n"),
            "its licence, cc-by-nc-4.0, does not allow",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no \\*.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (
            lambda folder: (folder / "config.json").write_text(
                '{"auto_map": {"AutoModel": "m.M"}}'
            ),
            "code of its own",
        ),
    ],
)
def test_what_may_not_or_cannot_be_hosted_is_refused_before_it_is_loaded(
    tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    directory = checkpoint(tmp_path / "m")
    spoil(directory)
    with pytest.raises(ModelRefused, match=sentence):
        inspection.inspect(directory, "", [])


def test_the_operators_word_on_the_licence_counts(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m", licence="")
    assert inspection.inspect(directory, "bought", []).licence == "bought"


async def test_one_name_is_added_once_at_a_time(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    sessions = create_sessions(engine)
    async with sessions.begin() as session:
        first = await additions.ask(session, source="/m", name="a", terms=TERMS)
        with pytest.raises(AdditionRefused, match="a is being added already"):
            await additions.ask(session, source="/other", name="a", terms=TERMS)
        await additions.note(session, first.id, "failed", "why")
        assert first.failed_step == "waiting"
        await additions.ask(session, source="/other", name="a", terms=TERMS)
    await engine.dispose()


async def test_what_the_rows_have_no_room_for_is_refused_when_it_is_asked(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    async with create_sessions(engine)() as session:
        for what, length in additions.LENGTHS.items():
            fields = {"source": "/m"} | {what: "x" * (length + 1)}
            with pytest.raises(AdditionRefused, match=f"{what} is longer than"):
                await additions.ask(session, **fields, terms=TERMS)
        with pytest.raises(AdditionRefused, match="name has characters"):
            await additions.ask(session, source="/m", name="two\nlines", terms=TERMS)
    await engine.dispose()


async def test_a_catalogue_that_has_no_room_fails_the_addition_and_not_the_line(
    sqlite_url: str, clean_redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def overflow(*_: object) -> None:
        raise DataError("INSERT", None, ValueError("value too long"))

    monkeypatch.setattr(Additions, "_check", overflow)
    engine = create_engine(sqlite_url)
    fleet = Fleet(wiring_of(tmp_path, workers=0), start=_nobody, say=lambda line: None)
    async with open_broker(clean_redis) as broker:
        platform = Hosts(sqlite_url, Additions(create_sessions(engine), fleet, broker, tmp_path))
        failed = await platform.add(checkpoint(tmp_path / "m"))
        assert (failed.state, failed.failed_step) == ("failed", "checking")
        assert "no room" in failed.detail
    await engine.dispose()


async def test_no_checkpoint_stops_the_line(
    sqlite_url: str, clean_redis: str, tmp_path: Path
) -> None:
    """What nobody has thought of fails one addition; the next one has its turn."""
    engine = create_engine(sqlite_url)
    fleet = Fleet(wiring_of(tmp_path, workers=0), start=_nobody, say=lambda line: None)
    async with open_broker(clean_redis) as broker:
        platform = Hosts(sqlite_url, Additions(create_sessions(engine), fleet, broker, tmp_path))
        for number, spoilt in enumerate(
            (
                '{"architectures": 5}',
                '{"architectures": {"name": 1}}',
                '{"text_config": "none"}',
                '{"quantization_config": ["int4"]}',
                '{"head_dim": [1]}',
                '{"architectures": [5]}',
                json.dumps({"architectures": ["L" * 5_000]}),
                json.dumps({"dtype": "f" * 5_000}),
                '{"dtype": "two\\nlines"}',
                '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}",
            )
        ):
            directory = checkpoint(tmp_path / f"m{number}")
            (directory / "config.json").write_text(spoilt)
            failed = await platform.add(directory)
            assert (failed.state, failed.failed_step) == ("failed", "checking"), spoilt
            assert failed.detail
            assert directory.exists()
    await engine.dispose()
