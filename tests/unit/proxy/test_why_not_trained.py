"""Why something was not trained on reads the same wherever a reader looks: API, dashboard, views, metrics."""

import re
from datetime import UTC, datetime
from html import unescape

import pytest
from sqlalchemy import text, update

from migrations import schema
from tests.conftest import Seed
from tests.unit.proxy.conftest import RunningProxy


def seeded(proxy: RunningProxy, policy_state: str, stored: str) -> None:
    """A group of two attempts, one of them with feedback, and this reason stored with both."""
    seed = Seed(proxy.engine, datetime.now(UTC))
    with proxy.engine.begin() as connection:
        connection.execute(update(schema.policies).values(state=policy_state))
    seed.group("g", state="scored", size=2, rewarded=2, closed_at=seed.now)
    for name in ("a", "b"):
        seed.trajectory(name, "g", state="rewarded", reward=1.0, why_not_trained=stored, ended_at=seed.now)
    seed.feedback("a", 1.0, id="f", trajectory_id="a", state="applied")


def told(proxy: RunningProxy) -> dict[str, str]:
    """What each place gives as the reason."""

    def api(path: str) -> dict[str, object]:
        return dict(proxy.client.get(f"/v1/{path}").raise_for_status().json())

    def page(path: str, around: str) -> str:
        shown = proxy.client.get(f"/ui/{path}").raise_for_status().text
        found = {unescape(one) for one in re.findall(around, shown)}
        assert len(found) == 1, (path, found)
        return found.pop()

    def view(query: str) -> str:
        with proxy.engine.connect() as connection:
            return str(connection.execute(text(query)).scalar_one())

    (member,) = {one["why_not_trained"] for one in api("groups/g")["members"]}  # type: ignore[attr-defined]
    metrics = proxy.client.get("/metrics").raise_for_status().text
    (measured,) = re.findall(r'^whetstone_trajectories\{policy="starter",why_not_trained="([^"]*)"\} 2', metrics, re.M)
    return {
        "trajectory": str(api("trajectories/a")["why_not_trained"]),
        "group": str(member),
        "feedback": str(api("feedback/f")["why_not_trained"]),
        "the trajectory's page": page("trajectories/a", r'Not trained on: <span class="id">([^<]+)<'),
        "the group's page": page("groups/g", r'<p class="why-line"[^>]*><span class="id">([^<]+)<'),
        "the list": page("trajectories", r'<span class="muted id" title="[^"]*">([^<]+)<'),
        "the feedback's page": page("feedback", r'<span class="id" title="[^"]*">([^<]+)</span>\s*</td>'),
        "admin_trajectories": view("SELECT DISTINCT why_not_trained FROM admin_trajectories"),
        "admin_trajectory_hours": view("SELECT DISTINCT why_not_trained FROM admin_trajectory_hours"),
        "metrics": measured,
    }


@pytest.mark.parametrize(
    ("policy_state", "stored", "reason"),
    [
        ("training", "waiting_step", "waiting_step"),
        ("recording", "waiting_step", "policy_not_training"),
        ("paused", "waiting_step", "policy_not_training"),
        # What can no longer change outlasts what the policy does now.
        ("recording", "late", "late"),
        ("paused", "greedy", "greedy"),
    ],
)
def test_every_place_gives_the_same_reason(proxy: RunningProxy, policy_state: str, stored: str, reason: str) -> None:
    seeded(proxy, policy_state, stored)
    assert set(told(proxy).values()) == {reason}, told(proxy)


def test_a_trajectory_is_found_by_the_reason_that_it_shows(proxy: RunningProxy) -> None:
    seeded(proxy, "recording", "waiting_step")
    seed = Seed(proxy.engine, datetime.now(UTC))
    seed.trajectory("bent", state="excluded", why_not_trained="sampling_bent: top_p")
    for reason, names in (
        ("policy_not_training", {"a", "b"}),
        ("waiting_step", set()),
        ("sampling_bent", {"bent"}),
        ("sampling_bent: top_p", {"bent"}),
    ):
        shown = proxy.client.get("/ui/trajectories", params={"why": reason}).raise_for_status().text
        assert set(re.findall(r'<td><a[^>]* href="/ui/trajectories/([^"?]+)">', shown)) == names, reason
