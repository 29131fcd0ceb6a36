"""`POST /v1/embeddings`, as OpenAI's clients call it."""

import base64
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import Services, ServicesDependency
from api.errors import InvalidRequest
from api.inference import Arrival, read
from api.openapi import body_of, errors
from api.pooled_inputs import InputReader
from api.pooling import PooledAnswer, PooledOrder, PooledResponse
from api.schemas.embeddings import EmbeddingsBody
from common.ids import new_id
from engine.pooling import Pooling

router = APIRouter(tags=["inference"])
encode = msgspec.json.encode

GENERAL_USES = {"query": "query", "document": "document"} | {
    "search_query": "query",
    "search_document": "document",
    "passage": "document",
}
"""Names that callers use for every model, whether it has a prompt for them or not."""


@router.post(
    "/v1/embeddings",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503),
    openapi_extra=body_of(EmbeddingsBody),
)
async def create_embeddings(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Turn texts into vectors, in their order."""
    arrival = Arrival.now(services, principal)
    body = await read(request, EmbeddingsBody, services)
    order, pooling = await order_of(services, arrival, body, new_id("embd"))
    return PooledResponse(services, order, partial(_write, body, pooling))


async def order_of(
    services: Services, arrival: Arrival, body: EmbeddingsBody, request_id: str
) -> tuple[PooledOrder, Pooling]:
    """The order for a body. Raises InvalidRequest, ModelNotFound, PromptTooLong."""
    listing = (await services.catalogue.find(body.model)).require("embed")
    loaded = await services.tokenizers.get(listing.text_model)
    reader = InputReader(loaded, is_cut=body.truncate, param="input")
    pooling = reader.pooling
    if body.dimensions is not None and body.dimensions > pooling.dimension:
        raise InvalidRequest(
            f"The vectors of this model have {pooling.dimension} dimensions.", param="dimensions"
        )
    prompt = prompt_for(pooling, body.input_type)
    texts = [each for each in body.inputs if isinstance(each, str)]
    inputs = await reader.read_texts([prompt + text for text in texts])
    inputs += [reader.read_ids(each) for each in body.inputs if not isinstance(each, str)]
    return PooledOrder(request_id, arrival, listing, inputs), pooling


def prompt_for(pooling: Pooling, use: str | None) -> str:
    """What the model wants before a text of this use. Raises InvalidRequest for an unknown one."""
    if use is None:
        return pooling.default_prompt
    if use in pooling.prompts:
        return pooling.prompts[use]
    if use in GENERAL_USES:
        return pooling.prompts.get(GENERAL_USES[use], "")
    known = ", ".join(sorted({*pooling.prompts, "query", "document"}))
    raise InvalidRequest(f"This model knows the input types {known}.", param="input_type")


def _write(body: EmbeddingsBody, pooling: Pooling, answer: PooledAnswer) -> Iterator[bytes]:
    """The list of embeddings as JSON, a row a piece."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(answer.vectors):
        shown = _cut(vector, body.dimensions, is_normalised=pooling.is_normalised)
        embedding: Any
        if body.encoding_format == "base64":
            embedding = base64.b64encode(shown).decode()
        else:
            embedding = np.frombuffer(shown, "<f4").tolist()
        row = {"object": "embedding", "index": index, "embedding": embedding}
        yield (b"," if index else b"") + encode(row)
    rest = {"model": body.model, "id": answer.request_id} | answer.told()
    yield b"]," + encode(rest)[1:]


def _cut(vector: bytes, dimensions: int | None, *, is_normalised: bool) -> bytes:
    """The first `dimensions`; of length 1 again where the whole vector was."""
    if dimensions is None:
        return vector
    head = np.frombuffer(vector, "<f4")[:dimensions]
    length = np.linalg.norm(head)
    return (head / length).astype("<f4").tobytes() if is_normalised and length else head.tobytes()
