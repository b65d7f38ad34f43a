"""What a web page may post with a feedback token."""

import json
from typing import Any

import pytest

from proxy.domain.feedback import MAX_RATING_COMMENT, Feedback, read_rating
from proxy.errors import BadRequest, NotForTokens, NotJson


def read(body: Any) -> Feedback:
    return read_rating(body if isinstance(body, bytes) else json.dumps(body).encode(), "c1", 2)


@pytest.mark.parametrize("thumbs", ["up", "down"])
@pytest.mark.parametrize("comment", [None, "", "<b>", "x" * MAX_RATING_COMMENT])
@pytest.mark.parametrize("target", [{}, {"completion_id": "c1"}, {"completion_id": "c1", "choice": 2}])
def test_a_thumb_and_a_comment_are_about_the_tokens_completion(
    thumbs: Any, comment: str | None, target: dict[str, Any]
) -> None:
    rating = read({"thumbs": thumbs, "comment": comment} | target)
    assert rating == Feedback(completion_id="c1", choice=2, thumbs=thumbs, comment=comment)


@pytest.mark.parametrize(
    "more",
    [
        *({"completion_id": other} for other in ("c2", "C1", "", None, ["c1"], 0)),
        *({"choice": other} for other in (0, 3, "2", None)),
        *({"trajectory_id": "t"}, {"group_id": "g"}, {"reward": 1}, {"rewards": {"t": 1}}, {"parts": {"a": 1}}),
        *({"demonstration": "x"}, {"metadata": {}}, {"final": True}, {"idempotency_key": "k"}, {"judge": None}),
        *({"__proto__": {}}, {"x" * 1000: 1}),
    ],
)
def test_another_completion_and_every_other_field_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(NotForTokens) as caught:
        read({"thumbs": "up"} | more)
    assert (caught.value.status, caught.value.code) == (403, "not_for_feedback_token")
    assert len(caught.value.message) < 300 and caught.value.param is not None


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"comment": "why"}, {"thumbs": None}, {"thumbs": "sideways"}, {"thumbs": 1}, {"thumbs": ["up"]}),
        *({"thumbs": "up", "comment": "x" * (MAX_RATING_COMMENT + 1)}, {"thumbs": "up", "comment": 1}),
        *([], [{"thumbs": "up"}], "up", None, 1),
    ],
)
def test_what_is_no_rating_is_400(body: Any) -> None:
    with pytest.raises(BadRequest):
        read(body)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_400(body: bytes) -> None:
    with pytest.raises(NotJson):
        read(body)
