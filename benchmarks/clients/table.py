"""The clients: packages with pinned versions, how each is run, what the model answers, and what need not hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fakes.tool_vllm import Rule, ToolCall

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")
"""What each app asks, turn by turn."""
TEXTS = ("It is sunny in Bern.", "Rome is warmer.", "A light jacket will do.")
"""What the fake answers to them."""
RESULT = "18 degrees"
"""Is in what the tool answers, and so in each request after its call."""
BY_QUESTION = tuple(reversed(list(zip(QUESTIONS, TEXTS, strict=True))))
"""The last question first: a later request has the earlier questions too."""


def talk(*first: Rule) -> tuple[Rule, ...]:
    """Return rules: these first, then a text for the last question."""
    return (*first, *(Rule(text, needs=question) for question, text in BY_QUESTION))


def each(answer: str, **conditions: str) -> tuple[Rule, ...]:
    """Return a rule for each question: this answer, around its text."""
    return tuple(
        Rule(answer.replace("TEXT", text), **conditions | {"needs": question}) for question, text in BY_QUESTION
    )


WEATHER = talk(Rule(ToolCall("weather", {"city": "Bern"}), lacks=RESULT))
CODE = (
    Rule("Thought: I look.\n<code>\nprint(weather(city='Bern'))\n</code>", lacks=RESULT),
    *each("Thought: I know.\n<code>\nfinal_answer('TEXT')\n</code>"),
)
FINAL_ANSWER = (
    Rule(ToolCall("weather", {"city": "Bern"}), lacks=RESULT),
    *(Rule(ToolCall("final_answer", {"answer": text}), needs=question) for question, text in BY_QUESTION),
)
ADVICE = tuple(
    Rule(ToolCall("Advice", {"city": "Bern", "advice": text}), needs=question) for question, text in BY_QUESTION
)
_THOUGHT = (
    "[[ ## next_thought ## ]]\nI look.\n\n[[ ## next_tool_name ## ]]\nNAME\n\n[[ ## next_tool_args ## ]]\nARGS\n\n"
)
_DONE = "[[ ## completed ## ]]"
FIELDS = (
    Rule(_THOUGHT.replace("NAME", "weather").replace("ARGS", '{"city": "Bern"}') + _DONE, lacks=RESULT),
    Rule(_THOUGHT.replace("NAME", "finish").replace("ARGS", "{}") + _DONE, needs="next_tool_name"),
    *each(f"[[ ## reasoning ## ]]\nI know.\n\n[[ ## answer ## ]]\nTEXT\n\n{_DONE}"),
)
READS = talk(
    Rule(ToolCall("Bash", {"command": "cat weather.txt", "description": "Read the weather"}), lacks=RESULT),
    Rule(ToolCall("exec_command", {"cmd": "cat weather.txt"}), lacks=RESULT),
    Rule(ToolCall("shell_command", {"command": "cat weather.txt"}), lacks=RESULT),
    Rule(ToolCall("shell", {"command": ["cat", "weather.txt"]}), lacks=RESULT),
)

HEADER = '`default_headers={"X-Trajectory-Id": …}`'
URL = "the URL"


@dataclass(frozen=True)
class Client:
    """A client as the page names it, and its run: three questions to the model, a tool between the first two."""

    name: str
    """For the command line, folders and files."""
    title: str
    packages: Sequence[str]
    """As pip or npm installs them, the one that gives the row its version first."""
    program: str
    """A file in `apps/python` or `apps/node`."""
    kind: str = ""
    """Its argument: which of its ways to call a model."""
    rules: Sequence[Rule] = WEATHER
    trajectories: int = 1
    """How many conversations the run is."""
    tells_id: bool = True
    """Whether the app can get the answer's id from it."""
    name_by: str = ""
    """Where an app can name its trajectory."""
    exceptions: Sequence[str] = ()
    """What need not hold: names of `report.Row.lacking`."""
    why: str = ""
    """Why it need not."""

    @property
    def in_node(self) -> bool:
        """Whether npm installs it."""
        return not self.program.endswith(".py")

    @property
    def environment(self) -> str:
        """The name of its environment, which the rows of one program share."""
        return f"{'node' if self.in_node else 'python'}-{self.program.partition('.')[0]}"

    @property
    def label(self) -> str:
        """What the page calls it, with the pinned version of its first package."""
        return f"{self.title} {self.packages[0].replace('==', '@').rpartition('@')[2]}"


OPENAI = ("openai==3.51.0",)
LANGCHAIN = ("langchain==1.5.0", "langchain-openai==1.7.4", "langgraph==1.2.22")
AGENTS = ("openai-agents==0.24.0",)
PYDANTIC_AI = ("pydantic-ai-slim[anthropic,openai]==2.62.0",)
SMOLAGENTS = ("smolagents[openai]==1.26.0",)

CLIENTS = (
    Client("openai-chat", "OpenAI, chat", OPENAI, "openai.py", "chat", name_by=HEADER),
    Client("openai-responses", "OpenAI, responses", OPENAI, "openai.py", "responses", name_by=HEADER),
    Client(
        "openai-remembered", "OpenAI, `previous_response_id`", OPENAI, "openai.py", "remembered", name_by=HEADER
    ),
    Client("anthropic", "Anthropic", ("anthropic==2.10.0",), "anthropic.py", name_by=HEADER),
    Client("langchain", "LangChain, `create_agent`", LANGCHAIN, "langchain.py", "agent", name_by=HEADER),
    Client("langgraph", "LangGraph, streamed", LANGCHAIN, "langchain.py", "graph", tells_id=False, name_by=HEADER),
    Client("agents-chat", "OpenAI Agents, chat", AGENTS, "openai_agents.py", "chat", tells_id=False, name_by=URL),
    Client("agents-responses", "OpenAI Agents, responses", AGENTS, "openai_agents.py", "responses", name_by=URL),
    Client("agents-mcp", "OpenAI Agents, responses with MCP", AGENTS, "openai_agents.py", "mcp", name_by=URL),
    Client("pydantic-ai-chat", "Pydantic AI, chat", PYDANTIC_AI, "pydantic_ai.py", "chat", name_by=URL),
    Client("pydantic-ai-responses", "Pydantic AI, responses", PYDANTIC_AI, "pydantic_ai.py", "responses", name_by=URL),
    Client("pydantic-ai-messages", "Pydantic AI, messages", PYDANTIC_AI, "pydantic_ai.py", "messages", name_by=URL),
    Client("crewai", "CrewAI", ("crewai==1.15.30",), "crewai.py", trajectories=3, tells_id=False, name_by=URL),
    Client(
        "smolagents-tools", "smolagents, tool calls", SMOLAGENTS, "smolagents.py", "tools", FINAL_ANSWER,
        tells_id=False, name_by=URL,
    ),
    Client(
        "smolagents-code", "smolagents, code", SMOLAGENTS, "smolagents.py", "code", CODE, tells_id=False, name_by=URL
    ),
    Client(
        "autogen", "AutoGen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), "autogen.py",
        tells_id=False, name_by=URL,
    ),
    Client("haystack", "Haystack", ("haystack-ai==3.4.1",), "haystack.py", tells_id=False, name_by=URL),
    Client(
        "llama-index", "LlamaIndex",
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"), "llama_index.py", name_by=URL,
    ),
    Client(
        "google-adk", "Google ADK", ("google-adk==2.13.0", "litellm==1.106.2", "mcp==2.3.0"), "google_adk.py",
        tells_id=False, name_by=URL,
    ),
    Client(
        "dspy", "DSPy, `ReAct`", ("dspy==3.4.1",), "dspy.py", rules=FIELDS, tells_id=False,
        name_by='the URL, or `dspy.LM(…, extra_headers={"X-Trajectory-Id": …})`', exceptions=("trajectory",),
        why="writes all steps into one new message each time: nothing tells which calls belong together",
    ),
    Client("instructor", "instructor", ("instructor==1.17.0",), "instructor.py", rules=ADVICE, name_by=HEADER),
    Client("litellm", "LiteLLM", ("litellm==1.106.2", "mcp==2.3.0"), "litellm.py", name_by="`extra_headers={…}`"),
    Client("openai-node", "OpenAI for Node", ("openai@7.55.0",), "openai.mjs", name_by="`defaultHeaders: {…}`"),
    Client(
        "vercel", "Vercel AI SDK, `openai(…)`", ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"), "vercel.mjs",
        name_by=URL,
    ),
    Client(
        "claude-code", "Claude Code", ("@anthropic-ai/claude-code@2.1.328",), "claude_code.sh", rules=READS,
        tells_id=False, name_by="its own session header",
    ),
    Client(
        "codex", "Codex", ("@openai/codex@0.169.0",), "codex.sh", rules=READS, tells_id=False,
        name_by="its own session header",
    ),
)  # fmt: skip
BY_NAME = {client.name: client for client in CLIENTS}
