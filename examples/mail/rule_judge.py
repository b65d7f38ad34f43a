"""A judge by rule, for places where no strong language model can be reached. Pure.

It reads the request of RULER and nothing else: no inbox, no list of names, no right answers. It reads as a careful
person would who knows English, and judges each attempt by its own texts:

- it searched with a word of the question;
- it read a mail that has all words that matter in the question;
- its answer stands in that mail where the fact is: next to "is", "in", "by", "now" or the like, in a clause that has a
  word of the question or begins with "now", and neither doubts it nor calls it past;
- the source that it cites is that mail;
- it made few errors and took few turns.

It errs where a reader of one attempt must: it cannot know of a better mail that the attempt did not read. A rubric of
one's own changes nothing in it. `noise` is added to each score, as models' judgements vary.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_ATTEMPT = re.compile(r'<attempt id="(\w+)">\n(.*?)</attempt>', re.DOTALL)
_SECTION = re.compile(r"<(context|tools)>\n(.*?)</\1>\n?", re.DOTALL)
_PARTS = re.compile(r'"parts": \{([^}]*)\}')
_COMMANDS = {"search": "search_inbox", "read": "read_email", "answer": "return_final_answer"}
_NO_CONTENT = frozenset(
    re.findall(
        r"\w+",
        "a an the of for to by on in at is are was were be does do did has have who whom whose what which when where "
        "how much many large day city place name new now please",
    )
)
"""Words of a question that need not stand in the mail that answers it."""
_KIND_WORDS = frozenset({"place", "day", "city", "name"})
"""Of these, words that matter where the question has no verb: "the place of ..."."""
_DOUBTS = re.compile(
    r"\b(was|were|could|might|may|maybe|perhaps|proposed|propose|hoped|expected|asked|refused|open|cancelled|old|former|"
    r"formerly|not yet|instead of|no longer|not)\b"
)
_BEFORE, _AFTER = r"(?:^|\b(?:is|are|in|on|at|by|now)\b)\s*", r"\s*(?:$|\b(?:is|are)\b)"
"""What stands before and after a fact in its clause."""
_OF_NUMBERS = frozenset({"large", "much", "many", "total", "number"})
"""Words of a question that wants a number."""
_CLAUSE = re.compile(r"[;:!?\n]|,(?!\d)|\.(?!\d)")

SOLVED, WRONG_SOURCE, EFFORT = 0.95, 0.6, 0.4
"""Scores before errors and turns count: of an attempt that reached the goal, of one that cites another source, and the
most of any other attempt."""
MOST_COST = 0.3


@dataclass(frozen=True)
class Judgement:
    """What an attempt is worth."""

    goal: float
    """How far it came, 0 to 1."""
    cost: float
    """Its errors and turns, 0 to MOST_COST."""
    why: str

    @property
    def score(self) -> float:
        return max(0.0, self.goal - self.cost)

    def part(self, name: str) -> float:
        """Return the score of a named part: how economical it was where the name is about that, else the goal."""
        return 1 - self.cost / MOST_COST if re.search(r"effici|econom|cost|step|turn", name.lower()) else self.goal


@dataclass
class Attempt:
    """An attempt, as far as its texts show it."""

    searches: list[str] = field(default_factory=list)
    mails: dict[str, str] = field(default_factory=dict)
    """Text of each mail that was read, by the name it was read by."""
    answer: str | None = None
    sources: list[str] | None = None
    """None: the agent could not name any."""
    errors: int = 0
    turns: int = 0


def scores(messages: list[Message], rng: random.Random, noise: float = 0.0) -> dict[str, Any]:
    """Return what a judge answers to a request of RULER: {"scores": [...]}.

    `noise`: standard deviation of what is added to each score, which stays within 0 to 1.
    """
    system, user = (str(message["content"]) for message in (messages[0], messages[-1]))
    sections = dict(_SECTION.findall(user.partition("<attempt ")[0]))
    context = list(_lines(sections.get("context", "")))
    shape = _PARTS.search(system)
    parts = re.findall(r'"(\w+)"', shape[1]) if shape else []
    items = []
    for name, text in _ATTEMPT.findall(user):
        attempt_lines = [*context, *_lines(_SECTION.sub("", text))]
        judgement = judge(attempt_lines)
        item: dict[str, Any] = {"id": name, "explanation": judgement.why}
        if parts:
            item["parts"] = {part: _noisy(judgement.part(part), rng, noise) for part in parts}
        else:
            item["score"] = _noisy(judgement.score, rng, noise)
        items.append(item)
    return {"scores": items}


def judge(lines: list[Any]) -> Judgement:
    """Return the judgement of an attempt, from its messages."""
    question = next((_text(line) for line in lines if _role(line) == "user"), "")
    wanted = content_words(question)
    attempt = read_attempt(lines)
    searched = any(wanted & words(query) for query in attempt.searches)
    coverage = {name: len(wanted & words(text)) / max(1, len(wanted)) for name, text in attempt.mails.items()}
    best = max(coverage.values(), default=0.0)
    proofs = [
        name for name, text in attempt.mails.items() if coverage[name] == 1 and _states(text, attempt.answer, question)
    ]
    cost = min(0.2, 0.05 * attempt.errors) + min(0.1, 0.01 * attempt.turns)
    if proofs and (attempt.sources is None or attempt.sources == proofs[-1:]):
        return Judgement(SOLVED, cost, "the answer stands in the mail about it, which is the source")
    if proofs:
        return Judgement(WRONG_SOURCE, cost, "the answer stands in the mail about it, but the source is another")
    effort = EFFORT * (0.2 * searched + 0.5 * best + 0.2 * (attempt.answer is not None) + 0.1 * (best == 1))
    if attempt.answer is None:
        why = "no answer"
    elif not attempt.mails:
        why = "an answer without any mail read"
    else:
        why = "the mail that was read does not state the answer" if best == 1 else "no mail about it was read"
    return Judgement(effort, cost, why)


def content_words(question: str) -> frozenset[str]:
    """Return the words of a question that matter, without the person it is for."""
    listed = words(question.rpartition(" : ")[2])
    matter = listed - _NO_CONTENT
    return matter | (listed & _KIND_WORDS) if len(matter) < 2 else matter


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold()))


def read_attempt(lines: list[Any]) -> Attempt:
    """Return the searches, mails and answer of an attempt: each call with the message that answered it."""
    attempt = Attempt()
    for place, line in enumerate(lines):
        if _role(line) != "assistant":
            continue
        attempt.turns += 1
        calls = list(_calls(line))
        attempt.errors += not calls
        for call_id, tool, arguments in calls:
            result = _result(lines[place + 1 :], call_id)
            failed = result is not None and re.match(r'\s*(error\b|\{"error")', result) is not None
            attempt.errors += failed or tool not in _COMMANDS.values()
            if failed:
                continue
            if tool == "search_inbox":
                attempt.searches.append(str(arguments.get("query", "")))
            elif tool == "read_email" and result:
                attempt.mails[str(arguments.get("id", ""))] = _mail_text(result)
            elif tool == "return_final_answer":
                attempt.answer = str(arguments.get("answer", ""))
                sources = arguments.get("sources")
                attempt.sources = [str(source) for source in sources] if isinstance(sources, list) else None
    return attempt


def _calls(line: Message) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
    """Return the calls of a message (id, tool, arguments): tools, or a command in its text."""
    calls = line.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield call.get("id"), str(function.get("name")), _object(function.get("arguments"))
    command, _, rest = _text(line).strip().partition(" ")
    if not calls and command in _COMMANDS:
        argument = {"search": "query", "read": "id", "answer": "answer"}[command]
        yield None, _COMMANDS[command], {argument: rest.strip()}


def _result(later: list[Any], call_id: str | None) -> str | None:
    """Return the message that answered a call, from those before the next turn."""
    for line in later:
        if _role(line) == "assistant":
            return None
        if call_id is None or (isinstance(line, dict) and line.get("tool_call_id") == call_id):
            return _text(line)
    return None


def _mail_text(result: str) -> str:
    """Return subject and body of a mail, or the text as it stands."""
    mail = _object(result)
    return f"{mail.get('subject', '')}.\n{mail['body']}" if "body" in mail else result


def _states(text: str, answer: str | None, question: str) -> bool:
    """Return whether the answer stands in the text where the fact is, in a clause that does not take it back."""
    wanted, listed = content_words(question), words(question)
    answered = re.findall(r"\w+", (answer or "").casefold())
    if not set(answered) - listed or answered[0] in _NO_CONTENT:
        return False
    if listed & _OF_NUMBERS and not re.search(r"\d", str(answer)):
        return False
    value = re.escape(str(answer).strip(" .").casefold())
    stands = re.compile(_BEFORE + value + _AFTER)
    clauses = [clause.casefold().strip() for clause in _CLAUSE.split(text)]
    about = [clause for clause in clauses if clause.startswith("now ") or wanted & words(clause)]
    return any(stands.search(clause) and not _DOUBTS.search(clause) for clause in about)


def _lines(section: str) -> Iterator[Any]:
    """Return the messages of a section. What RULER remarks on a gap is none."""
    for line in section.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and "note" not in message:
            yield message


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _role(line: Any) -> str:
    return str(line.get("role", "")) if isinstance(line, dict) else ""


def _text(line: Message) -> str:
    content = line.get("content")
    return content if isinstance(content, str) else ""


def _noisy(worth: float, rng: random.Random, noise: float) -> float:
    return round(min(1.0, max(0.0, worth + (rng.gauss(0, noise) if noise else 0.0))), 4)
