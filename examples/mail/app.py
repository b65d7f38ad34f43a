"""Answers questions about an inbox, in the spirit of OpenPipe's ART-E, through any OpenAI-compatible server.

Knows the stock client and its own inbox; of training a few headers and one POST for each attempt. Prints JSON.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes
import full_mail
import small_mail
from inbox import Inquiry

FORMS = {"small": small_mail, "full": full_mail}


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Let the model search, read and answer until it has answered or its turns are over."""
    form = FORMS[attempt.args.size]
    inquiry = Inquiry(form.case(attempt.args.split, attempt.rng()))
    messages = form.messages(inquiry.case)
    while not inquiry.is_over:
        message = await attempt.ask(messages, **form.OPTIONS)
        functions = [call for call in message.tool_calls or [] if call.type == "function"]
        calls = [(call.id, call.function.name, call.function.arguments) for call in functions]
        messages += form.replies(inquiry, message.content or "", calls)
    return episodes.Result(inquiry.reward(), inquiry.solved(), share=float(inquiry.source_is_right))


parser = episodes.parser_of("Answer questions about an inbox through an OpenAI API.")
parser.add_argument("--size", choices=FORMS, default="small", help="full: a larger inbox and real tools")

if __name__ == "__main__":
    episodes.main(parser, play)
