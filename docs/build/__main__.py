"""Writes the pages that are made from the code: settings, tables, reasons, … `make docs`; a test holds them true.

Knows the code's own descriptions; adds no word of its own but headings.
"""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docs.build import llms_page, metrics_page, parameters_page
from migrations import schema
from migrations.views import VIEWS
from whetstone.config.privacy import PrivacySettings
from whetstone.config.proxy import UpstreamSettings
from whetstone.config.rewards import (
    ExploreSettings,
    HandoverSettings,
    JudgeSettings,
    RewardFunction,
    RewardSettings,
    RulerSettings,
)
from whetstone.config.settings import PREFIX, STARTER, ProjectSettings, Settings
from whetstone.config.teachers import TeacherSettings
from whetstone.domain.why_not_trained import WhyNotTrained

DOCS = Path(__file__).resolve().parent.parent
_MADE = "<!-- Made by `make docs`; edit the code instead. -->\n"


def pages() -> dict[str, str]:
    """File name -> text of every page that is made."""
    from docs.build.cli_page import page  # the whole command line comes with it

    made = {"cli.md": f"{_MADE}\n{page()}", "settings.md": _settings(), "tables.md": _tables(), "views.md": _views()}
    made |= {"metrics.md": metrics_page.page(_MADE), "parameters.md": parameters_page.page(_MADE)}
    return made | {"why_not_trained.md": _reasons(), "llms.txt": llms_page.page(DOCS / "README.md")}


def _settings() -> str:
    lines = [
        _MADE,
        "# Settings\n",
        "In `whetstone.toml` (`[trainer]` and so on are its sections), or in the environment, which wins: "
        f"`{PREFIX}DATA`, `{PREFIX}TRAINER__LEARNING_RATE`. An unknown key stops the start. "
        f"`{PREFIX}DATABASE_FILE` names a file that has `{PREFIX}DATABASE`, and so for every other: for secrets.\n",
    ]
    plain = {n: f for n, f in Settings.model_fields.items() if not _section(f.annotation)}
    lines += _table("At the top", plain)
    for name, field in Settings.model_fields.items():
        if section := _section(field.annotation):
            lines += _table(f"[{name}]", section.model_fields)
    plain = {n: f for n, f in ProjectSettings.model_fields.items() if not _section(f.annotation)}
    lines += _table("[projects.<name>]", plain)
    lines += _table("[projects.<name>.privacy]", PrivacySettings.model_fields)
    lines += _table("[upstreams.<name>]", UpstreamSettings.model_fields)
    lines += _table("[teachers.<name>]", TeacherSettings.model_fields)
    plain = {n: f for n, f in RewardSettings.model_fields.items() if not _section(f.annotation)}
    lines += _table("[learning.<policy>]", plain)
    lines += _table("[[learning.<policy>.rewards]]", RewardFunction.model_fields)
    lines += _table("[learning.<policy>.ruler]", RulerSettings.model_fields)
    lines += _table("[learning.<policy>.explore]", ExploreSettings.model_fields)
    lines += _table("[learning.<policy>.handover]", HandoverSettings.model_fields)
    lines += _table("[judges.<name>]", JudgeSettings.model_fields)
    return "\n".join(lines)


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a setting is, also where it may be left out; None where it is a single value."""
    first, *others = get_args(annotation) or (annotation,)
    return first if isinstance(first, type) and issubclass(first, BaseModel) and others in ([], [NoneType]) else None


def _table(title: str, fields: dict[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| setting | default | meaning |\n|---|---|---|"
    for name, field in fields.items():
        shown = "–" if field.default in (None, (), {}, PydanticUndefined) else f"`{field.default}`"
        shown = "the starter" if field.default == str(STARTER) else shown
        yield f"| `{name}` | {shown} | {' '.join(str(field.description).split())} |"
    yield ""


def _tables() -> str:
    lines = [
        _MADE,
        "# Tables\n",
        "Who writes a column: P the proxy, J the judging worker, T the training worker, W the command line. "
        "Primary keys are (project, id), times are UTC, NULL means not yet. "
        "Read the views `admin_*` rather than these: they stay, the tables may change.\n",
    ]
    for table in schema.metadata.sorted_tables:
        lines.append(f"## {table.name}\n")
        lines.append("| column | type | NULL | meaning |\n|---|---|---|---|")
        for column in table.columns:
            kind = type(column.type).__name__.lower()
            meaning = (column.comment or "the tenant").replace("|", "\\|")
            lines.append(f"| `{column.name}` | {kind} | {'yes' if column.nullable else ''} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _views() -> str:
    lines = [
        _MADE,
        "# Views\n",
        "What to read: on SQLite and PostgreSQL the same, in `whetstone sql`, `sqlite3`, psql, or any BI tool, without "
        "a function of ours. They stay; the [tables](tables.md) behind them may change. [Queries](sql.md) that use "
        "them.\n",
        "`project` is in each. NULL means not yet; 0.0 is a measurement. Times are UTC: text that sorts and compares "
        "on SQLite, `timestamptz` on PostgreSQL. Lists and objects are JSON text on SQLite; `jsonb`, `integer[]`, "
        "`real[]` on PostgreSQL, where the words below are comments too (`\\d+ admin_steps`).\n",
        "| view | what it is for |\n|---|---|",
        *(f"| [`{view.name}`](#{view.name}) | {_cell(view.purpose)} |" for view in VIEWS),
        "",
    ]
    for view in VIEWS:
        lines.append(f"## {view.name}\n")
        lines.append(f"{view.purpose[:1].upper()}{view.purpose[1:]}.\n")
        lines.append("| column | SQLite | PostgreSQL | meaning |\n|---|---|---|---|")
        for column in view.columns:
            sqlite, postgresql = column.kind.value
            lines.append(f"| `{column.name}` | {sqlite} | {postgresql} | {_cell(column.meaning)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def _reasons() -> str:
    lines = [
        _MADE,
        "# Why something was not trained on\n",
        "`why_not_trained` of a trajectory or completion is one of these, and NULL once it was trained on. A "
        "trajectory has the reason that all its completions have, as soon as they are recorded: one that lasts wins "
        "over one that passes (`no_reward`, `group_open`, `waiting_step`, …).\n",
        "| `why_not_trained` | meaning |\n|---|---|",
        *(f"| `{reason.value}` | {reason.meaning} |" for reason in WhyNotTrained),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
