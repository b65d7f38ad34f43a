"""The questions, the server and the app of examples/mcp: the MCP client and server are real, the model is a rule."""

import importlib.util
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.types import Tool

from tests.examples.conftest import FakeOpenAI, command, foreign_imports, run
from whetstone.config.settings import load

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mcp"
APP = FOLDER / "app.py"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "novice")]

import mcp_tools as novice  # noqa: E402
import scenarios  # noqa: E402
import warehouse  # noqa: E402

spec = importlib.util.spec_from_file_location("mcp_example_server", FOLDER / "server.py")
assert spec and spec.loader
warehouse_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warehouse_server)

SMALL = ["stock", "price", "shelf", "due"]
TOOL_OF = {"stock": "stock", "price": "price", "place": "shelf", "delivery": "due"}
SPLITS: tuple[scenarios.Split, ...] = ("train", "eval")


def questions(split: scenarios.Split, seeds: int, depth: int, names: list[str] | None = None) -> list[Any]:
    """Return questions that are made from the server's own list, in this process."""

    async def make() -> list[scenarios.Scenario]:
        async with Client(warehouse_server.server) as client:
            tools = [tool for tool in (await client.list_tools()).tools if not names or tool.name in names]

            async def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
                return dict((await client.call_tool(name, arguments)).structured_content or {})

            return [await scenarios.scenario(tools, call, split, random.Random(seed), depth) for seed in range(seeds)]

    return anyio.run(make)


def test_held_out_questions_are_about_other_articles_and_there_are_more_than_sixty() -> None:
    items = {split: {q.calls[0][1]["item"] for q in questions(split, 1500, 1, SMALL)} for split in SPLITS}
    assert not items["train"] & items["eval"] and len(items["eval"]) == 61 == len(items["train"])
    assert len(warehouse.ITEMS) == len(set(warehouse.ITEMS)) == 122


def test_a_question_is_made_from_the_description_and_its_answer_is_what_the_tool_returns() -> None:
    articles = {article.item: article for article in warehouse.articles()}
    nouns = Counter[str]()
    for question in questions("train", 200, 1, SMALL):
        match = re.fullmatch(r"What is the (\w+) of (\w+)\?", question.question)
        assert match and question.calls == ((TOOL_OF[match[1]], {"item": match[2]}),)
        article = articles[match[2]]
        day = warehouse.DAYS[article.due.weekday()]
        right = {"stock": article.stock, "price": article.price, "place": article.shelf, "delivery": day}[match[1]]
        assert question.answer == str(right)
        nouns[match[1]] += 1
    assert set(nouns) == set(TOOL_OF) and min(nouns.values()) > 30


def test_deep_questions_put_what_one_tool_returns_into_another() -> None:
    drawn = questions("eval", 300, 3)
    calls = Counter(len(question.calls) for question in drawn)
    assert set(calls) >= {1, 2, 3} and {name for question in drawn for name, _ in question.calls} > set(SMALL)
    deep = next(question for question in drawn if [name for name, _ in question.calls] == ["first_on_shelf", "stock"])
    shelf, item = deep.calls[0][1]["shelf"], deep.calls[1][1]["item"]
    assert item == min(article.item for article in warehouse.articles() if article.shelf == shelf)
    assert deep.question == (f"What is the stock of the article that comes first in the alphabet of those on {shelf}?")
    assert questions("train", 20, 3) == questions("train", 20, 3)


def test_a_tool_without_examples_or_result_is_left_out() -> None:
    def tool(description: str, properties: dict[str, Any], result: dict[str, Any] | None) -> Tool:
        schema = {"type": "object", "properties": properties}
        output = {"type": "object", "properties": result} if result else None
        return Tool(name="t", description=description, input_schema=schema, output_schema=output)

    item = {"item": {"type": "string", "enum": ["a", "b"]}}
    assert scenarios.result_key(tool("stock of item.\nMore.", item, {"item": {}, "stock": {}})) == "stock"
    assert scenarios.result_key(tool("the stock", item, {"stock": {}})) is None
    assert scenarios.result_key(tool("stock of item", item, {"item": {}})) is None
    assert scenarios.result_key(tool("stock of item", item, None)) is None
    assert scenarios.result_key(tool("the time", {}, {"time": {}})) is None
    assert [scenarios.values(item["item"], split) for split in SPLITS] == [["a"], ["b"]]
    undrawable = [tool("stock of item", {"item": {"type": "string"}}, {"stock": {}})]
    with pytest.raises(ValueError, match="no tool has"):
        anyio.run(scenarios.scenario, undrawable, None, "train", random.Random(0), 1)


def test_a_third_each_for_the_tools_their_arguments_and_the_answer() -> None:
    one = scenarios.Scenario("?", (("stock", {"item": "lamp"}),), "7")
    assert one.shares([("stock", {"item": "lamp"})], " 7.\n") == (1, 1, 1)
    assert one.shares([("price", {"item": "lamp"}), ("stock", {"item": "chair"})], "7") == (1, 0, 1)
    assert one.shares([("price", {"item": "lamp"})], "8") == one.shares([], "seven") == (0, 0, 0)
    two = scenarios.Scenario("?", (("first_on_shelf", {"shelf": "A"}), ("stock", {"item": "lamp"})), "Monday")
    assert two.shares([("first_on_shelf", {"shelf": "A"})], "monday") == (0.5, 0.5, 1)


def test_calls_are_read_from_text_and_from_json() -> None:
    tools = [Tool(name="stock", input_schema={"type": "object", "properties": {"item": {"examples": ["x"]}}})]
    assert scenarios.written_call("stock lamp", tools) == ("stock", {"item": "lamp"})
    assert [scenarios.written_call(text, tools) for text in ("stock", "stock a b", "7", "")] == [None] * 4
    assert scenarios.arguments_of('{"item": "x"}') == {"item": "x"}
    assert scenarios.arguments_of("{") == scenarios.arguments_of("[1]") == {}
    assert scenarios.openai_tool(tools[0])["function"]["parameters"]["properties"] == {"item": {}}


def test_random_play_solves_one_question_in_twelve() -> None:
    """A tool of four, and a word of three; who calls the right tool and takes the word after the article solves all."""
    rng, solved = random.Random(0), 0
    drawn = questions("eval", 400, 1, SMALL)
    for question in drawn:
        (name, arguments), *_ = question.calls
        tool = rng.choice(SMALL)
        word = rng.choice([arguments["item"], question.answer if tool == name else "?", "pieces"])
        solved += min(question.shares([(tool, arguments)], word)) == 1
    assert 0.05 < solved / len(drawn) < 0.12
    assert all(TOOL_OF[question.question.split()[3]] == question.calls[0][0] for question in drawn)


def test_the_novice_never_meets_the_tools_of_the_example_and_plays_at_random() -> None:
    assert novice.PROMPT == scenarios.SMALL and list(novice.OFFERED) == SMALL
    assert len(set(novice.WORDS)) == len(novice.WORDS) <= 150
    rng, right, places, legal = random.Random(0), 0, Counter[int](), set[str]()
    for _ in range(3000):
        conversation = novice.conversation(rng)
        system, question, call, result, answer = (message["content"] for message in conversation.messages)
        tools = system.partition(": ")[2].partition(".")[0].split()
        item = question.split()[-1].rstrip("?")
        name, argument = call.split()
        assert tools != SMALL and name in tools and argument == item
        assert conversation.choices == [tools, result.split()] and answer in result.split()
        right += TOOL_OF.get(question.split()[3]) == name
        places[result.split().index(answer)] += result != "error"
        legal |= {*tools, *result.split(), item} - set("0123456789ABCDEFGH")
    assert 130 < right < 250 and max(places.values()) - min(places.values()) < 150
    assert legal - {"error"} <= set(novice.WORDS)


def test_the_settings_for_a_gpu_are_settings() -> None:
    assert load(FOLDER / "gpu.toml", environment={}).model == "Qwen/Qwen2.5-3B-Instruct"


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 150
    assert foreign_imports(APP) == {"scenarios", "mcp", "episodes"}
    assert foreign_imports(FOLDER / "server.py") == {"warehouse", "mcp", "pydantic", "typing_extensions"}


class Model(FakeOpenAI):
    """Plays by the rule, with text or with tools; every fifth answer is none."""

    wrong = True

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        if "tools" not in body:
            return super().answer(number, body)
        return {"id": "chatcmpl-1", "choices": [{"index": 0, "message": self.with_tools(body["messages"])}]}

    def say(self, number: int, board: str) -> str:
        if self.wrong and number % 5 == 0:
            return "I would rather not"
        words = board.split()
        return f"{TOOL_OF[words[3]]} {words[-1].rstrip('?')}" if words[0] == "What" else words[1]

    def with_tools(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Ask for the stock of the article that is first on a shelf, whatever the question is."""
        last = messages[-1]
        if last["role"] == "tool" and "stock" in last["content"]:
            return {"role": "assistant", "content": str(json.loads(last["content"])["stock"])}
        if last["role"] == "tool" and last["content"].startswith("{"):
            name, arguments = "stock", json.dumps({"item": json.loads(last["content"])["item"]})
        else:
            match = re.search(r"those on ([A-H])\?", messages[1]["content"])
            name, arguments = "first_on_shelf", json.dumps({"shelf": match[1]}) if match else "{"
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as model:
        yield model


def folders() -> set[Path]:
    """Return the servers' folders; this process has one too."""
    return set(Path(tempfile.gettempdir()).glob("warehouse-*"))


@pytest.mark.slow
def test_attempts_at_a_question_are_a_group_and_one_server_serves_them_all(model: Model) -> None:
    model.wrong = False
    before = folders()
    report = run(APP, model, "--questions", "32", "--attempts", "4")
    assert folders() == before
    assert (report["solved"], report["questions"], report["failed_requests"]) == (32, 32, 0)
    assert [posted["reward"] for posted in model.feedback] == [1.0] * 32
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in model.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {4: 8} and len(model.bodies) == 64
    first = next(body for body in model.bodies if len(body["messages"]) == 2)
    assert first["messages"][0]["content"] == scenarios.SMALL.format(tools=" ".join(SMALL)) and "tools" not in first


@pytest.mark.slow
def test_an_answer_that_is_no_call_is_the_end_of_an_attempt(model: Model) -> None:
    report = run(APP, model, "--questions", "40", "--attempts", "4")
    assert report["failed_requests"] == 0 and 0 < report["solved"] < 40
    rewards = Counter(round(posted["reward"], 2) for posted in model.feedback)
    assert set(rewards) == {0.0, 0.67, 1.0} and rewards[1.0] == report["solved"]


@pytest.mark.slow
def test_real_tools_are_offered_and_their_errors_are_results(model: Model) -> None:
    flags = ("--size", "full", "--split", "eval", "--tools", "stock", "first_on_shelf", "--turns", "4", "--depth", "2")
    report = run(APP, model, "--questions", "30", *flags)
    assert report["failed_requests"] == 0 and model.feedback == [] and 0 < report["solved"] < 30
    names = {tuple(tool["function"]["name"] for tool in body["tools"]) for body in model.bodies}
    assert names == {("stock", "first_on_shelf")}
    results = [m["content"] for body in model.bodies for m in body["messages"] if m["role"] == "tool"]
    assert any("Error" in text for text in results) and any(text.startswith("{") for text in results)
    assert {headers["x-split"] for headers in model.headers_seen} == {"eval"}


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_app_with_its_error(model: Model, tmp_path: Path) -> None:
    for file in ("app.py", "scenarios.py"):
        (tmp_path / file).write_text(
            (FOLDER / file).read_text().replace("parents[1]", f"parents[0] / '{FOLDER.parent}'")
        )
    process = subprocess.run(
        command(tmp_path / "app.py", model, "--questions", "8"), capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1 and "server.py" in process.stderr and model.bodies == []


@pytest.mark.slow
def test_a_signal_ends_the_app_and_its_server(model: Model) -> None:
    model.wrong = False
    with subprocess.Popen(command(APP, model, "--questions", "0", "--pause-s", "0.1"), stdout=subprocess.PIPE) as app:
        while not model.feedback:
            assert app.poll() is None
        children = Path(f"/proc/{app.pid}/task/{app.pid}/children").read_text().split()
        app.send_signal(signal.SIGTERM)
        out, _ = app.communicate(timeout=60)
    assert app.returncode == 0 and json.loads(out)["questions"] % 8 == 0
    assert len(children) == 1 and not Path(f"/proc/{children[0]}").exists()
