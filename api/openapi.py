"""The OpenAPI document: bodies that are read raw are described by their pydantic models."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api import examples

REFERENCE = "#/components/schemas/{model}"

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "available": {"type": "string", "description": "Dollars; with 402 only."},
                "required": {"type": "string", "description": "Dollars; with 402 only."},
            },
        }
    },
}

EVENT_SCHEMA = {
    "type": "object",
    "description": "Each event; `data` is a chunk in JSON, or `[DONE]`.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
ANTHROPIC_ERROR = "AnthropicError"
ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}

ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing, unknown, revoked or expired.",
    402: "The credit does not cover this request.",
    403: "The key or its organization may not do this.",
    404: "There is no such thing, or it is not yours.",
    413: "The body is too long.",
    415: "The body is compressed; send it as it is.",
    429: "Too many sign-ups or password resets from here. Inference is never refused for its rate.",
    503: "A part of this service is out of reach; nothing was charged.",
}


TAGS = {
    "inference": "Tokens in, tokens out, in the protocols of OpenAI and Anthropic.",
    "models": "What may be called, and what it costs.",
    "account": "Credit, keys, budgets and usage of your organization.",
    "administration": "For operators of the platform.",
    "service": "Is it up?",
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` from its raw body."""
    # Its title and its `$defs` are how `install` moves it to the components.
    schema = model.model_json_schema(ref_template=REFERENCE)
    content = {"application/json": {"schema": schema | {"title": model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def errors(*statuses: int, form: str = "Error") -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: these failures, in the envelope of its protocol."""
    schema = {"$ref": REFERENCE.format(model=form)}
    return {
        status: {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def install(application: FastAPI) -> None:
    """Make `application` describe itself completely."""

    def describe() -> dict[str, Any]:
        if application.openapi_schema is None:
            application.openapi_schema = _describe(application)
        return application.openapi_schema

    application.openapi = describe  # type: ignore[method-assign]  # FastAPI's documented way


def _describe(application: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=application.title,
        version=application.version,
        description=application.description,
        routes=application.routes,
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = ERROR_SCHEMA
    schemas[ANTHROPIC_ERROR] = ANTHROPIC_ERROR_SCHEMA
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _hoist_body(operation, schemas)
            # FastAPI announces its own 422, which this API never sends.
            operation["responses"].pop("422", None)
            _add_examples(path, operation)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"bearer": []}]
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    return document


def _hoist_body(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    if "requestBody" not in operation:
        return
    content = operation["requestBody"]["content"]["application/json"]
    schema = content["schema"]
    schemas.update(schema.pop("$defs", {}))
    schemas[schema["title"]] = schema
    content["schema"] = {"$ref": REFERENCE.format(model=schema["title"])}


def _add_examples(path: str, operation: dict[str, Any]) -> None:
    """What to send, what comes back, the events of a stream, and every error.

    Added here and not at the routes, because FastAPI leaves out what is null.
    """
    if path in examples.REQUESTS:
        operation["requestBody"]["content"]["application/json"]["example"] = examples.REQUESTS[path]
    content = operation["responses"].get("200", {}).get("content", {})
    if path in examples.ANSWERS:
        content["application/json"]["example"] = examples.ANSWERS[path]
    if path in examples.STREAMS:
        content["text/event-stream"] = {
            "schema": EVENT_SCHEMA,
            "example": examples.STREAMS[path],
        }
    for status, told in operation["responses"].items():
        if not status.startswith("2"):
            content = told["content"]["application/json"]
            is_anthropic = content["schema"]["$ref"] == REFERENCE.format(model=ANTHROPIC_ERROR)
            content["example"] = examples.failure(int(status), is_anthropic=is_anthropic)
