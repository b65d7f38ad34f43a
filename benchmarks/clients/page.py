"""The page docs/clients.md: a row for each client, as in its last run."""

from collections.abc import Sequence

from benchmarks.clients.report import Row
from benchmarks.clients.table import CLIENTS, QUESTIONS

HEAD = f"""<!-- Made by `make clients`, which runs the clients; edit benchmarks/clients instead. -->

# Clients

What existing agents and clients send, what becomes of their calls, and how to name a trajectory with each. `make
clients` installs each package into an environment of its own and runs a small app, unchanged but for address, key and
model: two tools, three turns of one conversation, a tool call in the first, streamed if it does so by default.
The apps are in `benchmarks/clients/apps`, the versions in `benchmarks/clients/table.py`.

**Behind the proxy** is no model but a server that speaks vLLM's chat with token ids and logprobs and answers by rule
(`benchmarks/fakes/tool_vllm.py`), so that each run is the same: a small model hardly calls tools by itself. What the
real vLLM does with such requests is compared in `tests/integration` and `tests/clients`.

The questions: {" ".join(f"*{question}*" for question in QUESTIONS)}

- **works**: the app got its last answer, and no request was refused.
- **recorded**: calls that SQL has, of those that a tap between app and proxy counted.
- **trajectories**: what the conversation became; in brackets what it is when the URL names it.
- **trainable**: share of the sampled tokens in completions with token ids and without a [reason](why_not_trained.md).
- **decided**: share that a grammar or a truncation decided, where a step has measured it.
- **feedback, name**: whether the app holds an answer's id, which `POST /v1/feedback` takes; and where it can name its
  trajectory, so that feedback on that name does as well ([whose call is this?](whose_call.md)). The URL is
  `http://127.0.0.1:8000/r/trajectory/<id>/v1`, with `/v1` only where the base URL of the client has it.

"""
COLUMNS = ("client", "asks", "works", "recorded", "trajectories", "trainable", "decided", "feedback, name", "remarks")


def page(rows: Sequence[Row], before: str = "") -> str:
    """Return the page. `before`: the page so far, whose rows stay for clients that were not run now."""
    lines = lines_of(before) | {row.client.label: _line(_cells(row)) for row in rows}
    table = [lines[client.label] for client in CLIENTS if client.label in lines]
    return HEAD + "\n".join([_line(COLUMNS), "|" + "---|" * len(COLUMNS), *table]) + "\n"


def lines_of(text: str) -> dict[str, str]:
    """Return the lines of a page's table by their clients, in order."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cells(row: Row) -> list[str]:
    client = row.client
    named = "" if row.named is None else f" ({row.named})"
    of_several = f" of {client.trajectories} conversations" if client.trajectories > 1 else ""
    return [
        client.label,
        ", ".join(row.endpoints) or "–",
        "no" if "works" in row.lacking else "yes",
        f"{row.recorded} of {row.calls}",
        f"{row.trajectories}{named}{of_several}",
        f"{row.share:.0%}",
        "–" if row.decided is None else f"{row.decided / max(row.sampled, 1):.0%}",
        f"{'answer id; ' if row.answer_id else ''}{client.name_by}",
        "; ".join(_remarks(row)),
    ]


def _remarks(row: Row) -> list[str]:
    rules = ", ".join(f"`{rule}`" for rule in row.threaded_by if rule != "new")
    return [
        *([row.client.why] if row.client.why else []),
        *(f"`{reason}` in {times} of {row.recorded}" for reason, times in row.reasons.items()),
        *(f"weighed: {what} in {times}" for what, times in row.constraints.items()),
        *(f"refused: {error[:160]}" for error in row.refused),
        *([f"threaded by {rules}"] if rules else []),
    ]
