"""The agent of examples/mail written with LangGraph: a model node and an inbox node, and nothing new but base_url.

For the same tasks it sends the same messages and gets the same rewards as examples/mail/app.py.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mail"))

import episodes
import full_mail
import small_mail
from inbox import Inquiry
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

FORMS = {"small": small_mail, "full": full_mail}


def calls_of(message: AIMessage) -> list[tuple[str, str, str]]:
    """Return the tool calls (id, tool, arguments as JSON), those whose arguments are no JSON last."""
    calls = [(call["id"] or "", call["name"], json.dumps(call["args"])) for call in message.tool_calls]
    broken = [(call["id"] or "", call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    return calls + broken


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Let the graph run until the model has answered or its turns are over."""
    form, args = FORMS[attempt.args.size], attempt.args
    inquiry = Inquiry(form.case(args.split, attempt.rng()))
    chat = ChatOpenAI(
        model=args.model,
        base_url=args.base_url,
        api_key=args.api_key,
        temperature=args.temperature,
        max_tokens=form.OPTIONS["max_tokens"],
        timeout=args.timeout_s,
        max_retries=0,
        default_headers=attempt.headers(),
    )
    model = chat.bind_tools(form.OPTIONS["tools"]) if "tools" in form.OPTIONS else chat

    async def ask(state: MessagesState) -> dict[str, list[object]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def use_inbox(state: MessagesState) -> dict[str, list[object]]:
        message = state["messages"][-1]
        assert isinstance(message, AIMessage)
        return {"messages": [*form.replies(inquiry, message.text, calls_of(message))]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("inbox", use_inbox)
    graph.add_edge(START, "model")
    graph.add_edge("model", "inbox")
    graph.add_conditional_edges("inbox", lambda _: END if inquiry.is_over else "model")
    limit = 2 * inquiry.case.turns + 1
    await graph.compile().ainvoke({"messages": form.messages(inquiry.case)}, {"recursion_limit": limit})
    return episodes.Result(inquiry.reward(), inquiry.solved(), share=float(inquiry.source_is_right))


parser = episodes.parser_of("Answer questions about an inbox by a graph of LangGraph, through an OpenAI API.")
parser.add_argument("--size", choices=FORMS, default="small", help="full: a larger inbox and real tools")

if __name__ == "__main__":
    episodes.main(parser, play)
