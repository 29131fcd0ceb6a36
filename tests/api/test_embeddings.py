"""`/v1/embeddings` and `/v1/rerank` over a real queue and real books; the vectors are scripted."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers

from api import examples
from billing import pricing
from billing.money import parse_usd
from common.db import create_engine, create_sessions
from engine import catalog
from engine.messages import GenerateRequest
from engine.pooling import ModelKind, read_pooling
from tests.api.conftest import BROKER, MODEL, Platform, Populated, open_platform, serving
from tests.api.fake_worker import FakeWorker, Script

EMBEDDER, RERANKER = "org/embedder", "org/reranker"
PRICE = 100_000_000
"""Nano-dollars per million tokens: 100 a token."""
MAX_TOKENS = 12


def write_checkpoint(directory: Path, kind: ModelKind) -> None:
    """The files that the API reads; nothing that could compute."""
    directory.mkdir()
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"t{n}": n for n in range(320)}, unk_token="t0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="t2 $A t3",
        pair="t2 $A t3 $B:1 t3:1",
        special_tokens=[("t2", 2), ("t3", 3)],
    )
    words.save(str(directory / "tokenizer.json"))
    architecture = "BertModel" if kind == "embed" else "BertForSequenceClassification"
    config = {
        "model_type": "bert",
        "architectures": [architecture],
        "vocab_size": 320,
        "hidden_size": 4,
        "max_position_embeddings": MAX_TOKENS,
        "id2label": {"0": "score"},
    }
    files: dict[str, Any] = {"config.json": config}
    if kind == "embed":
        stages = ["Transformer", "Pooling", "Normalize"]
        files["modules.json"] = [{"type": f"x.{each}", "path": each} for each in stages]
        files["config_sentence_transformers.json"] = {"prompts": {"query": "t9 "}}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


async def host(database_url: str, name: str, directory: Path, kind: ModelKind) -> None:
    write_checkpoint(directory, kind)
    pooling = read_pooling(directory)
    assert pooling is not None
    engine = create_engine(database_url)
    async with create_sessions(engine).begin() as session:
        await catalog.add_model(
            session,
            name=name,
            path=str(directory),
            revision="test",
            architecture="BertModel",
            context_length=pooling.max_tokens,
            dtype="float32",
            kind=kind,
        )
        await pricing.set_price(session, name, input=PRICE, cached=PRICE, output=0)
    await engine.dispose()


def vector_of(request: GenerateRequest) -> np.ndarray[Any, Any]:
    """A vector of length 1 that tells prompts apart."""
    ids = request.prompt_token_ids
    raw = np.array([sum(ids), len(ids), 1 + request.second_text_at, 7], dtype="<f4")
    return raw / np.linalg.norm(raw)


def score_of(request: GenerateRequest) -> bytes:
    """The pair with the larger ids answers the query better."""
    return np.array([sum(request.prompt_token_ids) / 1_000], dtype="<f4").tobytes()


@dataclass(frozen=True)
class Pools:
    """A platform with an embedding model and a reranker."""

    platform: Platform
    embedder: FakeWorker
    reranker: FakeWorker

    async def embed(self, texts: object, **parameters: Any) -> Any:
        body = {"model": EMBEDDER, "input": texts} | parameters
        return await self.platform.post("/v1/embeddings", body)

    async def rerank(self, query: object, documents: object, **parameters: Any) -> Any:
        body = {"model": RERANKER, "query": query, "documents": documents} | parameters
        return await self.platform.post("/v1/rerank", body)


@pytest.fixture
async def pools(
    populated_sqlite: Populated, clean_redis: str, default_model_directory: Path, tmp_path: Path
) -> AsyncIterator[Pools]:
    await host(populated_sqlite.url, EMBEDDER, tmp_path / "embedder", "embed")
    await host(populated_sqlite.url, RERANKER, tmp_path / "reranker", "rerank")
    async with open_platform(populated_sqlite, clean_redis, default_model_directory) as opened:
        embedder = FakeWorker(clean_redis, EMBEDDER, BROKER)
        embedder.script_of = lambda request: Script(vector=vector_of(request).tobytes())
        reranker = FakeWorker(clean_redis, RERANKER, BROKER)
        reranker.script_of = lambda request: Script(vector=score_of(request))
        embedder.start()
        reranker.start()
        yield Pools(opened, embedder, reranker)
        embedder.stop()
        reranker.stop()


async def test_texts_become_vectors_in_their_order_and_tokens_are_billed(pools: Pools) -> None:
    before = (await pools.platform.balance()).available
    response = await pools.embed(["t5 t6", "t7", " t8 "])
    assert response.status_code == 200, response.text
    answer = response.json()
    requests = {request.request_id: request for request in pools.embedder.requests}
    ids = [requests[answer["id"] + suffix].prompt_token_ids for suffix in ("", "-1", "-2")]
    assert ids == [[2, 5, 6, 3], [2, 7, 3], [2, 8, 3]]
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    assert {row["object"] for row in answer["data"]} == {"embedding"}
    for suffix, row in zip(("", "-1", "-2"), answer["data"], strict=True):
        expected = vector_of(requests[answer["id"] + suffix])
        assert row["embedding"] == pytest.approx(expected.tolist(), abs=1e-7)
    assert answer["model"] == EMBEDDER
    assert answer.keys() == examples.ANSWERS["/v1/embeddings"].keys()
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (10, 10)
    assert usage["cost"] == "0.000001000"
    after = await pools.platform.settled()
    assert after.available == before - 1_000
    shown = await pools.platform.client.get(
        f"/v1/generations/{answer['id']}", headers=pools.platform.customer.headers
    )
    assert shown.status_code == 200, shown.text


async def test_base64_and_dimensions_are_openai_s(pools: Pools) -> None:
    plain = (await pools.embed("t5 t6")).json()["data"][0]["embedding"]
    coded = (await pools.embed("t5 t6", encoding_format="base64")).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(coded), "<f4")
    assert vector.tolist() == plain
    short = (await pools.embed("t5 t6", dimensions=2)).json()["data"][0]["embedding"]
    head = vector[:2] / np.linalg.norm(vector[:2])
    assert short == pytest.approx(head.tolist(), abs=1e-7)
    refused = await pools.embed("t5 t6", dimensions=5)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions"


async def test_ids_are_taken_as_they_are_and_prompts_are_the_model_s(pools: Pools) -> None:
    await pools.embed([[5, 6], [7]])
    await pools.embed([8, 9])
    await pools.embed("t5", input_type="query")
    await pools.embed("t5", input_type="search_document")
    sent = [request.prompt_token_ids for request in pools.embedder.requests]
    assert sorted(sent[:2]) == [[5, 6], [7]]
    assert sent[2:] == [[8, 9], [2, 9, 5, 3], [2, 5, 3]]
    refused = await pools.embed("t5", input_type="poem")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input_type"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["t5", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [5, 320]}, "input"),
        ({"input": "t5 " * 20}, "input"),
        ({"input": ["t5"] * 2_049}, "input"),
        ({"input": "t5", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "t5", "dimensions": 0}, "dimensions"),
        ({}, "input"),
    ],
)
async def test_a_wrong_value_is_400_with_its_path(
    pools: Pools, body: dict[str, Any], param: str
) -> None:
    response = await pools.platform.post("/v1/embeddings", {"model": EMBEDDER} | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert pools.embedder.requests == []
    assert (await pools.platform.balance()).held == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["t5", 1]}, "documents[1]"),
        ({"documents": ["t5", {}]}, "documents[1].text"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"top_n": 0}, "top_n"),
    ],
)
async def test_a_wrong_field_of_rerank_is_named_as_the_caller_wrote_it(
    pools: Pools, body: dict[str, Any], param: str
) -> None:
    response = await pools.rerank(**{"query": "t5", "documents": ["t5"]} | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert f"'{param}'" in response.json()["error"]["message"]


async def test_what_is_too_long_is_cut_only_when_asked_for(pools: Pools) -> None:
    answer = await pools.embed(["t5 " * 20, "t7"], truncate=True)
    assert answer.json()["usage"]["prompt_tokens"] == MAX_TOKENS + 3
    sent = {tuple(request.prompt_token_ids) for request in pools.embedder.requests}
    assert sent == {(2, *[5] * 10, 3), (2, 7, 3)}
    await pools.rerank("t4", ["t6 " * 20], truncate=True)
    assert pools.reranker.requests[0].prompt_token_ids == [2, 4, 3, *[6] * 8, 3]


async def test_documents_are_ranked_and_the_best_come_first(pools: Pools) -> None:
    documents = ["t5", {"text": "t200"}, "t90 t9"]
    response = await pools.rerank("t4", documents, return_documents=True)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [row["index"] for row in answer["results"]] == [1, 2, 0]
    assert answer["results"][0]["document"] == {"text": "t200"}
    assert answer["results"][0]["relevance_score"] == pytest.approx(0.212, abs=1e-6)
    assert {request.second_text_at for request in pools.reranker.requests} == {3}
    assert answer["usage"]["total_tokens"] == 5 + 5 + 6
    assert answer.keys() == examples.ANSWERS["/v1/rerank"].keys()
    best = (await pools.rerank("t4", documents, top_n=1)).json()["results"]
    assert [set(row) for row in best] == [{"index", "relevance_score"}]
    for wrong, param in (({"top_n": 0}, "top_n"), ({"documents": []}, "documents")):
        refused = await pools.platform.post(
            "/v1/rerank", {"model": RERANKER, "query": "t4", "documents": ["t5"]} | wrong
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


async def test_a_model_of_another_kind_is_refused_by_name_of_its_route(pools: Pools) -> None:
    platform = pools.platform
    message = [{"role": "user", "content": "Hi"}]
    for path, body, route in (
        ("/v1/embeddings", {"model": MODEL, "input": "x"}, "/v1/chat/completions"),
        ("/v1/chat/completions", {"model": EMBEDDER, "messages": message}, "/v1/embeddings"),
        ("/v1/completions", {"model": RERANKER, "prompt": "x"}, "/v1/rerank"),
        ("/v1/rerank", {"model": EMBEDDER, "query": "x", "documents": ["y"]}, "/v1/embeddings"),
    ):
        response = await platform.post(path, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "model"
        assert f"it answers at {route}." in response.json()["error"]["message"]


async def test_credit_is_asked_before_anything_is_computed(pools: Pools) -> None:
    await pools.platform.set_balance(pools.platform.customer, 999)
    refused = await pools.embed(["t5 t6", "t7", "t8"])
    assert refused.status_code == 402
    assert pools.embedder.requests == []
    assert (await pools.embed("t5")).status_code == 200
    assert (await pools.platform.settled()).available == 999 - 300


async def test_a_failing_input_fails_the_request_and_costs_nothing(pools: Pools) -> None:
    before = (await pools.platform.balance()).available
    pools.embedder.script_of = lambda request: (
        Script(end="error")
        if 7 in request.prompt_token_ids
        else Script(vector=vector_of(request).tobytes())
    )
    failed = await pools.embed(["t5", "t7", "t6"])
    assert failed.status_code == 503
    assert (await pools.platform.settled()).available == before


async def test_a_client_that_hangs_up_pays_for_what_was_answered(pools: Pools) -> None:
    before = (await pools.platform.balance()).available
    pools.embedder.script_of = lambda request: (
        Script(end="never")
        if 7 in request.prompt_token_ids
        else Script(vector=vector_of(request).tobytes())
    )
    async with serving(pools.platform.app) as url:
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=pools.platform.customer.key, timeout=0.5, max_retries=0
        )
        with pytest.raises(openai.APITimeoutError):
            await client.embeddings.create(model=EMBEDDER, input=["t5", "t7", "t7"])
        await client.close()
        assert (await pools.platform.settled()).available == before - 300
        async with asyncio.timeout(3):
            while len(pools.embedder.cancelled) < 2:
                await asyncio.sleep(0.01)


async def test_a_quote_tells_the_price_and_runs_nothing(pools: Pools) -> None:
    platform = pools.platform
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"model": EMBEDDER, "input": ["t5 t6", "t7"]}),
        ("/v1/rerank", {"model": RERANKER, "query": "t4", "documents": ["t5", "t6 t7"]}),
    ]
    for path, body in bodies:
        told = (await platform.post("/v1/quote", body)).json()
        assert told["max_completion_tokens"] == 0
        usage = (await platform.post(path, body)).json()["usage"]
        assert told["prompt_tokens"] == usage["prompt_tokens"]
        assert parse_usd(told["max_cost"]) == parse_usd(usage["cost"]) > 0
    assert len(pools.embedder.requests) == len(pools.reranker.requests) == 2


async def test_the_list_of_models_tells_their_kinds(pools: Pools) -> None:
    listed = (await pools.platform.client.get("/v1/models")).json()["data"]
    kinds = {model["id"]: (model["kind"], model["output_modalities"]) for model in listed}
    assert kinds == {
        MODEL: ("generate", ["text"]),
        EMBEDDER: ("embed", ["embeddings"]),
        RERANKER: ("rerank", ["scores"]),
    }
    embedder = next(model for model in listed if model["id"] == EMBEDDER)
    assert embedder["pricing"]["prompt"] == "0.0000001"
    assert embedder["pricing"]["completion"] == "0"


async def test_openai_s_client_reads_its_default_encoding(pools: Pools) -> None:
    async with (
        serving(pools.platform.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=pools.platform.customer.key) as client,
    ):
        answer = await client.embeddings.create(model=EMBEDDER, input=["t5 t6", "t7"] * 150)
        assert [row.index for row in answer.data] == list(range(300))
        assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1.0, abs=1e-6)
        assert answer.data[0].embedding == answer.data[298].embedding
        assert answer.usage.prompt_tokens == 150 * 7
