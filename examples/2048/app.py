"""Play 2048 through any OpenAI-compatible server, and post what each game was worth.

Each move is a conversation of its own: the board holds all that matters. The calls of a game share one trajectory.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import tiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes

WIN = 2.0
INVALID = -1.0


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Play one game. A move that is not listed ends it."""
    form = tiles.FORMS[attempt.args.size]
    if attempt.args.target:
        form = dataclasses.replace(form, target=int(math.log2(attempt.args.target)))
    game = tiles.Game(form, attempt.args.split, attempt.rng)
    while not game.over:
        messages: list[Any] = [
            {"role": "system", "content": form.system()},
            {"role": "user", "content": game.text()},
        ]
        answer = await attempt.ask(messages, max_tokens=attempt.args.max_tokens or form.max_tokens)
        if not game.move(tiles.move_in(answer.content or "")):
            return episodes.Result(INVALID, solved=False, share=game.share)
    return episodes.Result(WIN if game.won else game.share, solved=game.won, share=game.share)


def main() -> None:
    parser = episodes.parser_of("Play 2048 through an OpenAI API.")
    parser.add_argument("--size", choices=tuple(tiles.FORMS), default="small", help="of the board and of the goal")
    parser.add_argument("--target", type=int, help="another tile to reach, a power of two: 256")
    parser.add_argument("--max-tokens", type=int, help="longest answer; a model that reasons needs hundreds")
    episodes.main(parser, play)


if __name__ == "__main__":
    main()
