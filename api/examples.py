"""Examples for the OpenAPI document: what to send, and what comes back."""

from collections.abc import Mapping
from typing import Any

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is a prefill?"}]
ANSWER = "The pass over the whole prompt that comes before the first token."
USAGE = {
    "prompt_tokens": 34,
    "completion_tokens": 15,
    "total_tokens": 49,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
    "cost": "0.000001880",
    "balance_remaining": "99.999998120",
}
TIMING = {
    "queued_ms": 0.4,
    "queued_behind_own_ms": 0.0,
    "queued_behind_others_ms": 0.0,
    "tenants_active": 1,
    "prefill_ms": 21.5,
    "ttft_ms": 27.9,
    "decode_tokens_per_s": 92.1,
    "draft_tokens": 6,
    "accepted_draft_tokens": 4,
}

REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": QUESTION, "max_tokens": 64},
    "/v1/completions": {"model": MODEL, "prompt": "A prefill is", "max_tokens": 16},
    "/v1/messages": {"model": MODEL, "max_tokens": 64, "messages": QUESTION},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": QUESTION},
    "/v1/responses": {"model": MODEL, "input": "What is a prefill?", "max_output_tokens": 64},
    "/v1/quote": {"model": MODEL, "messages": QUESTION, "max_tokens": 64},
}
"""By path: a body that works as it stands."""

INPUT_USAGE = {
    "prompt_tokens": 12,
    "total_tokens": 12,
    "cost": "0.000000240",
    "balance_remaining": "99.999999760",
}
INPUT_TIMING = TIMING | {"decode_tokens_per_s": None}

ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "/v1/embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456, 0.0789]}],
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "id": "embd_01jd3k0000000000000000000",
        "usage": INPUT_USAGE,
        "timing": INPUT_TIMING,
    },
    "/v1/rerank": {
        "object": "list",
        "results": [
            {"index": 1, "relevance_score": 0.981},
            {"index": 0, "relevance_score": 0.012},
        ],
        "model": "BAAI/bge-reranker-v2-m3",
        "id": "rerank_01jd3k0000000000000000000",
        "usage": INPUT_USAGE,
        "timing": INPUT_TIMING,
    },
    "/v1/chat/completions": {
        "id": "chatcmpl_01jd3k0000000000000000000",
        "object": "chat.completion",
        "created": 1_796_040_000,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "timing": TIMING,
    },
    "/v1/completions": {
        "id": "cmpl_01jd3k0000000000000000000",
        "object": "text_completion",
        "created": 1_796_040_000,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": " the pass", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
        "timing": TIMING,
    },
    "/v1/messages": {
        "id": "msg_01jd3k0000000000000000000",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 34, "output_tokens": 15},
    },
}

STREAMS: Mapping[str, str] = {
    "/v1/chat/completions": (
        'data: {"id":"chatcmpl_…","object":"chat.completion.chunk",…,"choices":[{"index":0,'
        '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        'data: {"id":"chatcmpl_…",…,"choices":[{"index":0,"delta":{"content":"The"},…}]}\n\n'
        "data: [DONE]\n\n"
    ),
    "/v1/completions": (
        'data: {"id":"cmpl_…","object":"text_completion",…,"choices":[{"index":0,"text":" the",'
        '"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
    ),
    "/v1/messages": (
        'event: message_start\ndata: {"type":"message_start","message":{…}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"The"}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    ),
    "/v1/responses": (
        'event: response.created\ndata: {"type":"response.created","sequence_number":0,…}\n\n'
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",…,'
        '"delta":"The"}\n\nevent: response.completed\ndata: {"type":"response.completed",…}\n\n'
    ),
}
"""Of the routes that stream: what arrives with `"stream": true`, shortened."""

FAILURES: Mapping[int, tuple[str, str, str | None, str | None]] = {
    400: (
        "Invalid value for 'temperature': Input should be less than or equal to 2",
        "invalid_request_error",
        "temperature",
        "invalid_value",
    ),
    401: ("This API key is not known.", "invalid_request_error", None, "invalid_api_key"),
    402: (
        "There is not enough credit for this request. Add some on the billing page.",
        "insufficient_quota",
        None,
        "insufficient_credit",
    ),
    403: (
        "This key does not have the scope 'inference'.",
        "permission_error",
        None,
        "insufficient_scope",
    ),
    404: (
        "The model 'x' does not exist. GET /v1/models lists those that do.",
        "invalid_request_error",
        "model",
        "model_not_found",
    ),
    413: (
        "The body is longer than 8388608 bytes.",
        "invalid_request_error",
        None,
        "request_too_large",
    ),
    415: (
        "Send the body without a content-encoding.",
        "invalid_request_error",
        None,
        "unsupported_encoding",
    ),
    429: ("Too many attempts.", "too_many_attempts", None, "too_many_attempts"),
    503: (
        "No server runs the model at the moment. Nothing was charged; please try again in a moment.",
        "service_unavailable_error",
        None,
        "model_unavailable",
    ),
}
"""By status: message, type, param and code."""


def failure(status: int, *, is_anthropic: bool) -> dict[str, Any]:
    """The body of an error, in the form of its protocol."""
    message, kind, param, code = FAILURES[status]
    told = {"message": message, "type": kind, "param": param, "code": code}
    if is_anthropic:
        return {"type": "error", "error": told, "request_id": "req_01jd3k0000000000000000000"}
    return {"error": told}
