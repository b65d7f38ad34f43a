"""Groups, trajectories, the funnel, feedback, reviews, keys and search, as the proxy serves them. On both databases."""

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from migrations import schema
from proxy.dashboard.pages.registry import PAGES
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for
from tests.unit.proxy.ui_scene import HOSTILE, Scene, fill

MINE = (
    *("/ui/groups", "/ui/groups?state=open&policy=starter", "/ui/groups/trains-17", "/ui/groups/waiting-for-more"),
    *("/ui/groups/all-the-same", "/ui/trajectories", "/ui/trajectories/agent", "/ui/trajectories/long"),
    *("/ui/trajectories/long?from=2&until=32", "/ui/trajectories/long?from=39", "/ui/trajectories/long?from=3&whole=1"),
    *("/ui/trajectories/dialects?tint=none", "/ui/trajectories/hostile", "/ui/trajectories/trains-17-0?tint=advantage"),
    *("/ui/trajectories/unspelled", "/ui/trajectories?text=arrives", "/ui/trajectories?id=trains-17"),
    *("/ui/trajectories?version=x", "/ui/trajectories?task=arithmetic", "/ui/funnel", "/ui/funnel?window=all"),
    *("/ui/funnel?policy=starter&window=day", "/ui/feedback", "/ui/feedback?state=applied", "/ui/feedback/f000001"),
    *("/ui/reviews", "/ui/keys", "/ui/keys?window=all", "/ui/live", "/ui/live?version=x&min=y&state=z", "/ui/policies"),
    *("/ui/live?after=0", "/ui/policies?part=overview", "/ui/live?policy=starter&version=v0&state=complete&min=0.5"),
    *("/ui/reviews", "/ui/keys", "/ui/keys?window=all", "/ui/rate", "/ui/rate?policy=starter&split=eval"),
    *("/ui/rate/raters", "/ui/compare", "/ui/compare?trajectory=hostile", "/ui/compare?trajectory=agent&turn=0"),
)


@pytest.fixture
def looked_at(proxy: RunningProxy) -> RunningProxy:
    """A proxy with a filled database, of either kind."""
    fill(Scene(proxy.engine, datetime.now(UTC)))
    return proxy


@pytest.fixture(scope="module")
def filled(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """One for all tests that leave its trajectories as they are."""
    data = tmp_path_factory.mktemp("filled")
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    with FakeVllm() as fake:
        proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", fake.url, data))
        fill(Scene(proxy.engine, datetime.now(UTC)))
        yield proxy
        proxy.stop()


def get(proxy: RunningProxy, path: str) -> str:
    answer = proxy.client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return answer.text


def words(page: str) -> str:
    """What a page says, without its marks."""
    main = page[page.index("<main") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


def ids_in(page: str, kind: str) -> list[str]:
    """The trajectories, or groups, that a list links to, in order."""
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    return re.findall(rf'<td><a(?: class="line")? href="/ui/{kind}/([^"?]+)">', body)


def test_every_page_is_shown_with_hostile_texts_as_texts(looked_at: RunningProxy) -> None:
    for path in MINE:
        page = get(looked_at, path)
        assert "<script>alert" not in page and "<img src=x" not in page and "49" not in page.partition("{{7")[2][:2]
        assert " style=" not in page and " onclick=" not in page
    shown = {page.path for page in PAGES}
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in shown]
    assert all(any(one.fullmatch(path.partition("?")[0]) for one in patterns) for path in MINE)
    assert HOSTILE in words(get(looked_at, "/ui/trajectories/hostile"))


@pytest.mark.parametrize("path", ["groups/nope", "trajectories/nope", "feedback/nope", "feedback/a b", "groups/%00"])
def test_what_is_not_there_is_a_page_that_says_so(filled: RunningProxy, path: str) -> None:
    answer = filled.client.get(f"/ui/{path}")
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")


def test_another_projects_things_are_not_there(looked_at: RunningProxy) -> None:
    other = Seed(looked_at.engine, datetime.now(UTC))
    other.project("other")
    other.group("their-group", "other")
    other.trajectory("their-trajectory", "their-group", "other")
    other.feedback("their-trajectory", 1.0, project="other", id="their-feedback", trajectory_id="their-trajectory")
    for path in ("groups/their-group", "trajectories/their-trajectory", "feedback/their-feedback"):
        assert looked_at.client.get(f"/ui/{path}").status_code == 404, path
    for path in ("groups", "trajectories", "feedback", "trajectories?id=their-trajectory", "trajectories?text=answer"):
        assert "their-" not in words(get(looked_at, f"/ui/{path}")), path
    answer = looked_at.client.post("/ui/reviews/their-trajectory", data={"thumbs": "up", "csrf": "x"})
    assert answer.status_code == 403


def test_attempts_stand_side_by_side_the_best_first(filled: RunningProxy) -> None:
    page = get(filled, "/ui/groups/trains-17")
    order = re.findall(r'<h3 id="attempt-\d+"><a href="/ui/trajectories/([^"]+)">', page)
    assert order == [f"trains-17-{place}" for place in range(5)]
    assert "<del> 12:15, for 9:40 plus two hours is 11:40, and 35 minutes more make</del>" in page
    assert "<ins> 12:05.</ins>" in page
    text = words(page)
    assert "+1.21" in text and "−0.93" in text and "right, and says why" in text and "strong 0.25 Attempt 3" in text
    assert "step 1" in text and "Right answers first" in text


def test_only_an_attempt_that_another_is_worse_than_is_the_best(filled: RunningProxy) -> None:
    def badges(group: str) -> int:
        return get(filled, f"/ui/groups/{group}").count('<span class="badge is-best">')

    assert (badges("trains-17"), badges("all-the-same"), badges("judged")) == (2, 0, 0)
    assert "Compared with the first answer" in words(get(filled, "/ui/groups/all-the-same"))


def test_an_open_group_tells_how_many_members_it_has(filled: RunningProxy) -> None:
    page = words(get(filled, "/ui/groups?state=open"))
    assert "waiting-for-more" in page and "3 of 4" in page and "trains-17" not in page


def test_a_conversation_is_shown_as_it_was(filled: RunningProxy) -> None:
    page = get(filled, "/ui/trajectories/agent")
    text = words(page)
    assert "When does this one arrive?" in text and "image/png, 2 KiB" in text
    assert "look_up" in text and '"train": "ICE 17"' in text and "I need the timetable." in text
    assert '<mark class="redacted" title="removed before it was stored">[email]</mark>' in page
    assert "aborted" in text and "no_reward" in text and "Post feedback" in text


def test_tokens_are_tinted_as_asked(filled: RunningProxy) -> None:
    likely = get(filled, "/ui/trajectories/trains-17-0")
    assert 'class="lp4"' in likely and 'class="up3"' not in likely.partition('id="turns"')[2]
    weighed = get(filled, "/ui/trajectories/trains-17-0?tint=advantage").partition('id="turns"')[2]
    assert 'class="up3"' in weighed and 'class="lp4"' not in weighed
    plain = get(filled, "/ui/trajectories/trains-17-0?tint=none").partition('id="turns"')[2]
    assert 'class="tokens' not in plain and "It arrives at 12:15" in plain
    strokes = get(filled, "/ui/trajectories/unspelled")
    assert 'class="tokens ticks"' in strokes and "what no token spells" in strokes


def test_tokens_never_spell_what_redaction_took_out(filled: RunningProxy) -> None:
    scene = Scene(filled.engine, datetime.now(UTC) - timedelta(days=30))
    scene.attempt("kept-ids", None)
    redacted = {"role": "assistant", "content": "I am [email]"}
    original = "I am alice@example.com"
    scene.says("kept-ids", 0, [{"role": "user", "content": "who?"}], original, redactions=1, response=redacted)
    page = get(filled, "/ui/trajectories/kept-ids")
    assert "alice" not in words(page) and "[email]</mark>" in page and 'class="tokens ticks"' in page


def test_of_a_long_conversation_the_middle_comes_when_it_is_asked_for(filled: RunningProxy) -> None:
    page = get(filled, "/ui/trajectories/long")
    turns = [int(one) for one in re.findall(r'id="turn-(\d+)"', page)]
    assert turns == [0, 1, *range(32, 40)]
    more = re.search(r'hx-get="([^"]+)"', page.partition('id="gap"')[2])
    assert more is not None
    seen = set(turns)
    path: str | None = unescape(more[1])
    while path:
        page = get(filled, path)
        seen |= {int(one) for one in re.findall(r'id="turn-(\d+)"', page)}
        gap = re.search(r'hx-get="([^"]+)"', page.partition('id="gap"')[2])
        path = unescape(gap[1]) if 'id="gap"' in page and gap else None
    assert seen == set(range(40))


def test_the_funnel_tells_where_trajectories_fall_out(filled: RunningProxy) -> None:
    page = get(filled, "/ui/funnel")
    figures = dict(re.findall(r'data-fact="(\w+)">([\d,]+)<', page))
    assert figures == {
        "recorded": "17", "usable": "14", "ended": "10", "rewarded": "9", "grouped": "8", "scored": "6", "trained": "5",
    }  # fmt: skip
    link = re.search(r'href="(/ui/trajectories\?[^"]*why=group_uniform[^"]*)"', page)
    assert link is not None
    assert sorted(ids_in(get(filled, unescape(link[1])), "trajectories")) == ["same-0", "same-1"]
    assert "Nothing was recorded" not in page


def test_feedback_tells_what_became_of_it(filled: RunningProxy) -> None:
    text = words(get(filled, "/ui/feedback"))
    assert "step 1 trained on it" in text and "no such trajectory in this project" in text and "2 rewards" in text
    assert "trains-17" not in words(get(filled, "/ui/feedback?state=failed"))
    assert "helpful" in words(get(filled, "/ui/feedback/f000003"))


def csrf(page: str) -> str:
    match = re.search(r'name="csrf" value="([^"]+)"', page)
    assert match is not None
    return match[1]


def feedback_on(proxy: RunningProxy, trajectory_id: str) -> list[tuple[object, ...]]:
    f = schema.feedback.c
    query = select(f.source, f.reward, f.comment, f.final).where(f.target_id == trajectory_id)
    with proxy.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


@pytest.mark.parametrize(
    ("form", "stored"),
    [
        ({"thumbs": "up", "comment": " short and right ", "reward": ""}, ("thumbs", 1.0, "short and right", True)),
        ({"thumbs": "down", "comment": ""}, ("thumbs", 0.0, None, True)),
        ({"reward": "0,25"}, ("reward", 0.25, None, True)),
        ({"reward": "−1"}, ("reward", -1.0, None, True)),
    ],
)
def test_what_people_say_is_feedback(
    filled: RunningProxy, form: dict[str, str], stored: tuple[str, float, str | None, bool]
) -> None:
    token, name = csrf(get(filled, "/ui/reviews")), f"reviewed.{stored[0]}.{stored[1]:g}"
    answer = filled.client.post(f"/ui/reviews/{name}", data=form | {"csrf": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/reviews")
    assert feedback_on(filled, name) == [stored]
    assert "Saved" in words(get(filled, "/ui/reviews"))


def test_what_was_told_of_is_asked_no_more(looked_at: RunningProxy) -> None:
    assert "to-look-at" in words(get(looked_at, "/ui/reviews"))
    looked_at.client.post("/v1/feedback", json={"trajectory_id": "to-look-at", "thumbs": "up"})
    assert "No attempts wait for a review" in words(get(looked_at, "/ui/reviews"))


@pytest.mark.parametrize("reward", ["", "much", "nan", "inf", "1e300"])
def test_what_is_no_reward_is_refused_in_words(filled: RunningProxy, reward: str) -> None:
    token = csrf(get(filled, "/ui/reviews"))
    answer = filled.client.post("/ui/reviews/to-look-at", data={"reward": reward, "csrf": token})
    assert answer.status_code == 303
    assert 'role="alert"' in get(filled, "/ui/reviews")
    assert feedback_on(filled, "to-look-at") == []


def test_without_its_token_a_form_does_nothing(filled: RunningProxy) -> None:
    get(filled, "/ui/reviews")
    for data in ({"thumbs": "up"}, {"thumbs": "up", "csrf": "0" * 64}):
        assert filled.client.post("/ui/reviews/to-look-at", data=data).status_code == 403
    with httpx.Client(base_url=filled.url, trust_env=False, verify=False) as stranger:
        token = csrf(get(filled, "/ui/reviews"))
        assert stranger.post("/ui/reviews/to-look-at", data={"thumbs": "up", "csrf": token}).status_code == 403
    assert feedback_on(filled, "to-look-at") == []


def test_keys_are_told_without_their_hashes(looked_at: RunningProxy) -> None:
    Seed(looked_at.engine, datetime.now(UTC)).insert(
        schema.api_keys, project="default", id="abcdefghijkl", name="the app", secret_sha256="f00d" * 16,
        scopes=["inference"], created_at=datetime.now(UTC) - timedelta(days=3), revoked_at=datetime.now(UTC),
        requests_per_min=60, tokens_per_min=90_000,
    )  # fmt: skip
    answer = looked_at.client.get("/ui/keys")
    if answer.status_code == 200:  # a key was made: the next look may need one
        text = words(answer.text)
        assert "the app" in text and "revoked" in text and "60 requests, 90k tokens" in text
        assert "f00d" not in answer.text
        assert "$1.14" in text and "arithmetic" in text and "without a key" in text


SEARCHES = [
    ("task=arithmetic&state=trained", {f"trains-17-{place}" for place in range(5)}),
    ("metadata=customer%3D42&from=0.5", {"trains-17-0", "trains-17-1"}),
    ("metadata=beta%3Dtrue&to=0.1", {"trains-17-3", "trains-17-4"}),
    ("metadata=plan%3Dpaid", set()),
    ("metadata=customer%3D4", set()),
    ("why=sampling_bent", {"dialects"}),
    ("split=eval", {"held-out"}),
    ("version=3", set()),
    ("policy=nobody", set()),
    ("until=2020-01-01", set()),
    ("since=2999-01-01", set()),
    ("user=nobody", set()),
]


def test_trajectories_are_found_by_what_is_told_of_them(looked_at: RunningProxy) -> None:
    for query, expected in SEARCHES:
        page = get(looked_at, f"/ui/trajectories?{query}")
        assert (set(ids_in(page, "trajectories")) if expected else set()) == expected, query
        assert ("No matching trajectories" in page) == (not expected), query


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("trains-17", ["group"]), ("trains-17-0", ["trajectory"]), ("trains-17-0-0", ["completion"]),
        ("chatcmpl-trains-17-0-0", ["completion"]), ("f000000", ["feedback"]), ("trains", []), ("%27 OR 1=1", []),
    ],
)  # fmt: skip
def test_anything_is_found_by_its_whole_id(filled: RunningProxy, name: str, kinds: list[str]) -> None:
    page = get(filled, f"/ui/trajectories?id={name}")
    rows = re.findall(r"<tr><td>(\w+)</td>", page)
    assert rows == kinds
    assert ("Nothing has this id" in page) == (not kinds)


def test_answers_are_found_by_their_words(filled: RunningProxy) -> None:
    page = get(filled, "/ui/trajectories?text=TIMETABLE&state=trained")
    assert "<mark>timetable</mark>" in page and "trains-17-4" in page
    assert "No answer contains this text" in get(filled, "/ui/trajectories?text=%25%25%25")


def test_a_list_goes_on_where_it_ended_and_skips_nothing(looked_at: RunningProxy) -> None:
    seed = Seed(looked_at.engine, datetime.now(UTC) - timedelta(days=1))
    for place in range(120):  # three at the same moment
        created_at = seed.now + timedelta(seconds=place // 3)
        seed.trajectory(f"many-{place:03}", turns=0, task="many", created_at=created_at)
    for filtered in ("", "task=many"):
        seen: list[str] = []
        path: str | None = f"/ui/trajectories?{filtered}"
        while path:
            page = get(looked_at, path)
            seen += ids_in(page, "trajectories")
            older = re.search(r'href="([^"]+)" rel="next"', page)
            path = unescape(older[1]) if older else None
        assert [one for one in seen if one.startswith("many-")] == [f"many-{place:03}" for place in range(119, -1, -1)]
        assert len(seen) == len(set(seen)) == (120 if filtered else 137)
