"""An MCP server (stdio) of a warehouse, with tools over SQLite, files and time. Knows nothing of models.

The first line of a tool's description names what it returns, with the names of its arguments. The schema of an argument
has examples. So a client can make questions from the list of tools alone (scenarios.py).
"""

import os
import signal
import sqlite3
import tempfile
from datetime import date, timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import warehouse
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from typing_extensions import TypedDict

ARTICLES = warehouse.articles()
TODAY = warehouse.TODAY
DATES = [(TODAY + timedelta(days=days)).isoformat() for days in range(60)]
Item = Annotated[str, Field(examples=list(warehouse.ITEMS))]
Shelf = Annotated[str, Field(examples=list(warehouse.SHELVES))]
Date = Annotated[str, Field(examples=DATES)]

server = MCPServer("warehouse", log_level="ERROR")
database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE articles (item TEXT PRIMARY KEY, stock INTEGER, price INTEGER, due TEXT, time TEXT)")
database.executemany(
    "INSERT INTO articles VALUES (?, ?, ?, ?, ?)",
    [(each.item, each.stock, each.price, each.due.isoformat(), each.time) for each in ARTICLES],
)
folder = tempfile.TemporaryDirectory(prefix="warehouse-")
for name in warehouse.ROOMS:
    Path(folder.name, f"{name}.txt").write_text(warehouse.plan(name))


def row(columns: str, item: str) -> Any:
    """Return these columns of an article."""
    values = database.execute(f"SELECT {columns} FROM articles WHERE item = ?", (item,)).fetchone()
    if values is None:
        raise ToolError(f"there is no article {item!r}")
    return values


def places() -> dict[str, tuple[str, str]]:
    """Return the shelf and the room of each article, from the files."""
    files = sorted(Path(folder.name).glob("*.txt"))
    return {item: (shelf, file.stem) for file in files for item, shelf in map(str.split, file.read_text().splitlines())}


def day(text: str) -> date:
    """Return the date that this text is."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ToolError(f"{text!r} is not a date like {DATES[0]}") from None


class Stock(TypedDict):
    item: str
    stock: int
    unit: str


class Price(TypedDict):
    item: str
    price: int
    unit: str


class Place(TypedDict):
    item: str
    shelf: str
    room: str


class Delivery(TypedDict):
    item: str
    day: str
    time: str


class DeliveryDate(TypedDict):
    item: str
    date: str


class First(TypedDict):
    shelf: str
    item: str


class Weekday(TypedDict):
    date: str
    weekday: str


class Days(TypedDict):
    start: str
    end: str
    days: int


@server.tool()
async def stock(item: Item) -> Stock:
    """stock of item"""
    return {"item": item, "stock": row("stock", item)[0], "unit": "pieces"}


@server.tool()
async def price(item: Item) -> Price:
    """price of item"""
    return {"item": item, "price": row("price", item)[0], "unit": "euros"}


@server.tool()
async def shelf(item: Item) -> Place:
    """place of item"""
    if item not in (listed := places()):
        raise ToolError(f"there is no article {item!r}")
    return {"item": item, "shelf": listed[item][0], "room": listed[item][1]}


@server.tool()
async def due(item: Item) -> Delivery:
    """delivery of item"""
    arrives, time = row("due, time", item)
    return {"item": item, "day": warehouse.DAYS[day(arrives).weekday()], "time": time}


@server.tool()
async def delivery_date(item: Item) -> DeliveryDate:
    """date on which item arrives"""
    return {"item": item, "date": row("due", item)[0]}


@server.tool()
async def first_on_shelf(shelf: Shelf) -> First:
    """article that comes first in the alphabet of those on shelf"""
    there = [item for item, (place, _) in places().items() if place == shelf]
    if not there:
        raise ToolError(f"nothing is on {shelf!r}")
    return {"shelf": shelf, "item": min(there)}


@server.tool()
async def weekday(date: Date) -> Weekday:
    """day of the week of date"""
    return {"date": date, "weekday": warehouse.DAYS[day(date).weekday()]}


@server.tool()
async def days_between(start: Date, end: Date) -> Days:
    """number of days from start to end"""
    return {"start": start, "end": end, "days": (day(end) - day(start)).days}


def terminate(_number: int, _frame: FrameType | None) -> None:
    """Remove the folder and end at once: a thread may be waiting for standard input, which would delay an exit."""
    folder.cleanup()
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    with folder, database:
        server.run("stdio")
