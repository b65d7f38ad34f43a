"""Read the ids of a response's items, by which an app may name the answer that they belong to. Pure."""

import re

import msgspec

_OF_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_(?P<response>[0-9A-Za-z.-]+)_(?P<given>in_)?(?P<place>[0-9]{1,6})")
"""Ids of the items of responses that are translated from chat (`proxy.wire.responses.answer.item_id` makes them), and
of the items of their inputs (`proxy.wire.responses.stored.listed_items`)."""


class ItemId(msgspec.Struct, frozen=True):
    """What the id of an item shows."""

    response_id: str
    place: int
    """In the output, or in the input, from 0."""
    of_input: bool


def item_id_of(name: str) -> ItemId | None:
    """Return what the id of an item shows; None if it is none of ours."""
    item = _OF_ITEM.fullmatch(name)
    return None if item is None else ItemId(f"resp_{item['response']}", int(item["place"]), item["given"] is not None)


def answer_of(name: str) -> str:
    """Return the id of the answer that an item belongs to, if the item's id shows it; else the name as it is."""
    item = item_id_of(name)
    return name if item is None or item.of_input else item.response_id
