"""The list of pages for language models (llmstxt.org), made from the tables of docs/README.md."""

import re
from pathlib import Path

_PAGE = re.compile(r"^\|(?: \d \|)? \[(?P<title>[^\]]+)\]\((?P<link>[^)]+)\) \| (?P<what>.+) \|$")
_HEADING = re.compile(r"^## (.+)$")
_HEAD = """# Whetstone

> An OpenAI-compatible proxy in front of an open model that vLLM serves. It records every call in SQL, takes feedback at any time, and trains a LoRA on it (GRPO). Apps change their `base_url` and nothing else.

- Base URL: `http://127.0.0.1:8000/v1` (Anthropic's SDK: without `/v1`). `GET /v1/models` lists the names that an app may ask for; `GET /openapi.json` has every route and field.
- Feedback: `POST /v1/feedback` with `{"completion_id": "chatcmpl-…", "reward": 1.0}`, or `thumbs`, `parts`, `demonstration`; `GET /v1/feedback/{feedback_id}` shows what became of it.
- Optional headers of a call: `X-Trajectory-Id` (one attempt), `X-Group-Id` (attempts at the same thing), `X-Task`, `X-Split: eval` (held out), `X-No-Train: true`.
- By default nothing is trained. `whetstone policies train on` starts training; `whetstone doctor --log` says whether the log has anything to learn from; `whetstone status` says why nothing trains now.
- Why something was not trained on is in SQL: `SELECT why_not_trained, count(*) FROM admin_trajectories GROUP BY 1`.
- The package is `whetstone-proxy`; the command is `whetstone`.

## For coding agents

- [Skill](skills/whetstone/SKILL.md): connect an app, check it, write a reward, prove a gain
"""  # noqa: E501


def page(entry: Path) -> str:
    """Return the list, with links as in the entry page. A table's first row and rows without a link are left out."""
    lines = [_HEAD]
    heading = ""
    for line in entry.read_text(encoding="utf-8").splitlines():
        if title := _HEADING.match(line):
            heading = title[1]
        elif row := _PAGE.match(line):
            if heading:
                lines.append(f"## {heading}\n")
                heading = ""
            lines.append(f"- [{row['title']}]({row['link']}): {row['what']}")
        elif not line and lines[-1].startswith("- ["):
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"
