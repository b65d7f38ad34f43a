"""Serve stored responses by their id: the answer, its input, and forgetting it."""

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response

from proxy.api.bodies import as_json
from proxy.errors import BadRequest, ResponseNotFound
from proxy.inference.stored_responses import StoredResponses
from proxy.wire.responses.stored import listed_items, whole_response

MAX_ITEMS = 100
"""Most items in one list, as in OpenAI's API."""


def add(api: FastAPI, stored: StoredResponses) -> None:
    """Add the routes."""

    @api.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, stream: bool = False) -> Response:
        """Give a stored response again."""
        conversation = await stored.conversation(response_id)
        if stream:
            raise BadRequest("a stored response is not streamed again; leave `stream` out", param="stream")
        return as_json(whole_response(conversation))

    @api.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Make a stored response unknown. Its trajectory stays; deleting that is an admin's route."""
        await stored.forget(response_id)
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @api.get("/v1/responses/{response_id}/input_items")
    async def get_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the input of a stored response, with the conversation that it continued."""
        items = listed_items(await stored.conversation(response_id))
        if order == "desc":
            items.reverse()
        return as_json(_page(items, limit, after))

    @api.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str) -> Response:
        """Refuse: only background responses can be cancelled, and none is served in the background."""
        await stored.conversation(response_id)
        raise BadRequest("Cannot cancel a synchronous response.", param="response_id")


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return the items after this one, at most `limit`.

    Raises:
        ResponseNotFound: there is no such item.
    """
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ResponseNotFound(f"Item with id '{after[:100]}' not found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
