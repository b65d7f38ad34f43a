"""docs/feedback.md: its React component sends what the proxy's script sends, and is short."""

import re

from proxy.api.feedback_page import SCRIPT
from proxy.domain.feedback import MAX_RATING_COMMENT
from tests.docs_blocks import ROOT, blocks


def component() -> str:
    (block,) = [block for block in blocks(ROOT / "docs" / "feedback.md") if block.language == "jsx"]
    return block.text


def request_of(source: str) -> tuple[str | None, dict[str, str]]:
    """How a script addresses feedback: its path, and the options of `fetch` that are fixed."""
    path = re.search(r'[/"](v1/feedback)"', source)
    options = ("method", "credentials", "Content-Type", "X-Feedback-Token", "body")
    given = ((name, re.search(rf'"?{name}"?: ([^,\n}}]+)', source)) for name in options)
    return path and path[1], {name: option[1].strip() for name, option in given if option}


def test_the_component_sends_what_the_script_sends() -> None:
    assert request_of(component()) == request_of(SCRIPT.read_text(encoding="utf-8"))
    assert request_of(component()) == (
        "v1/feedback",
        {
            "method": '"POST"',
            "credentials": '"omit"',
            "Content-Type": '"application/json"',
            "X-Feedback-Token": "token",
            "body": "JSON.stringify(body)",
        },
    )


def test_the_component_is_short_and_makes_text_only() -> None:
    assert len(component().splitlines()) <= 40
    assert "dangerouslySetInnerHTML" not in component()


def test_both_allow_the_comment_that_a_token_permits() -> None:
    assert f"maxLength={{{MAX_RATING_COMMENT}}}" in component()
    assert f'maxlength: "{MAX_RATING_COMMENT}"' in SCRIPT.read_text(encoding="utf-8")
