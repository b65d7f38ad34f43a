"""Which trajectory a call goes on with: rule by rule, and in random interleavings beside a writer that lags behind."""

import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select

from migrations import schema
from proxy.domain.address import Address
from proxy.domain.call import Call, Choice, Question, digest_of
from proxy.domain.policies import pin_of
from proxy.recording.store import Store
from proxy.trajectories.conversation_hash import ConversationHasher, prompt_hash
from proxy.trajectories.resolver import Placement, TrajectoryResolver
from proxy.trajectories.store import ThreadTables
from tests.unit.proxy.conftest import make_call, make_choice, raw
from whetstone.transfer.importing.importer import ImportOptions, check, run

IDLE_S = 1800.0
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Alone:
    """No other proxy."""

    alone = True

    async def written(self, until_s: float) -> None:
        raise AssertionError("nobody to wait for")


class App:
    """Calls as the proxy makes and writes them, without what is between: SQL has a call once `write` was called."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.store, self.normaliser = engine, Store(engine), ConversationHasher()
        self.unwritten: list[Call] = []
        self.calls = 0
        self.restart()

    def restart(self) -> None:
        """A proxy that died, and the next one, which finds in the journal what SQL has not."""
        self.threads = TrajectoryResolver(ThreadTables(self.engine, "default"), Alone(), IDLE_S)
        for call in self.unwritten:
            self.threads.recovered(call)

    def write(self) -> None:
        with self.engine.begin() as connection:
            self.store.calls.write(connection, self.unwritten)
        self.unwritten = []

    async def ask(self, *messages: Any, **said: Any) -> "Asking":
        """A call that has come and is not answered yet."""
        self.calls += 1
        asking = Asking(self, f"{int(time.time() * 1000):012x}{self.calls:020x}", [raw(one) for one in messages], said)
        await asking.begin()
        return asking

    async def turn(self, *messages: Any, text: str = "yes", **said: Any) -> Call:
        return (await self.ask(*messages, **said)).answer(text)


class Asking:
    def __init__(self, app: App, call_id: str, messages: list[Any], said: dict[str, Any]) -> None:
        self.app, self.id, self.messages = app, call_id, messages
        self.end_user = said.pop("end_user", None)
        self.speaker = {"policy": said.pop("policy", "starter"), "policy_version": said.pop("version", 0)}
        if "trajectory_id" in said:
            said.setdefault("named_by", "header")
        self.address = Address(**said)
        self.asked = app.normaliser.conversation(messages, self.end_user)
        self.place: Placement

    async def begin(self) -> None:
        self.place = await self.app.threads.resolve(self.id, self.address, self.asked, self.question)

    @property
    def question(self) -> Question:
        return ("/v1/chat/completions", self.asked.whole, None)

    def answer(self, text: str = "yes", status: str = "complete", n: int = 1, **message: Any) -> Call:
        """`n` choices: the text, then the text with a number behind it."""
        texts = [text, *(f"{text} {index}" for index in range(1, n))]
        choices: tuple[Choice, ...] = tuple(
            make_choice(index, message={"role": "assistant", "content": said} | message)
            for index, said in enumerate(texts)
        )
        if status == "error":
            choices = ()
        call = make_call(
            self.id,
            self.place.trajectory_id,
            threaded_by=self.place.by,
            address=self.address,
            end_user=self.end_user,
            choices=choices,
            status=status,
            request_digest=digest_of(self.question) if status != "complete" or self.address.retry else None,
            created_at_s=time.time(),
            extends=self.place.extends,
            continues=self.place.continues,
            prompt_hash=prompt_hash(self.asked, raw(None), None),
            **self.speaker,
            histories=tuple(self.app.normaliser.history(self.asked, choice) for choice in choices),
        )
        call = type(call)(
            **{name: getattr(call, name) for name in call.__struct_fields__} | {"messages": self.messages}
        )
        self.app.threads.on_recorded(call, self.question)
        self.app.unwritten.append(call)
        return call


@pytest.fixture
def app(engine: Engine, seed: Any) -> Iterator[App]:
    app = App(engine)
    yield app
    app.write()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def echo(text: str = "yes") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture(params=["in memory", "from SQL", "from the journal"])
def later(request: pytest.FixtureRequest, app: App) -> Any:
    """What happens between two calls."""

    def happen() -> None:
        if request.param == "from SQL":
            app.write()
        if request.param != "in memory":
            app.restart()

    return happen


async def test_a_conversation_stays_in_its_trajectory(app: App, later: Any) -> None:
    first = await app.turn(user("a"))
    later()
    second = await app.turn(user("a"), echo(), user("b"))
    later()
    third = await app.turn(user("a"), echo(), user("b"), echo(), user("c"))
    assert [call.threaded_by for call in (first, second, third)] == ["new", "content", "content"]
    assert {call.trajectory_id for call in (second, third)} == {first.trajectory_id}
    assert (second.extends, third.extends) == (first.id, second.id)


async def test_a_fork_is_a_trajectory_of_its_own_that_says_where_it_left(app: App, later: Any) -> None:
    first = await app.turn(user("a"))
    second = await app.turn(user("a"), echo(), user("b"))
    later()
    fork = await app.turn(user("a"), echo(), user("another b"))
    later()
    assert (fork.threaded_by, fork.continues) == ("fork", first.id)
    on_the_fork = await app.turn(user("a"), echo(), user("another b"), echo(), user("c"))
    on_the_first = await app.turn(user("a"), echo(), user("b"), echo(), user("c"))
    assert on_the_fork.trajectory_id == fork.trajectory_id != first.trajectory_id
    assert on_the_first.trajectory_id == second.trajectory_id == first.trajectory_id


async def test_of_identical_histories_the_oldest_not_yet_continued_goes_on(app: App, later: Any) -> None:
    opened = [await app.turn(user("a")) for _ in range(3)]
    later()
    continued = []
    for place in range(3):
        continued.append(await app.turn(user("a"), echo(), user(f"b{place}")))
        later()
    assert [call.trajectory_id for call in continued] == [call.trajectory_id for call in opened]
    assert len({call.trajectory_id for call in opened}) == 3
    assert (await app.turn(user("a"), echo(), user("b"))).threaded_by == "fork"


async def test_two_in_flight_do_not_go_on_from_the_same_answer(app: App) -> None:
    first = await app.turn(user("a"))
    one = await app.ask(user("a"), echo(), user("b"))
    other = await app.ask(user("a"), echo(), user("c"))
    assert (one.place.by, other.place.by) == ("content", "fork")
    assert one.place.trajectory_id == first.trajectory_id != other.place.trajectory_id


@pytest.mark.parametrize("status", ["aborted", "error"])
async def test_what_broke_off_frees_what_it_went_on_from(app: App, later: Any, status: str) -> None:
    first = await app.turn(user("a"))
    (await app.ask(user("a"), echo(), user("b"))).answer("par", status=status)
    later()
    again = await app.turn(user("a"), echo(), user("b, in other words"))
    assert (again.trajectory_id, again.threaded_by) == (first.trajectory_id, "content")


async def test_what_was_said_before_it_was_cut_off_may_be_gone_on_from(app: App, later: Any) -> None:
    cut = (await app.ask(user("a"))).answer("Once upon", status="aborted")
    later()
    assert (await app.turn(user("a"), echo("Once upon"), user("go on"))).trajectory_id == cut.trajectory_id


async def test_a_longer_history_that_only_sql_knows_goes_before_a_shorter_one_in_memory(app: App) -> None:
    first = await app.turn(user("a"))
    await app.turn(user("a"), echo(), user("b"))
    app.write()
    app.restart()
    other = await app.turn(user("a"))
    third = await app.turn(user("a"), echo(), user("b"), echo(), user("c"))
    assert third.trajectory_id == first.trajectory_id != other.trajectory_id


async def test_a_retry_of_a_first_turn_lands_where_the_first_attempt_did(app: App, later: Any) -> None:
    cut = (await app.ask(user("a"))).answer("", status="error")
    later()
    other = await app.turn(user("a"))
    again = await app.turn(user("a"), retry=True)
    assert other.trajectory_id != cut.trajectory_id
    assert (again.trajectory_id, again.threaded_by) == (cut.trajectory_id, "retry")
    later()
    assert (await app.turn(user("a"), retry=True)).threaded_by == "new"


async def test_a_retry_of_a_call_that_still_runs_lands_beside_it(app: App) -> None:
    """The connection is gone, and nobody told the proxy."""
    first = await app.turn(user("a"))
    lost = await app.ask(user("a"), echo(), user("b"))
    again = await app.turn(user("a"), echo(), user("b"), text="no", retry=True)
    lost.answer("yes")
    assert (again.threaded_by, again.trajectory_id, again.extends) == ("retry", first.trajectory_id, first.id)
    assert (await app.turn(user("a"), echo(), user("b"), echo("no"), user("c"))).extends == again.id


async def test_of_two_that_were_lost_the_second_is_what_a_third_repeats(app: App) -> None:
    """The first is known to be repeated already, though it runs still."""
    lost = await app.ask(user("a"))
    again = await app.ask(user("a"), retry=True)
    once_more = await app.turn(user("a"), retry=True)
    assert again.place.by == once_more.threaded_by == "retry"
    assert {lost.place.trajectory_id, again.place.trajectory_id} == {once_more.trajectory_id}
    lost.answer()
    again.answer()


async def test_a_retry_takes_over_what_its_first_call_went_on_from(app: App) -> None:
    await app.turn(user("a"))
    lost = await app.ask(user("a"), echo(), user("b"))
    again = await app.ask(user("a"), echo(), user("b"), retry=True)
    lost.answer("", status="error")
    edited = await app.turn(user("a"), echo(), user("another b"))
    assert (edited.threaded_by, edited.trajectory_id != again.place.trajectory_id) == ("fork", True)


async def test_a_retry_after_a_restart_takes_what_its_first_call_went_on_from(app: App) -> None:
    first = await app.turn(user("a"))
    (await app.ask(user("a"), echo(), user("b"))).answer("", status="error")
    app.write()
    app.restart()
    again = await app.turn(user("a"), echo(), user("b"), retry=True)
    assert (again.threaded_by, again.extends) == ("retry", first.id)
    assert (await app.turn(user("a"), echo(), user("another b"))).threaded_by == "fork"


async def test_what_was_asked_while_the_database_was_away_is_found_when_it_is_back(app: App) -> None:
    first = await app.turn(user("a"))
    app.write()
    app.restart()
    tables = app.threads._tables
    app.threads._tables = ThreadTables(create_engine("sqlite:////nowhere/at/all.db"), "default")
    assert (await app.turn(user("a"), echo(), user("b"))).threaded_by == "new"
    app.threads._tables = tables
    assert (await app.turn(user("a"), echo(), user("c"))).trajectory_id == first.trajectory_id


async def test_parallel_calls_under_an_ended_name_go_on_in_one_linked_trajectory(app: App) -> None:
    first = await app.turn(user("a"), trajectory_id="t")
    app.threads.ended("t")
    one, other = [await app.ask(user(text), trajectory_id="t") for text in "bc"]
    other.answer()
    one.answer()
    assert one.place == other.place
    assert one.place.continues == first.id


async def test_a_retry_among_equals_in_flight_begins_anew(app: App) -> None:
    group = [await app.ask(user("a")) for _ in range(3)]
    assert (await app.turn(user("a"), retry=True)).threaded_by == "new"
    assert len({one.place.trajectory_id for one in group}) == 3


async def test_a_retry_that_could_repeat_two_calls_begins_anew(app: App, later: Any) -> None:
    for _ in range(2):
        (await app.ask(user("a"))).answer("", status="error")
    later()
    assert (await app.turn(user("a"), retry=True)).threaded_by == "new"


async def test_what_goes_on_after_the_end_is_a_new_trajectory_linked_to_the_old(app: App) -> None:
    first = await app.turn(user("a"))
    app.threads.ended(f"chatcmpl-{first.id}")
    second = await app.turn(user("a"), echo(), user("b"))
    assert (second.threaded_by, second.continues) == ("after", first.id)
    third = await app.turn(user("a"), echo(), user("b"), echo(), user("c"))
    assert third.trajectory_id == second.trajectory_id != first.trajectory_id


@pytest.mark.parametrize("state", ["ended", "rewarded", "trained"])
async def test_an_end_that_only_sql_knows_counts_as_well(app: App, state: str) -> None:
    first = await app.turn(user("a"))
    app.write()
    with app.engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state=state))
    app.restart()
    assert (await app.turn(user("a"), echo(), user("b"))).continues == first.id


async def test_identical_histories_that_have_ended_are_passed_over(app: App) -> None:
    ended, going = [await app.turn(user("a")) for _ in range(2)]
    app.threads.ended(ended.trajectory_id)
    assert (await app.turn(user("a"), echo(), user("b"))).trajectory_id == going.trajectory_id


async def test_a_name_goes_on_after_its_trajectory_has_ended(app: App, later: Any) -> None:
    first = await app.turn(user("a"), trajectory_id="t")
    app.threads.ended("t")
    second = await app.turn(user("b"), trajectory_id="t")
    third = await app.turn(user("c"), trajectory_id="t")
    assert first.trajectory_id == "t" != second.trajectory_id == third.trajectory_id
    assert (second.continues, second.threaded_by) == (first.id, "header")
    app.write()
    with app.engine.begin() as connection:
        connection.execute(schema.trajectories.update().where(schema.trajectories.c.id == "t").values(state="ended"))
    app.restart()
    assert (await app.turn(user("d"), trajectory_id="t")).trajectory_id == second.trajectory_id


async def test_a_session_named_by_its_program_is_the_trajectory(app: App) -> None:
    calls = [await app.turn(user(text), trajectory_id="s", named_by="agent") for text in "abc"]
    assert {(call.trajectory_id, call.threaded_by) for call in calls} == {("s", "agent")}


async def test_users_with_the_same_words_keep_apart(app: App, later: Any) -> None:
    ann = await app.turn(user("a"), end_user="ann")
    bob = await app.turn(user("a"), end_user="bob")
    later()
    assert (await app.turn(user("a"), echo(), user("b"), end_user="bob")).trajectory_id == bob.trajectory_id
    assert (await app.turn(user("a"), echo(), user("b"), end_user="ann")).trajectory_id == ann.trajectory_id
    assert (await app.turn(user("a"), echo(), user("b"), end_user="eve")).threaded_by == "new"


async def test_tool_calls_go_on_under_a_prompt_that_changes(app: App, later: Any) -> None:
    made = {
        "id": "chatcmpl-tool-00112233445566778899",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    first = (await app.ask(user("12:31"))).answer("", tool_calls=[made])
    later()
    told = {"role": "tool", "tool_call_id": made["id"], "content": "3"}
    second = await app.turn(user("12:32"), {"role": "assistant", "content": None, "tool_calls": [made]}, told)
    assert (second.trajectory_id, second.threaded_by) == (first.trajectory_id, "tool_calls")


@pytest.mark.parametrize("name", [None, "t"])
async def test_a_place_tells_which_versions_spoke_there_and_since_when(app: App, later: Any, name: str | None) -> None:
    first = await app.ask(user("a"), trajectory_id=name, version=1)
    assert first.place.pins == ()
    spoken = [first.answer()]
    said = [user("a"), echo(), user("b")]
    for version in (1, 2, 1):
        later()
        spoken.append(await app.turn(*said, trajectory_id=name, version=version))
        said += [echo(), user("and then")]
    later()
    pins = (await app.ask(*said, trajectory_id=name)).place.pins
    assert [(pin.policy, pin.version) for pin in pins] == [("starter", 2), ("starter", 1)]
    assert [pin.since_s for pin in pins] == pytest.approx([spoken[2].created_at_s, spoken[0].created_at_s], abs=1e-5)


async def test_what_spoke_before_a_restart_keeps_its_first_turn_as_the_conversation_goes_on(app: App) -> None:
    first = await app.turn(user("a"), version=1)
    app.write()
    app.restart()
    await app.turn(user("a"), echo(), user("b"), version=1)
    (pin,) = (await app.ask(user("a"), echo(), user("b"), echo(), user("c"))).place.pins
    assert pin.since_s == pytest.approx(first.created_at_s, abs=1e-5)


async def test_a_fork_and_what_comes_after_the_end_are_told_what_spoke_up_to_where_they_left(
    app: App, later: Any
) -> None:
    await app.turn(user("a"), version=1)
    second = await app.turn(user("a"), echo(), user("b"), version=2)
    later()
    fork = await app.ask(user("a"), echo(), user("another b"))
    assert (fork.place.by, pinned(fork)) == ("fork", 1)
    app.threads.ended(second.trajectory_id)
    after = await app.ask(user("a"), echo(), user("b"), echo(), user("c"))
    assert pinned(after) == 2


async def test_a_name_that_begins_anew_is_not_told_what_spoke_before_its_end(app: App, later: Any) -> None:
    first = await app.turn(user("a"), trajectory_id="t", version=1)
    later()
    assert pinned(await app.ask(user("b"), trajectory_id="t")) == 1
    app.threads.ended("t")
    anew = await app.ask(user("c"), trajectory_id="t")
    assert (anew.place.continues, anew.place.pins) == (first.id, ())


async def test_each_policy_of_a_trajectory_has_its_own(app: App, seed: Any, later: Any) -> None:
    policy = {
        "base_model": "b",
        "model_path": "m",
        "live_version": 0,
        "next_version": 1,
        "next_step": 1,
        "state": "recording",
    }
    seed.insert(schema.policies, project="default", id="helper", created_at=seed.now, **policy)
    await app.turn(user("a"), version=1)
    await app.turn(user("a"), echo(), user("b"), policy="helper", version=5)
    later()
    third = await app.ask(user("a"), echo(), user("b"), echo(), user("c"))
    assert (pinned(third), pinned(third, "helper")) == (1, 5)
    fork = await app.ask(user("a"), echo(), user("another b"))
    assert pinned(fork) == 1


async def test_each_choice_goes_on_with_the_version_that_spoke_it(app: App, later: Any) -> None:
    call = (await app.ask(user("a"), version=1)).answer(n=3)
    later()
    on = await app.ask(user("a"), echo("yes 2"), user("b"))
    assert (on.place.trajectory_id, pinned(on)) == (f"{call.trajectory_id}.2", 1)
    assert pinned(await app.ask(user("a"), trajectory_id=f"{call.trajectory_id}.1")) == 1


async def test_a_retry_is_told_what_spoke_where_it_lands(app: App, later: Any) -> None:
    (await app.ask(user("a"), version=1)).answer("Once", status="aborted")
    later()
    again = await app.ask(user("a"), retry=True)
    assert (again.place.by, pinned(again)) == ("retry", 1)


async def test_a_retry_does_not_land_in_a_trajectory_that_has_ended_elsewhere(app: App) -> None:
    cut = (await app.ask(user("a"))).answer("Once", status="aborted")
    app.write()
    with app.engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state="ended"))
    app.restart()
    again = await app.ask(user("a"), retry=True)
    assert (again.place.by, again.place.trajectory_id != cut.trajectory_id) == ("new", True)


async def test_what_is_in_memory_is_not_asked_of_sql(app: App) -> None:
    first = await app.turn(user("a"), version=1)
    named = await app.turn(user("a"), trajectory_id="t", version=1)
    app.threads._tables = Unasked()
    assert pinned(await app.ask(user("a"), echo(), user("b"))) == 1
    assert pinned(await app.ask(user("b"), trajectory_id=named.trajectory_id)) == 1
    assert (await app.ask(user("new"))).place.trajectory_id != first.trajectory_id


class Unasked:
    """Tables that nobody may ask."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of SQL")


def pinned(asking: "Asking", policy: str = "starter") -> int | None:
    pin = pin_of(asking.place.pins, policy)
    return None if pin is None else pin.version


async def test_few_shot_answers_that_nobody_gave_are_looked_for_once(app: App) -> None:
    asked: list[int] = []

    class Counting(ThreadTables):
        async def heads(self, *arguments: Any) -> Any:
            asked.append(1)
            return await super().heads(*arguments)

    app.threads = TrajectoryResolver(Counting(app.engine, "default"), Alone(), IDLE_S)
    calls = [await app.turn(user("1+1"), echo("2"), user(f"2+{n}"), text=f"{n}") for n in range(20)]
    assert len({call.trajectory_id for call in calls}) == 20
    assert len(asked) == 1
    assert (await app.turn(user("1+1"), echo("2"), user("2+7"), echo("7"), user("why?"))).extends == calls[7].id


async def test_a_proxy_whose_database_is_away_serves_and_begins_anew(app: App) -> None:
    await app.turn(user("a"))
    app.write()
    app.restart()
    nowhere = create_engine("sqlite:////nowhere/at/all.db")
    app.threads = TrajectoryResolver(ThreadTables(nowhere, "default"), Alone(), IDLE_S)
    assert (await app.turn(user("a"), echo(), user("b"))).threaded_by == "new"


class Others:
    """Another proxy is there, and has written nothing lately."""

    alone = False

    def __init__(self) -> None:
        self.waited_for = 0

    async def written(self, until_s: float) -> None:
        self.waited_for += 1


async def test_nobody_waits_for_what_others_write_while_the_database_is_away(app: App) -> None:
    others = Others()
    app.threads = TrajectoryResolver(ThreadTables(app.engine, "default"), others, IDLE_S)
    assert (await app.turn(user("a"), echo(), user("b"))).threaded_by == "new"
    assert others.waited_for == 1
    nowhere = create_engine("sqlite:////nowhere/at/all.db")
    app.threads = TrajectoryResolver(ThreadTables(nowhere, "default"), others, IDLE_S)
    assert (await app.turn(user("a"), echo(), user("b"))).threaded_by == "new"
    assert others.waited_for == 1


@pytest.mark.parametrize("seed_of_order", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
async def test_in_any_interleaving_every_call_lands_in_its_own_trajectory(app: App, seed_of_order: int) -> None:
    """1,000 conversations with turns, retries, forks and restarts, written to SQL whenever the writer comes to it."""
    rng = random.Random(seed_of_order)
    branches = [Branch([user(f"question {n}")]) for n in range(1000 if seed_of_order == 0 else 200)]
    in_flight: list[tuple[Branch, Asking]] = []
    lost = []
    todo = [branch for branch in branches for _ in range(4)]
    rng.shuffle(todo)
    while todo or in_flight:
        dice = rng.random()
        if dice < 0.004 and not in_flight:
            app.restart()
        elif dice < 0.02:
            app.write()
        elif todo and (dice < 0.55 or not in_flight):
            branch = todo.pop()
            if branch.busy:
                todo.insert(rng.randrange(len(todo) + 1), branch)
                if all(one.busy for one in todo):
                    in_flight_at = rng.randrange(len(in_flight))
                    lost += finish(*in_flight.pop(in_flight_at), rng)
                continue
            if branch.turns > 1 and rng.random() < 0.1:
                branch = branch.fork(rng)
                branches.append(branch)
            branch.busy = True
            in_flight.append((branch, await app.ask(*branch.messages, retry=branch.retrying)))
        elif in_flight:
            lost += finish(*in_flight.pop(rng.randrange(len(in_flight))), rng)
    owners: dict[str, Branch] = {}
    for branch in branches:
        for trajectory_id in branch.trajectories:
            if owners.setdefault(trajectory_id, branch) is not branch:
                lost.append(trajectory_id)
    assert lost == []
    assert sum(branch.turns for branch in branches) > 3 * len(branches) / 2


class Branch:
    """One conversation, and the trajectories its calls were put into: one, if all is right."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.turns = 0
        self.busy = self.retrying = False
        self.trajectories: set[str] = set()

    def fork(self, rng: random.Random) -> "Branch":
        """What the app does when its user edits one of his earlier messages."""
        place = rng.randrange(1, self.turns) * 2
        return Branch([*self.messages[:place], user(f"an edit {rng.random()}")])


def finish(branch: Branch, asking: Asking, rng: random.Random) -> list[str]:
    """Answer or break off; what went elsewhere than its branch."""
    branch.busy = False
    branch.trajectories.add(asking.place.trajectory_id)
    wrong = [asking.id] if len(branch.trajectories) > 1 else []
    if rng.random() < 0.1:
        asking.answer("cut", status=rng.choice(["aborted", "error"]))
        branch.retrying = rng.random() < 0.7 or branch.turns == 0
        if branch.turns == 0 and not branch.retrying:
            branch.trajectories.clear()
    else:
        text = rng.choice(["yes", "no"])
        asking.answer(text)
        branch.messages += [echo(text), user(f"and then {branch.turns}")]
        branch.turns += 1
        branch.retrying = False
    return wrong


@pytest.mark.parametrize("status", ["complete", "aborted", "error"])
async def test_what_a_call_asks_is_kept_as_long_as_it_runs_and_then_a_digest_alone(app: App, status: str) -> None:
    asking = await app.ask(user("hi"))
    assert list(app.threads._running._by_request) == [asking.question]
    asking.answer(status=status)
    assert not app.threads._running._by_request
    kept = [] if status == "complete" else [digest_of(asking.question)]
    assert list(app.threads._unanswered._by_request) == kept


async def test_nothing_is_kept_of_what_was_not_recorded(app: App) -> None:
    asking = await app.ask(user("hi"))
    app.threads.on_discarded(asking.id, asking.question, asking.place)
    assert not app.threads._running._by_request
    again = await app.ask(user("hi"), retry=True)
    assert (again.place.by, again.place.trajectory_id != asking.place.trajectory_id) == ("new", True)


async def test_of_one_that_runs_and_one_that_broke_off_nobody_can_tell_which_is_repeated(app: App) -> None:
    (await app.ask(user("hi"))).answer(status="error")
    await app.ask(user("hi"))
    assert (await app.ask(user("hi"), retry=True)).place.by == "new"


async def test_what_is_clear_without_sql_is_placed_at_once_and_all_else_is_not(app: App) -> None:
    def at_once(asking: Asking) -> Placement | None:
        return app.threads.resolve_in_memory("c", asking.address, asking.asked, asking.question)

    new, named = await app.ask(user("hi")), await app.ask(user("hi"), trajectory_id="t")
    placed = at_once(new), at_once(named)
    assert [place and place.by for place in placed] == ["new", "header"]
    assert at_once(Asking(app, "c", [raw(user("hi"))], {"trajectory_id": "nobody knows it"})) is None
    assert at_once(Asking(app, "c", [raw(user("hi"))], {"retry": True})) is None
    assert at_once(Asking(app, "c", [raw(user("hi")), raw(echo("never said"))], {})) is None
    new.answer("yes")
    app.threads.ended("t")
    assert at_once(named) is None


async def test_what_goes_on_from_an_imported_conversation_is_a_trajectory_linked_to_it(
    app: App, engine: Engine, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": [user("hi"), echo()], "end_user": "ann"}), encoding="utf-8")
    wanted = ImportOptions(log, "default", "imported")
    run(engine, wanted, check(wanted, lambda _: None), lambda _: None)
    with engine.connect() as connection:
        imported_id = connection.execute(select(schema.completions.c.id)).scalar_one()
    hers, his = [await app.ask(user("hi"), echo(), user("on"), end_user=name) for name in ("ann", "bob")]
    assert (hers.place.by, hers.place.continues) == ("after", imported_id)
    assert (his.place.by, his.place.continues) == ("new", None)
    hers.answer("yes")
    his.answer("yes")


LONG, OTHER = "Take the third bridge, then turn left.", "Stay on this side of the river all day."


def as_code_agents_do(text: str) -> dict[str, Any]:
    """Return an answer as smolagents sends it back."""
    return echo(f"{text}</code>\nCalling tools:\n[{{'id': 'call_1', 'function': {{'name': 'python_interpreter'}}}}]")


async def test_a_rewritten_answer_goes_on_in_its_trajectory(app: App, later: Any) -> None:
    first = await app.turn(user("a"), text=LONG, version=1)
    later()
    said = [user("a"), as_code_agents_do(LONG), user("b")]
    second = await app.ask(*said)
    assert (second.place.by, second.place.extends, pinned(second)) == ("rewritten", first.id, 1)
    second.answer(OTHER)
    later()
    third = await app.turn(*said, as_code_agents_do(OTHER), user("c"))
    assert (third.trajectory_id, third.extends) == (first.trajectory_id, second.id)


async def test_an_example_after_the_prompt_of_another_call_is_no_answer_of_it(app: App, later: Any) -> None:
    """The app also asks what stands first in its few-shot prompts; only one such call is open."""
    first = await app.turn(user("a"), text=LONG)
    later()
    for example in (OTHER, "yes", LONG[:20], LONG.replace("left", "right")):
        few_shot = await app.turn(user("a"), echo(example), user("b"))
        assert (few_shot.threaded_by, few_shot.continues) == ("new", None)
    later()
    assert (await app.turn(user("a"), as_code_agents_do(LONG), user("b"))).extends == first.id


async def test_among_equal_prompts_the_answer_decides(app: App, later: Any) -> None:
    attempts = [await app.ask(user("a")) for _ in range(8)]
    texts = [f"{LONG} It is bridge number {number}." for number in range(8)]
    calls = [attempt.answer(text) for attempt, text in zip(attempts, texts, strict=True)]
    later()
    for call, text in reversed(list(zip(calls, texts, strict=True))):
        assert (await app.turn(user("a"), as_code_agents_do(text), user("b"))).extends == call.id


async def test_an_answer_that_two_attempts_gave_belongs_to_neither(app: App, later: Any) -> None:
    texts = (LONG, LONG.upper(), OTHER)
    calls = [await app.turn(user("a"), text=text) for text in texts]
    later()
    assert (await app.turn(user("a"), as_code_agents_do(LONG), user("b"))).threaded_by == "new"
    assert (await app.turn(user("a"), as_code_agents_do(OTHER), user("b"))).extends == calls[2].id


async def test_an_id_tells_which_of_two_equal_answers_was_read(app: App, later: Any) -> None:
    made = [{"id": f"chatcmpl-tool-00112233aabbcc{n}", "function": {"name": "f", "arguments": "{}"}} for n in (10, 11)]
    calls = [(await app.ask(user("a"))).answer("", tool_calls=[one]) for one in made]
    later()
    second = await app.turn(user("a"), echo(f"Calling tools:\n{[made[0]]}"), user("Observation:\n3"))
    assert (second.threaded_by, second.extends) == ("rewritten", calls[0].id)


async def test_among_very_many_open_calls_with_one_prompt_only_an_id_decides(app: App) -> None:
    calls = [await app.turn(user("a"), text=f"{LONG} Number {number}.") for number in range(70)]
    assert (await app.turn(user("a"), as_code_agents_do(f"{LONG} Number 69."), user("b"))).threaded_by == "new"
    with_id = {"role": "assistant", "id": f"msg_{calls[69].id}_0", "content": [{"type": "output_text", "text": "?"}]}
    assert (await app.turn(user("a"), with_id, user("b"))).extends == calls[69].id


async def test_each_choice_goes_on_by_its_own_text_since_they_share_an_id(app: App, later: Any) -> None:
    call = (await app.ask(user("a"))).answer(f"{LONG} Choice", n=3)
    later()
    rewritten = echo(json.dumps(f"{LONG} Choice 2")) | {"id": f"chatcmpl-{call.id}"} | {"id": f"chatcmpl-{call.id}"}
    assert (await app.turn(user("a"), rewritten, user("b"))).trajectory_id == f"{call.trajectory_id}.2"


async def test_what_goes_on_twice_from_a_rewritten_answer_is_a_fork(app: App, later: Any) -> None:
    first = await app.turn(user("a"), text=LONG)
    await app.turn(user("a"), as_code_agents_do(LONG), user("b"))
    later()
    other = await app.turn(user("a"), as_code_agents_do(LONG), user("another b"))
    assert (other.threaded_by, other.continues) == ("fork", first.id)


async def test_a_rewritten_answer_of_a_trajectory_that_has_ended_begins_another(app: App, later: Any) -> None:
    first = await app.turn(user("a"), text=LONG)
    later()
    app.threads.ended(first.id)
    app.write()
    with app.engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state="ended"))
    assert (await app.turn(user("a"), as_code_agents_do(LONG), user("b"))).threaded_by == "new"


async def test_a_rewritten_last_answer_goes_before_an_earlier_one_that_others_gave_as_well(
    app: App, later: Any
) -> None:
    """Two attempts began alike; the second one's first answer is still free."""
    one, other = [await app.turn(user("a"), text=OTHER) for _ in range(2)]
    second = await app.turn(user("a"), echo(OTHER), user("b"), text=LONG)
    later()
    third = await app.turn(user("a"), echo(OTHER), user("b"), as_code_agents_do(LONG), user("c"))
    assert (second.extends, third.extends, third.trajectory_id) == (one.id, second.id, one.trajectory_id)
    lost = await app.turn(user("a"), echo(OTHER), user("b"), echo("(left out)"), user("c"))
    assert lost.trajectory_id not in (one.trajectory_id, other.trajectory_id)


async def test_a_call_that_broke_off_and_its_retry_are_one_answer(app: App, later: Any) -> None:
    (await app.ask(user("a"))).answer(LONG, status="aborted")
    again = await app.turn(user("a"), text=f"{LONG} And then?", retry=True)
    later()
    assert (await app.turn(user("a"), as_code_agents_do(f"{LONG} And then?"), user("b"))).extends == again.id


async def test_users_with_the_same_prompt_and_answer_keep_apart_where_it_is_rewritten(app: App, later: Any) -> None:
    calls = {name: await app.turn(user("a"), text=LONG, end_user=name) for name in ("ann", "bob")}
    later()
    said = user("a"), as_code_agents_do(LONG), user("b")
    assert (await app.turn(*said, end_user="bob")).extends == calls["bob"].id
    assert (await app.turn(*said, end_user="eve")).threaded_by == "new"


async def test_an_agent_that_hands_over_goes_on_in_the_same_trajectory(app: App, later: Any) -> None:
    """Another system prompt, and the call that handed over; its result says who it is now."""
    made = {"id": "chatcmpl-tool-00112233445566aa", "function": {"name": "transfer_to_billing", "arguments": "{}"}}
    triage, billing = ({"role": "system", "content": f"You are the {name} agent."} for name in ("triage", "billing"))
    first = (await app.ask(triage, user("a"))).answer("", tool_calls=[made])
    later()
    result = {"role": "tool", "tool_call_id": made["id"], "content": '{"assistant": "billing"}'}
    second = await app.turn(billing, user("a"), {"role": "assistant", "tool_calls": [made]}, result)
    assert (second.trajectory_id, second.threaded_by) == (first.trajectory_id, "tool_calls")


async def test_items_of_a_response_that_was_passed_on_go_on_by_their_ids(app: App, later: Any) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{n}",
            "call_id": f"call_0011223344556677{n}",
            "name": "f",
            "arguments": "{}",
        }
        for n in (10, 11)
    ]
    first = (await app.ask(user("a"))).answer(content=[thought, *calls])
    later()
    results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "3"} for one in calls]
    second = await app.turn(user("a, at 12:32"), thought, *calls, *results)
    assert (second.trajectory_id, second.threaded_by) == (first.trajectory_id, "tool_calls")


async def test_a_message_that_was_passed_on_goes_on_by_its_text(app: App, later: Any) -> None:
    item = {"type": "message", "id": "made by the server", "content": [{"type": "output_text", "text": "Yes."}]}
    first = (await app.ask(user("a"))).answer(content=[item | {"role": "assistant"}])
    later()
    part = {"type": "output_text", "text": "Yes."}
    second = await app.turn(user("a"), {"role": "assistant", "content": [part]}, user("b"))
    assert (second.trajectory_id, second.threaded_by) == (first.trajectory_id, "rewritten")


async def test_a_known_prompt_is_looked_up_and_an_unknown_one_is_not_looked_up_again(app: App) -> None:
    """Each attempt that SQL knows may be the one; a few-shot prompt that nobody asks for itself costs nothing."""
    lookups: list[Any] = []

    class Counting(ThreadTables):
        async def heads_of_prompts(self, prompts: Any, since_s: float) -> Any:
            lookups.append(prompts)
            return await super().heads_of_prompts(prompts, since_s)

    app.threads = TrajectoryResolver(Counting(app.engine, "default"), Alone(), IDLE_S)
    for number in range(5):
        await app.turn(user("1+1"), echo("2"), user(f"2+{number}"))
    assert len(lookups) == 1
    await app.turn(user("a"))
    await app.turn(user("a"), echo(), user("b"))
    assert len(lookups) == 1, "an exact continuation needs none"


WORDS = ["river", "bridge", "left", "right", "snow", "coat", "market", "harbour", "north", "tower", "late", "early"]


def made_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 8, 12]))).capitalize() + "."


def made_call(rng: random.Random) -> dict[str, Any]:
    arguments = json.dumps({"query": " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 4])))})
    call_id = f"chatcmpl-tool-{rng.getrandbits(64):016x}"
    return {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}


Render = Callable[[str, list[Any]], list[dict[str, Any]]]
"""Returns the messages that an app makes of an answer: its text, its tool calls."""


def rendered_call(call: Any) -> str:
    return str(call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}})


RENDERS: dict[str, Render] = {
    "tool agent": lambda text, calls: [echo(f"Calling tools:\n[{', '.join(map(rendered_call, calls))}]")],
    "code agent": lambda text, calls: [as_code_agents_do(text)],
    "tags": lambda text, calls: [echo(f"<answer>{text}</answer>")],
    "quotes": lambda text, calls: [echo(json.dumps({"thought": text, "calls": len(calls)}))],
    "spaces": lambda text, calls: [echo(text.replace(" ", "\n  ").lower())],
    "reasoning": lambda text, calls: [echo(f"<think>It is late.</think>\n{text}")],
    "ids": lambda text, calls: [echo("") | {"tool_calls": [one | {"id": f"call_{n}"} for n, one in enumerate(calls)]}],
    "actions": lambda text, calls: [
        echo(
            "\n".join(f"Action: search\nAction Input: {one['function']['arguments']}" for one in calls)
            or f"Thought: {text}"
        )
    ],
    "items": lambda text, calls: [
        *([echo() | {"content": [{"type": "output_text", "text": text}]}] if text else []),
        *({"type": "function_call", "call_id": one["id"], **one["function"]} for one in calls),
    ],
    "summary": lambda text, calls: [echo("(an earlier answer)")],
}


class RewritingTalk:
    """A conversation of an app that rewrites what was answered, and where its calls were put."""

    def __init__(self, first: str, render: str) -> None:
        self.messages: list[Any] = [user(first)]
        self.render = render
        self.trajectories: list[str] = []
        self.prompts = [1]
        """How many messages each of its prompts has."""
        self.busy = False

    def answered(self, asking: Asking, rng: random.Random) -> None:
        # Attempts at one prompt may come to the same answer.
        text = rng.choice((LONG, OTHER)) if rng.random() < 0.3 else made_text(rng)
        calls = [made_call(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
        asking.answer(text, **({"tool_calls": calls} if calls else {}))
        self.trajectories.append(asking.place.trajectory_id)
        self.prompts.append(len(self.messages))
        self.messages += [*RENDERS[self.render](text, calls), user(f"and then {rng.choice(WORDS)}")]
        self.busy = False


@pytest.mark.parametrize(
    ("seed_of_order", "count"), [(1, 100), (2, 100), pytest.param(0, 1000, marks=pytest.mark.long(part="exact"))]
)
async def test_rewriting_apps_equal_prompts_and_examples_are_never_confused(
    app: App, seed_of_order: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of the conversations begin eight at a time with one prompt; each kind of app is among them. Few-shot
    prompts begin with what others have asked, restarts and the writer come in between."""
    rng = random.Random(seed_of_order)
    firsts = [f"question {number if number % 3 else number // 24}" for number in range(count)]
    talks = [RewritingTalk(first, rng.choice(list(RENDERS))) for first in firsts]
    todo = [talk for talk in talks for _ in range(4)]
    rng.shuffle(todo)
    in_flight: list[tuple[RewritingTalk, Asking]] = []
    examples: list[str] = []
    while todo or in_flight:
        dice = rng.random()
        if dice < 0.01 and not in_flight:
            app.restart()
        elif dice < 0.03:
            app.write()
        elif dice < 0.1:
            talk = rng.choice(talks)
            begun = talk.messages[: rng.choice(talk.prompts)]
            few_shot = await app.turn(
                *begun, echo(made_text(rng).lower().rstrip(".")), user("and mine?"), text=made_text(rng)
            )
            examples.append(few_shot.trajectory_id)
        elif todo and (dice < 0.6 or not in_flight):
            talk = todo.pop()
            if talk.busy:
                todo.insert(0, talk)
                if in_flight:
                    talk, asking = in_flight.pop(rng.randrange(len(in_flight)))
                    talk.answered(asking, rng)
                continue
            talk.busy = True
            in_flight.append((talk, await app.ask(*talk.messages)))
        elif in_flight:
            talk, asking = in_flight.pop(rng.randrange(len(in_flight)))
            talk.answered(asking, rng)
    of_talks = Counter(trajectory_id for talk in talks for trajectory_id in set(talk.trajectories))
    assert [one for one, shared in of_talks.items() if shared > 1] == []
    assert len({*examples} | of_talks.keys()) == len(examples) + len(of_talks)
    share = {}
    for render in RENDERS:
        turns = [talk.trajectories for talk in talks if talk.render == render]
        joined = sum(one == before for placed in turns for before, one in itertools.pairwise(placed))
        share[render] = joined / max(1, sum(len(placed) - 1 for placed in turns))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(examples)} few-shot prompts; joined: { ({k: round(v, 2) for k, v in share.items()}) }\n"
        )
    assert share["summary"] == 0 < min(value for render, value in share.items() if render != "summary")
