"""Build `/openapi.json` from FastAPI's routes and those in front of it, which FastAPI does not know.

Bodies are described as far as the proxy reads them or most apps use them; other fields pass to the model server.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from proxy.domain.address import RECORDED
from proxy.domain.feedback import MAX_BATCH, Feedback
from whetstone.domain.ids import ID

_MODEL = {"type": "string", "description": "One of `GET /v1/models`."}
_SAMPLING = {
    "model": _MODEL,
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
_CHOICES = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "n": {"type": "integer", "minimum": 1},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]},
    "user": {"type": "string"},
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        },
    },
}
_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _body(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["model", *required], "properties": {"model": _MODEL} | properties}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _body(
        ["messages"],
        messages=_MESSAGES,
        **_SAMPLING,
        **_CHOICES,
        logprobs={"type": "boolean"},
        tools={"type": "array", "items": {"type": "object"}},
    ),
    "/v1/completions": _body(["prompt"], prompt=_TEXT_OR_TEXTS, **_SAMPLING, **_CHOICES),
    "/v1/messages": _body(
        ["messages", "max_tokens"], messages=_MESSAGES, **_SAMPLING, max_tokens={"type": "integer", "minimum": 1}
    ),
    "/v1/responses": _body(
        ["input"],
        input={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        **_SAMPLING,
        max_output_tokens={"type": "integer", "minimum": 1},
    ),
    "/v1/embeddings": _body(["input"], input=_TEXT_OR_TEXTS),
    "/v1/score": _body(["text_1", "text_2"], text_1=_TEXT_OR_TEXTS, text_2=_TEXT_OR_TEXTS),
    "/v1/rerank": _body(["query", "documents"], query={"type": "string"}, documents=_TEXT_OR_TEXTS),
    "/v1/messages/count_tokens": _body(["messages"], messages=_MESSAGES),
    "/tokenize": _body(["prompt"], prompt={"type": "string"}),
    "/detokenize": _body(["tokens"], tokens={"type": "array", "items": {"type": "integer", "minimum": 0}}),
}
"""Path -> schema of its body."""

_ID = {"pattern": f"^{ID.pattern}$"}
_ADDRESS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("X-Trajectory-Id", _ID, "The trajectory this call continues, or opens."),
    ("X-Group-Id", _ID, "Trajectories that answer the same prompt."),
    ("X-Task", _ID, "Label for rubric and filters."),
    ("X-Split", {"enum": ["train", "eval"]}, "`eval` is never trained on."),
    ("X-No-Train", {"enum": ["true", "false"]}, "`true`: recorded, never trained on."),
    ("X-Turn-Id", _ID, "A request that repeats it gets the same answer."),
    ("Idempotency-Key", {"maxLength": 255, "minLength": 1}, "The same, in every trajectory."),
    ("X-Metadata", {}, "A JSON object."),
)
_ERROR = {
    "description": "What was wrong, and what to do.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "code", "param"],
                        "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
                    }
                },
            }
        }
    },
}


def add(api: FastAPI) -> None:
    """Make `api` return the complete document."""

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _document(api)
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]


IDEMPOTENT = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "Sent again under it, nothing is added.",
            "schema": {"type": "string"} | _ID,
        }
    ]
}
"""For requests without a body that are stored as feedback."""


def feedback_body() -> dict[str, Any]:
    """Return the body of `POST /v1/feedback`, for its route."""
    schema = _schema_of(Feedback)
    token = {
        "name": "X-Feedback-Token",
        "in": "header",
        "required": False,
        "description": "In place of an API key: permits `thumbs` and `comment` on the completion that it was made for.",
        "schema": {"type": "string"},
    }
    body = _json_body({"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_BATCH}]})
    return body | {"parameters": [token]}


def json_body_of(kind: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """Return the body of a route that reads `kind`. If it is not required, it may be left out."""
    return _json_body(_schema_of(kind), required=required)


def _schema_of(kind: type[msgspec.Struct]) -> Any:
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    return _whole(schema, components)


def _whole(schema: Any, components: dict[str, Any]) -> Any:
    """Return the schema with its references replaced by their targets: a route's body has no components of its own."""
    match schema:
        case {"$ref": str(name), **beside}:
            return _whole(components[name], components) | beside
        case dict():
            return {key: _whole(value, components) for key, value in schema.items()}
        case list():
            return [_whole(value, components) for value in schema]
    return schema


def _document(api: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=api.title, version=api.version, routes=api.routes)
    for path, schema in BODIES.items():
        recorded = path in RECORDED
        document["paths"][path] = {
            "post": {
                "summary": "Served and recorded." if recorded else "Passed to the model server, not recorded.",
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": _parameters() if recorded else [],
                **_json_body(schema),
                "responses": {"200": {"description": "As the model server answers."}, "default": _ERROR},
            }
        }
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"].setdefault("default", _ERROR)
    return document


def _parameters() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": description,
            "schema": {"type": "string"} | bounds,
        }
        for name, bounds, description in _ADDRESS
    ]


def _json_body(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
