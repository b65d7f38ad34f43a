"""Show checks to people: on one screen with the worst first, or each with its meaning."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whetstone.terminal.fitting import Fitting
from whetstone.vllm.self_test.questions import Check


def checks_shown(title: str, checks: Sequence[Check], unknown: str, verdict: Text, *, verbose: bool) -> RenderableType:
    """Return the checks below a title, and the verdict below them.

    Args:
        title: what was checked.
        checks: in the order of a table.
        unknown: words for the checks without a result, such as "could not be tested".
        verdict: the last line.
        verbose: a table with a row for each check; else a line for all that is well, a line for all without a result,
            and the others with what to do.
    """
    if verbose:
        return Group(_table(title, checks), verdict)
    lines = Table.grid(padding=(0, 1))
    for mark, words in _lines(checks, unknown):
        lines.add_row(mark, words)
    return Group(Text(title, style="bold"), lines, verdict)


def severity(checks: Sequence[Check]) -> int:
    """Return how bad the worst result is: 0 if all is well."""
    return max((_severity(check) for check in checks), default=0)


def _severity(check: Check) -> int:
    if check.ok is None:
        return 1
    return 0 if check.ok else 3 if check.needed else 2


def _lines(checks: Sequence[Check], unknown: str) -> Iterator[tuple[Text, Text]]:
    """Yield a mark and words for each line, the worst first."""
    for check in sorted(checks, key=_severity, reverse=True):
        if check.ok is False:
            mark = Text("✗", style="bold red") if check.needed else Text("!", style="bold yellow")
            yield mark, Text.assemble((check.name, "bold"), f": {check.found}\n", (check.means, "dim"))
    if names := ", ".join(check.name for check in checks if check.ok is None):
        yield Text("?", style="yellow"), Text(f"{unknown}: {names}")
    if names := ", ".join(check.name for check in checks if check.ok):
        yield Text("✓", style="green"), Text(names)


def _table(title: str, checks: Sequence[Check]) -> Fitting:
    table = Table("question", "answer", "result, and what it means", title=title, title_justify="left", show_lines=True)
    for check in checks:
        table.add_row(check.name, _answer(check), Text(check.found).append(f"\n{check.means}", style="dim"))
    return Fitting(table)


def _answer(check: Check) -> Text:
    """Return yes, no, or could not tell, in colour."""
    if check.ok is None:
        return Text("could not tell", style="yellow")
    if check.ok:
        return Text("yes", style="green")
    return Text("no", style="bold red" if check.needed else "yellow")
