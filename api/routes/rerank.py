"""`POST /v1/rerank`: how well each document answers a query."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import InferenceCaller
from api.dependencies import Services, ServicesDependency
from api.inference import Arrival, read
from api.openapi import body_of, errors
from api.pooled_inputs import InputReader
from api.pooling import PooledAnswer, PooledOrder, PooledResponse
from api.schemas.rerank import RerankBody
from common.ids import new_id

router = APIRouter(tags=["inference"])
encode = msgspec.json.encode


@router.post(
    "/v1/rerank",
    responses=errors(400, 401, 402, 403, 404, 413, 415, 503),
    openapi_extra=body_of(RerankBody),
)
async def create_rerank(
    request: Request, services: ServicesDependency, principal: InferenceCaller
) -> Response:
    """Score documents against a query; the best one first."""
    arrival = Arrival.now(services, principal)
    body = await read(request, RerankBody, services)
    order = await order_of(services, arrival, body, new_id("rerank"))
    return PooledResponse(services, order, partial(_write, body))


async def order_of(
    services: Services, arrival: Arrival, body: RerankBody, request_id: str
) -> PooledOrder:
    """The order for a body. Raises InvalidRequest, ModelNotFound, PromptTooLong."""
    listing = (await services.catalogue.find(body.model)).require("rerank")
    loaded = await services.tokenizers.get(listing.text_model)
    pairs = [(body.query, text) for text in body.texts]
    reader = InputReader(loaded, is_cut=body.truncate, param="documents")
    inputs = await reader.read_texts(pairs)
    return PooledOrder(request_id, arrival, listing, inputs)


def _write(body: RerankBody, answer: PooledAnswer) -> Iterator[bytes]:
    """The results as JSON, a row a piece. Equal scores keep the order of the documents."""
    scores = [float(np.frombuffer(vector, "<f4")[0]) for vector in answer.vectors]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    yield b'{"object":"list","results":['
    for place, index in enumerate(ranked):
        row: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            row["document"] = {"text": body.texts[index]}
        yield (b"," if place else b"") + encode(row)
    rest = {"model": body.model, "id": answer.request_id} | answer.told()
    yield b"]," + encode(rest)[1:]
