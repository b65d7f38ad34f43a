"""The page docs/clients.md: a row for each client, as its last run was."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.clients.report import Row
from benchmarks.clients.table import QUESTIONS, Client

HEAD = """<!-- Made by `make clients`, which runs the clients; edit benchmarks/clients instead. -->

# Clients

What existing agents and clients send, what becomes of their calls, and how to name a trajectory with each. `make clients` installs
each package into an environment of its own and runs a small app, unchanged but for address, key and model: two tools, three turns of one
conversation, a tool call in the first; streamed where that is the client's default. The apps are in `benchmarks/clients/apps`.

**Behind the proxy** is no model but a server that speaks vLLM's chat with token ids and logprobs and answers by rule
(`benchmarks/fakes/tool_vllm.py`), so that each run is the same: a small model hardly calls tools by itself. What the real vLLM does with
such requests is compared in `tests/integration` and `tests/clients`.
"""
COLUMNS = """- **works**: the app got all its answers, and no request was refused.
- **recorded**: calls that SQL has, of those that a tap between app and proxy counted.
- **trajectories**: what the conversation became; in brackets what it is when the base URL names it (`…/r/trajectory/<id>/v1`).
- **trainable**: share of the sampled tokens that are in completions with token ids and without a [reason](why_not_trained.md) against them.
- **decided**: share that a grammar or a truncation decided, where a step has measured it.
- **feedback**: the id that the app holds, and `POST /v1/feedback` takes. With the others, name the trajectory
  ([whose call is this?](whose_call.md)) and give feedback on that.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    lines = [HEAD, _questions(), COLUMNS, "| client | version | asks | works | recorded | trajectories | trainable | decided | "
             "feedback | a trajectory's name | remarks |", "|" + "---|" * 11]  # fmt: skip
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def clients_of(text: str) -> list[str]:
    """Return the titles in the rows of a page, in order."""
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count("|") > 6]
    return [cell[0].removeprefix("| ") for cell in cells[1:]]


def _questions() -> str:
    return f"The questions: {' '.join(f'*{question}*' for question in QUESTIONS)}\n"


def _line(row: Row) -> str:
    client = row.client
    named = "" if row.named is None else f" ({row.named})"
    cells = [
        client.title,
        client.version,
        ", ".join(row.endpoints) or "–",
        "yes" if "works" not in row.lacking else "no",
        f"{row.recorded} of {row.calls}",
        f"{row.trajectories}{named}{_of(client)}",
        f"{row.share:.0%}",
        "–" if row.decided is None else f"{row.decided / max(row.sampled, 1):.0%}",
        "the answer's id" if row.answer_id else "the trajectory's name",
        client.remark,
        _remarks(row),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _of(client: Client) -> str:
    return f" of {client.trajectories} conversations" if client.trajectories > 1 else ""


def _remarks(row: Row) -> str:
    remarks = [f"`{reason}` in {times}" for reason, times in row.reasons.items()]
    remarks += [f"{what} in {times}" for what, times in row.constraints.items()]
    remarks += [f"refused: {error[:160]}" for error in row.refused]
    if rules := _threads(row.threaded_by):
        remarks.append(f"threaded by {rules}")
    return "; ".join(remarks)


def _threads(rules: Counter[Any]) -> str:
    return ", ".join(f"`{rule}`" for rule in rules if rule != "new")
