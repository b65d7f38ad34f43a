"""Build the JSON answers of FastAPI's routes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the value as a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
