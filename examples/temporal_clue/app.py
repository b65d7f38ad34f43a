"""Solves puzzles of who was where, through any OpenAI-compatible server, and posts the share of right letters."""

import sys
from pathlib import Path

import clues

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes

ANSWER_TOKENS = 6
"""Of each suspect in the short answer: a name, "in", a letter, a full stop, and some to spare."""


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Ask for one puzzle's answer. The reward is the share of its letters that are right."""
    size: clues.Size = attempt.args.size
    task = clues.task(size, attempt.args.split, attempt.rng())
    most = attempt.args.max_tokens if size.is_murder else ANSWER_TOKENS * size.suspects
    message = await attempt.ask(task.messages, max_tokens=most)
    share = task.share(message.content or "")
    return episodes.Result(reward=share, solved=share == 1)


if __name__ == "__main__":
    parser = episodes.parser_of("Find out who was where, when and with what, through an OpenAI API.")
    parser.add_argument("--size", type=clues.Size.of, default="small", help="small, full, or 2x3, 3x3x2, ...")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest answer where there are times")
    episodes.main(parser, play)
