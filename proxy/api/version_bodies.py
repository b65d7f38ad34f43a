"""Read the bodies of `POST /admin/policies/{policy}/…`, by which an admin moves versions or sets a policy's state."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from proxy.errors import BadRequest, NotJson

Version = Annotated[int, Meta(ge=0, description="0 is the base model.")]
Reason = Annotated[str, Meta(max_length=500, description="Why, for who reads the decisions later.")]


class Promote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that answers from now on."""

    version: Version
    reason: Reason | None = None


class RollBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version to go back to. Without a body: the one before the live one."""

    to: Annotated[int, Meta(ge=0, description="A version that the live one descends from.")] | None = None
    reason: Reason | None = None


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version to keep loaded, and on the disk, at any age."""

    version: Version
    pinned: Annotated[bool, Meta(description="`false` ends it.")] = True


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy's new state."""

    state: Annotated[
        Literal["recording", "training", "paused"],
        Meta(description="`paused` answers and records as `recording` does, and refuses steps by hand too."),
    ]


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parse a body; an empty one counts as an empty object.

    Raises:
        NotJson: the body is not JSON.
        BadRequest: a field is unknown, missing or of the wrong type.
    """
    try:
        return msgspec.json.decode(body if body.strip() else b"{}", type=kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(kind.__struct_encode_fields__)
        raise BadRequest(f"{str(error)[:300]}; fields are {fields}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error
