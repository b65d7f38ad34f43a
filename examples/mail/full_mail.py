"""The full form: the inbox of `company` behind real tools, for models from 3B on."""

import datetime
import json
import random
from typing import Any

import company
from inbox import Case, Inquiry, InvalidCall, Mail, Message, Split

SYSTEM = """\
You answer questions about the inbox of {owner}. Today is {today}.
Search the inbox, read the mails that may have the answer, then return it. You have {turns} turns.
- search_inbox lists the {listed} newest mails that have all words of the query: few words find more.
- read_email shows a mail that a search has listed.
- return_final_answer ends it. The answer is the fact alone, as the mail writes it (a name, a date, an amount), \
without a sentence around it. The sources are the ids of the mails that state it, and no others.
A mail may only propose something, or be about another project with a similar name."""


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    _tool("search_inbox", "List the newest mails that have all words of the query.", query=TEXT),
    _tool("read_email", "Show a mail that a search has listed.", id=TEXT),
    _tool(
        "return_final_answer",
        "End with the answer and the ids of the mails that state it.",
        answer=TEXT,
        sources={"type": "array", "items": TEXT},
    ),
]
OPTIONS: dict[str, Any] = {"tools": TOOLS, "max_tokens": 1024}
"""What goes along with each request."""


def case(split: Split, rng: random.Random) -> Case:
    return company.draw(split, rng)


def messages(case: Case) -> list[Message]:
    """Return the messages of the first turn."""
    system = SYSTEM.format(owner=case.owner, today=_date(company.DAYS), turns=case.turns, listed=case.listed)
    return [{"role": "system", "content": system}, {"role": "user", "content": case.question}]


def replies(inquiry: Inquiry, content: str, calls: list[tuple[str, str, str]]) -> list[Message]:
    """Carry out the calls of one turn (id, tool, arguments as JSON) up to an answer; return their results."""
    inquiry.turns += 1
    results: list[Message] = []
    for call_id, tool, arguments in calls:
        results.append({"role": "tool", "tool_call_id": call_id, "content": _use(inquiry, tool, arguments)})
        if inquiry.final is not None:
            break
    if not calls:
        inquiry.errors += 1
        results.append({"role": "user", "content": "Call a tool. return_final_answer ends the task."})
    return results


def _use(inquiry: Inquiry, tool: str, arguments: str) -> str:
    """Return the result of a tool as JSON."""
    try:
        values = json.loads(arguments)
    except ValueError:
        values = None
    try:
        result = inquiry.use(tool, values)
    except InvalidCall as error:
        return json.dumps({"error": str(error)})
    if isinstance(result, Mail):
        return json.dumps(_head(result) | {"to": inquiry.case.owner, "body": result.body})
    return json.dumps([_head(mail) for mail in result or []])


def _head(mail: Mail) -> dict[str, str]:
    return {"id": mail.id, "date": _date(mail.day), "from": mail.sender, "subject": mail.subject}


def _date(day: int) -> str:
    return (datetime.date.fromisoformat(company.FIRST_DAY) + datetime.timedelta(days=day)).isoformat()
