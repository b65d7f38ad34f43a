"""The inboxes, the tools, the rewards and the app of examples/mail, and what the novice learns about it."""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import foreign_imports, run
from tests.examples.mail_player import MailPlayer
from whetstone.config.settings import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
APP = EXAMPLES / "mail" / "app.py"
sys.path[:0] = [str(EXAMPLES / "mail"), str(EXAMPLES / "novice")]

import company  # noqa: E402
import full_mail  # noqa: E402
import inbox  # noqa: E402
import mail  # noqa: E402
import small_mail  # noqa: E402

FORMS = {"small": small_mail, "full": full_mail}
SIZES = pytest.mark.parametrize("size", FORMS)


def draw(size: str, split: inbox.Split = "train", number: int = 0) -> inbox.Case:
    case: inbox.Case = FORMS[size].case(split, random.Random(f"{split} {number}"))
    return case


def stands(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


# The inboxes.


@SIZES
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_answer_stands_in_one_mail_which_tools_show_only_when_it_is_read(size: str, split: inbox.Split) -> None:
    for number in range(40):
        case = draw(size, split, number)
        assert [mail.id for mail in case.mails if stands(mail.body, case.answer)] == [case.source]
        (source,) = (mail for mail in case.mails if mail.id == case.source)
        assert not stands(f"{case.question} {source.sender} {source.subject}", case.answer)
        inquiry = inbox.Inquiry(case)
        shown = [m["content"] for m in FORMS[size].messages(case)]
        for word in re.findall(r"\w+", f"{case.question} {source.subject}"):
            results = inquiry.use("search_inbox", {"query": word})
            assert not any(stands(f"{mail.id} {mail.subject}", case.answer) for mail in results)
        assert not any(stands(text, case.answer) for text in shown)


@SIZES
@pytest.mark.parametrize("split", ["train", "eval"])
def test_at_least_three_other_mails_share_words_with_the_right_one(size: str, split: inbox.Split) -> None:
    frame = {"the", "of", "for", "is", "in", "on", "by", "what", "who", "which", "how"}
    for number in range(40):
        case = draw(size, split, number)
        wanted = set(re.findall(r"\w+", case.question.lower())) - frame
        near = [mail for mail in case.mails if wanted & set(re.findall(r"\w+", f"{mail.subject} {mail.body}".lower()))]
        assert len(near) >= 4 and case.source in {mail.id for mail in near}


def test_a_wanted_fact_has_a_doubt_another_fact_of_its_project_and_the_same_fact_of_a_similar_project() -> None:
    for number in range(40):
        case = draw("full", number=number)
        by_id = {mail.id: mail for mail in case.mails}
        right = by_id[case.source]
        alike = [mail for mail in case.mails if mail.subject == right.subject and mail != right]
        assert len(alike) == 1 and alike[0].day < right.day
        names = [f"{one} {other}" for one in company.COLOURS["train"] for other in company.ANIMALS["train"]]
        (project,) = (name for name in names if stands(right.subject, name))
        assert len({mail.subject for mail in case.mails if stands(mail.subject, project)}) >= 2
        topic = right.subject.split()[0:2]
        similar = [mail for mail in case.mails if mail.subject.split()[0:2] == topic and mail.subject != right.subject]
        assert any(set(project.split()) & set(mail.subject.split()) for mail in similar)


def test_no_fact_is_stated_twice_in_an_inbox() -> None:
    for number in range(20):
        case = draw("full", number=number)
        facts = [re.split(r"\{\w+\}", topic.fact)[0] for topic in company.TOPICS]
        stated = Counter(mail.subject for mail in case.mails if any(fact and fact in mail.body for fact in facts))
        assert set(stated.values()) == {1} and len(stated) > 2 * company.FACTS
        assert len({mail.id for mail in case.mails}) == len(case.mails) == 4 * company.FACTS + company.CHATTER
        assert max(mail.day for mail in case.mails) - min(mail.day for mail in case.mails) > 120


def test_held_out_inboxes_share_no_name_with_training() -> None:
    for words in (small_mail.PROJECTS, small_mail.PEOPLE):
        train, held_out = (small_mail.of_split(words, split) for split in ("train", "eval"))
        assert not set(train) & set(held_out) and len(held_out) == 8 and len(train) == 24
    for names in (company.FIRST, company.LAST, company.COLOURS, company.ANIMALS, company.SUPPLIERS):
        assert not set(names["train"]) & set(names["eval"])
    splits: tuple[inbox.Split, ...] = ("train", "eval")
    projects = {split: {m.id.split()[0] for k in range(60) for m in draw("small", split, k).mails} for split in splits}
    assert not projects["train"] & projects["eval"]


@SIZES
def test_the_same_generator_draws_the_same_inbox(size: str) -> None:
    assert draw(size, number=3) == draw(size, number=3) != draw(size, number=4)


def test_a_small_inbox_has_a_mail_for_each_project_and_kind_and_three_by_its_owner() -> None:
    for number in range(60):
        case = draw("small", number=number)
        projects = Counter(mail.id.split()[0] for mail in case.mails)
        assert [*projects.values()] == [3] * 6 and len({mail.id for mail in case.mails}) == 18
        assert sum(mail.sender == case.owner for mail in case.mails) == 3
        assert not any(stands(mail.body, case.owner) for mail in case.mails)
        project = case.source.split()[0]
        assert case.question == f"the {case.source.split()[1]} of {project} ?"


# Tools and rewards.


def small_case() -> inbox.Case:
    mails = (
        inbox.Mail("Falcon place", 3, "Anna", "Falcon place", "place of Falcon was Oslo , now Rome ."),
        inbox.Mail("Otter place", 2, "Hugo", "Otter place", "place of Otter now Bern , was Paris ."),
        inbox.Mail("Falcon day", 1, "Anna", "Falcon day", "day of Falcon was Monday , now Friday ."),
        inbox.Mail("Lynx day", 0, "Hugo", "Lynx day", "day of Lynx was Sunday , now Monday ."),
    )
    return inbox.Case(mails, "Nina", "the place of Falcon ?", "Rome", "Falcon place", turns=4, listed=2)


def commands(*texts: str) -> tuple[inbox.Inquiry, list[str]]:
    inquiry = inbox.Inquiry(small_case())
    shown = [message["content"] for text in texts for message in small_mail.replies(inquiry, text, [])]
    return inquiry, shown


def test_a_small_conversation_reads_as_the_readme_shows_it() -> None:
    assert [m["content"] for m in small_mail.messages(small_case())] == [
        "search , read or answer",
        "for Nina : the place of Falcon ?",
    ]
    inquiry, shown = commands("search Falcon", "read Falcon place", "answer Rome")
    assert shown == ["mails : Falcon place , Falcon day", "from Anna : place of Falcon was Oslo , now Rome ."]
    assert inquiry.solved() and inquiry.is_over
    assert inquiry.reward() == pytest.approx(1.0 + 0.1 * (1 - 3 / 4))


def test_a_search_lists_the_newest_mails_that_have_every_word() -> None:
    assert commands("search place")[1] == ["mails : Falcon place , Otter place"]
    assert commands("search now")[1] == ["mails : Falcon place , Otter place"]
    assert commands("search falcon DAY")[1] == ["mails : Falcon day"]
    assert commands("search Hugo")[1] == ["mails : Otter place , Lynx day"]
    assert commands('search NOT "Falcon* OR')[1] == commands("search Falcon Bern")[1] == ["mails : none"]


@pytest.mark.parametrize(
    ("texts", "reward", "errors"),
    [
        (["search Falcon", "read Falcon place", "answer Oslo"], 0.1 + 0.2 + 0.2, 0),
        (["search Falcon", "read Falcon day", "answer Friday"], 0.1, 0),
        (["search Falcon", "answer Rome"], 0.1 + 0.5, 0),
        (["search Otter", "read Otter place", "answer Rome"], 0.5, 0),
        (["search Hugo", "read Otter place", "answer Bern"], 0.0, 0),
        (["search Falcon", "read Falcon place", "answer rome ."], 1.025, 0),
        (["search Falcon", "read Falcon place", "answer the Rome"], 0.5, 0),
        (["read Falcon place", "search Falcon", "read Falcon place", "answer Rome"], 1.0 - 0.1, 1),
        (["hello", "search Falcon", "read Falcon place", "answer Rome"], 1.0 - 0.1, 1),
        (["search Falcon"] * 4, 0.1 - 0.5, 0),
        (["search", "read", "", "Rome"], -0.5 - 0.4, 4),
        (["answer"], 0.0, 0),
    ],
)
def test_what_an_attempt_is_worth(texts: list[str], reward: float, errors: int) -> None:
    inquiry, _ = commands(*texts)
    assert inquiry.is_over and inquiry.errors == errors and inquiry.reward() == pytest.approx(reward)
    assert inquiry.solved() == (reward > 0.8)


def test_rewards_are_from_minus_1_to_1_1() -> None:
    worst = inbox.Inquiry(draw("full"))
    while not worst.is_over:
        full_mail.replies(worst, "", [("1", "nothing", "{"), ("2", "read_email", "[]")])
    assert worst.reward() == pytest.approx(-1.0) and worst.errors == 2 * company.TURNS
    best = inbox.Inquiry(case := draw("full"))
    best.use("search_inbox", {"query": " ".join(case.question.split()[-2:])})
    best.listed.add(case.source)
    best.use("read_email", {"id": case.source})
    best.use("return_final_answer", {"answer": case.answer, "sources": [case.source]})
    assert best.reward() == pytest.approx(1.1) and best.solved()


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        ("4310 Euros.", "4,310 euros", True), ("Karl  Weber", "karl weber", True), ("PO 48213", "PO-48213", True),
        ("1 July", "11 July", False), ("It is Rome", "Rome", False), ("Rome or Oslo", "Rome", False),
        ("", "Rome", False),
    ],
)  # fmt: skip
def test_letter_case_and_punctuation_do_not_count(given: str, right: str, equal: bool) -> None:
    assert (inbox.plain(given) == inbox.plain(right)) == equal


def call(tool: str, **arguments: Any) -> tuple[str, str, str]:
    return "call_1", tool, json.dumps(arguments)


def test_the_full_form_is_played_with_tools() -> None:
    inquiry = inbox.Inquiry(case := draw("full"))
    (source,) = (mail for mail in case.mails if mail.id == case.source)
    (result,) = full_mail.replies(inquiry, "", [call("search_inbox", query=source.subject)])
    listed = json.loads(result["content"])
    assert result["role"] == "tool" and {entry["subject"] for entry in listed} == {source.subject}
    assert set(listed[0]) == {"id", "date", "from", "subject"} and len(listed) == 2
    (shown,) = full_mail.replies(inquiry, "", [call("read_email", id=source.id)])
    assert json.loads(shown["content"])["body"] == source.body and stands(source.body, case.answer)
    full_mail.replies(inquiry, "", [call("return_final_answer", answer=case.answer, sources=[source.id])])
    assert inquiry.solved() and inquiry.reward() == pytest.approx(1.0 + 0.1 * 0.7)


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        ("search_inbox", "{", "no JSON object"), ("search_inbox", "[]", "no JSON object"),
        ("search_inbox", "{}", "wrong arguments"), ("search_inbox", '{"query": "?"}', "no word"),
        ("search_inbox", '{"query": 7}', "no word"), ("search_inbox", f'{{"query": "{"a " * 17}"}}', "more than 16"),
        ("search_inbox", '{"text": "x"}', "wrong arguments"),
        ("read_email", '{"id": "1"}', "no search has listed"), ("open", "{}", "no such tool"),
        ("return_final_answer", '{"answer": "x"}', "wrong arguments"),
        ("return_final_answer", '{"answer": "x", "sources": "1"}', "a list"),
    ],
)  # fmt: skip
def test_a_call_that_is_not_valid_is_answered_with_why_and_counted(tool: str, arguments: str, error: str) -> None:
    inquiry = inbox.Inquiry(draw("full"))
    (reply,) = full_mail.replies(inquiry, "", [("call_1", tool, arguments)])
    assert error in json.loads(reply["content"])["error"] and (inquiry.errors, inquiry.final) == (1, None)


def test_a_turn_without_a_call_is_an_error_and_calls_after_the_answer_are_not_carried_out() -> None:
    inquiry = inbox.Inquiry(draw("full"))
    (reply,) = full_mail.replies(inquiry, "It is Rome.", [])
    assert reply["role"] == "user" and inquiry.errors == 1
    answer = call("return_final_answer", answer="x", sources=[])
    full_mail.replies(inquiry, "", [answer, call("search_inbox", query="review")])
    assert inquiry.is_over and not inquiry.listed


# What the novice learns.


def play(case: inbox.Case, rng: random.Random, rule: bool) -> inbox.Inquiry:
    """Play at random, or by the simple rule: the project, the mail of the wanted kind, the word after `now`."""
    inquiry, project = inbox.Inquiry(case), case.question.split()[-2]
    messages = small_mail.messages(case)
    while not inquiry.is_over:
        shown = messages[-1]["content"]
        command = rng.choice(legal := mail.legal(inquiry, shown))
        if rule:
            now = shown.split(" now ")[-1].split()[0]
            wanted = f"{project} {case.question.split()[1]}"
            command = next(c for c in (f"answer {now}", f"read {wanted}", f"search {project}") if c in legal)
        messages += [{"role": "assistant", "content": command}, *small_mail.replies(inquiry, command, [])]
    return inquiry


@pytest.mark.parametrize("split", ["train", "eval"])
def test_random_play_solves_a_twelfth_and_a_simple_rule_all(split: inbox.Split) -> None:
    cases = [draw("small", split, number) for number in range(600)]
    at_random = sum(play(case, random.Random(k), rule=False).solved() for k, case in enumerate(cases))
    assert 0.05 * 600 < at_random < 0.12 * 600
    assert all(play(case, random.Random(k), rule=True).solved() for k, case in enumerate(cases[:200]))


def test_the_novice_sees_whole_attempts_that_are_legal_and_no_better_than_random() -> None:
    words, solved, searches = set[str](), 0, Counter[int]()
    for number in range(600):
        conversation = mail.attempt(random.Random(number))
        texts = [message["content"] for message in conversation.messages]
        assert [m["role"] for m in conversation.messages] == ["system", *["user", "assistant"] * 3]
        assert [text.split()[0] for text in texts[2::2]] == ["search", "read", "answer"] and "error" not in texts
        words |= {word for text in texts for word in text.split()}
        question = texts[1].split()
        searches[question.index(texts[2].split()[1])] += 1
        wanted = f"read {question[-2]} {question[4]}"
        solved += texts[4] == wanted and texts[6].split()[1] == texts[5].split(" now ")[1].split()[0]
        assert sum(len(text.split()) + 5 for text in texts) < 100
    assert 0.05 * 600 < solved < 0.12 * 600
    assert len(searches) == 3 and min(searches.values()) > 150
    assert words - set(",:?.") <= set(mail.WORDS) and len(mail.WORDS) <= 150


def test_the_novice_meets_the_words_of_both_splits_but_not_their_inboxes() -> None:
    projects = {mail.attempt(random.Random(number)).messages[1]["content"].split()[-2] for number in range(500)}
    assert projects == set(small_mail.PROJECTS)
    assert mail.conversation(random.Random(1)) == mail.conversation(random.Random(1))


def test_what_is_repeated_has_the_word_or_follows_it_and_is_never_an_attempt() -> None:
    kinds = Counter[tuple[int, bool]]()
    for number in range(400):
        texts = [message["content"] for message in mail.repeated(random.Random(number)).messages]
        word, shown = texts[1].split(" : ", 1) if len(texts) == 3 else (texts[1].removesuffix(" ?"), texts[3])
        answer = texts[-1].removeprefix("repeat ")
        of_subjects = len(answer.split()) == 2
        assert texts[0] != small_mail.SYSTEM
        assert word in answer.split() if of_subjects else f" {word} {answer} " in f" {shown} "
        kinds[len(texts), of_subjects] += 1
    assert len(kinds) == 4 and min(kinds.values()) > 60


# The app.


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 60
    assert foreign_imports(APP) == {"episodes", "full_mail", "small_mail", "inbox"}
    for module in ("inbox", "company", "full_mail", "small_mail", "rule_judge"):
        assert foreign_imports(APP.with_name(f"{module}.py")) <= {"inbox", "company"}
    assert foreign_imports(EXAMPLES / "novice" / "mail.py") == {"conversation", "small_mail", "inbox"}


@pytest.mark.parametrize("name", ["mail", "langgraph"])
def test_the_settings_for_a_gpu_are_settings(name: str) -> None:
    settings = load(EXAMPLES / name / "gpu.toml", environment={})
    assert (
        settings.policy == "mail" and f"--config examples/{name}/gpu.toml" in (EXAMPLES / name / "gpu.toml").read_text()
    )


@pytest.fixture
def server() -> Iterator[MailPlayer]:
    with MailPlayer() as server:
        yield server


@pytest.mark.slow
def test_attempts_at_a_question_are_a_group_and_each_gets_its_reward(server: MailPlayer) -> None:
    report = run(APP, server, "--questions", "48", "--attempts", "8")
    assert (report["questions"], report["failed_requests"]) == (48, 0)
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {8: 6} and len(server.headers_seen) == 3 * 48
    rewards = {posted["trajectory_id"]: posted["reward"] for posted in server.feedback}
    assert rewards.keys() == groups.keys() and set(rewards.values()) <= {0.1, 1.025}
    assert report["solved"] == 8 * len({groups[name] for name, reward in rewards.items() if reward > 1})


@pytest.mark.slow
def test_an_answer_that_is_no_command_costs_and_does_not_end_the_attempt(server: MailPlayer) -> None:
    server.wrong_every = 2
    report = run(APP, server, "--questions", "12", "--attempts", "4", "--connections", "1")
    assert report["failed_requests"] == 0 and len(server.feedback) == 12
    assert all(posted["reward"] <= -0.5 for posted in server.feedback)


@pytest.mark.slow
def test_held_out_questions_are_marked_and_get_no_reward(server: MailPlayer) -> None:
    report = run(APP, server, "--questions", "20", "--split", "eval")
    assert len(report["each"]) == len(report["fields"]) == 20 and sum(report["each"]) == report["solved"]
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert not any("x-group-id" in headers for headers in server.headers_seen) and server.feedback == []


@pytest.mark.slow
def test_the_full_form_offers_tools_and_ends_with_the_answer(server: MailPlayer) -> None:
    for number in range(4):
        case = full_mail.case("train", random.Random(f"train 0 {number} "))
        server.answers[case.question] = case.answer
    report = run(APP, server, "--size", "full", "--questions", "8", "--attempts", "2")
    assert (report["questions"], report["failed_requests"]) == (8, 0) and 0 < report["solved"] < 8
    assert sum(posted["reward"] > 1 for posted in server.feedback) == report["solved"]
    assert all(body["tools"] == full_mail.TOOLS for body in server.bodies)
    assert max(len(body["messages"]) for body in server.bodies) <= 2 * company.TURNS
