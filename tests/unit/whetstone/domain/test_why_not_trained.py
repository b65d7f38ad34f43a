"""The closed list of reasons and its table in the documentation."""

import re
from pathlib import Path

from whetstone.domain.why_not_trained import WhyNotTrained

TABLE = Path(__file__).parents[4] / "docs" / "why_not_trained.md"


def test_the_table_in_the_documentation_is_the_list_in_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows[1:] == [(why.value, why.meaning) for why in WhyNotTrained]


def test_a_reason_is_the_text_that_stands_in_the_database():
    assert WhyNotTrained("no_reward") is WhyNotTrained.NO_REWARD
    assert str(WhyNotTrained.NO_REWARD) == "no_reward"
