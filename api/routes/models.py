"""`GET /v1/models`: open to everybody, with prices, in OpenAI's form and OpenRouter's."""

from datetime import UTC, datetime

from fastapi import APIRouter
from pydantic import Field

from api.catalogue import Listing
from api.dependencies import Services, ServicesDependency
from api.openapi import errors
from api.schemas.base import ResponseBody
from billing.money import DECIMAL_PLACES, TOKENS_PER_PRICE
from engine.catalog import precision_of
from engine.errors import ModelUnavailable
from engine.messages import Heartbeat

router = APIRouter(tags=["models"])

TOKEN_PRICE_PLACES = DECIMAL_PLACES + len(str(TOKENS_PER_PRICE)) - 1


MODALITIES = {"embed": ["embeddings"], "rerank": ["scores"]}
WITHOUT_OUTPUT: dict[str, list[str]] = {
    "supported_sampling_parameters": [],
    "supported_features": [],
}


class Pricing(ResponseBody):
    """Dollars per token as decimal strings, as OpenRouter asks of its providers."""

    prompt: str
    completion: str
    input_cache_read: str
    request: str = "0"
    image: str = "0"


class ModelObject(ResponseBody):
    """One model: OpenAI's four fields, then what OpenRouter, vLLM and Anthropic clients read."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    type: str = "model"
    kind: str = "generate"
    """`generate`, `embed` or `rerank`: which routes it answers at."""
    parent: str | None = None
    """The model that this is an adapter of."""
    display_name: str
    created_at: datetime
    name: str
    description: str
    license: str | None
    """As its card or the operator names it; null: unknown."""
    context_length: int
    max_model_len: int
    max_output_length: int
    pricing: Pricing
    input_modalities: list[str] = ["text"]
    output_modalities: list[str] = ["text"]
    quantization: str
    supported_sampling_parameters: list[str] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "seed",
        "max_tokens",
        "response_format",
        "structured_outputs",
        "tools",
        "tool_choice",
    ]
    supported_features: list[str] = ["tools", "json_mode", "structured_outputs", "logprobs"]


class ModelList(ResponseBody):
    """Every model that can be called now."""

    object: str = "list"
    data: list[ModelObject] = Field(default=[])
    has_more: bool = False
    """Anthropic's clients ask for pages; there is only one."""


@router.get("/v1/models", responses=errors(503), openapi_extra={"security": []})
async def list_models(services: ServicesDependency) -> ModelList:
    """All hosted models with prices; needs no key."""
    listings = await services.catalogue.listings()
    workers = await _workers(services)
    return ModelList(data=[model_object(listings[name], workers) for name in sorted(listings)])


@router.get("/v1/models/{model_id:path}", responses=errors(404), openapi_extra={"security": []})
async def get_model(model_id: str, services: ServicesDependency) -> ModelObject:
    """One model; ids contain slashes. Needs no key."""
    listing = await services.catalogue.find(model_id)
    return model_object(listing, await _workers(services))


async def _workers(services: Services) -> list[Heartbeat]:
    try:
        return await services.broker.heartbeats(None)
    except ModelUnavailable:
        return []  # the list of models does not depend on them


def model_object(listing: Listing, workers: list[Heartbeat]) -> ModelObject:
    """A listing as clients read it; `workers` of all models."""
    model, price = listing.model, listing.price
    own_workers = [beat for beat in workers if beat.model == model.name]
    is_writing = model.kind == "generate"
    own = {} if is_writing else WITHOUT_OUTPUT | {"output_modalities": MODALITIES[model.kind]}
    return ModelObject(
        kind=model.kind,
        parent=model.base,
        id=model.name,
        created=model.created_at // 1_000_000,
        owned_by=model.name.split("/")[0],
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created_at / 1e6, UTC),
        name=model.name,
        description=model.description or "",
        license=model.licence or None,
        context_length=model.context_length,
        max_model_len=model.context_length,
        max_output_length=model.context_length - 1 if is_writing else 0,
        pricing=Pricing(
            prompt=per_token(price.input_nano_usd_per_million),
            completion=per_token(price.output_nano_usd_per_million),
            input_cache_read=per_token(price.cached_input_nano_usd_per_million),
        ),
        quantization=precision_of(model, own_workers),
        **own,
    )


def per_token(nano_usd_per_million: int) -> str:
    """Dollars per token, exactly: a decimal without exponent or needless zeros."""
    digits = str(nano_usd_per_million).rjust(TOKEN_PRICE_PLACES + 1, "0")
    dollars, fraction = digits[:-TOKEN_PRICE_PLACES], digits[-TOKEN_PRICE_PLACES:]
    return f"{dollars}.{fraction}".rstrip("0").rstrip(".")
