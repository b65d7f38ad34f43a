"""A program's options as a table."""

import argparse
from collections.abc import Mapping
from typing import Any


def parser_of(
    description: str,
    options: Mapping[str, Mapping[str, Any]],
    formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter,
) -> argparse.ArgumentParser:
    """Return a parser with these options: name -> what `ArgumentParser.add_argument` takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter_class)
    for name, values in options.items():
        parser.add_argument(name, **values)
    return parser
