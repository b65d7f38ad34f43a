"""Play Codenames through any OpenAI-compatible server, one model in both roles, and post what a game was worth to each.

Each role is a conversation and a trajectory of its own: the spymaster gives clues, the operative picks words.
"""

import sys
from pathlib import Path
from typing import Any

import cards

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Play one game. Both roles answer in each turn, also after an invalid clue, so that both groups are complete."""
    args, form = attempt.args, cards.FORMS[attempt.args.size]
    game = cards.Game(form, args.split, attempt.rng)
    spymaster, operative = ([{"role": "system", "content": text}] for text in form.systems())
    while not game.over:
        clue = game.clue(await answer(attempt, "spymaster", spymaster, game.for_spymaster()))
        game.pick(clue, await answer(attempt, "operative", operative, game.for_operative(clue)))
    dictionary = form.dictionary if args.dictionary is None else args.dictionary
    return episodes.Result(game.rewards(dictionary), solved=game.won, share=game.share)


async def answer(attempt: episodes.Attempt, role: str, messages: list[Any], text: str) -> str:
    """Return what a role answers to the next message of its conversation."""
    messages.append({"role": "user", "content": text})
    max_tokens = attempt.args.max_tokens or cards.FORMS[attempt.args.size].max_tokens
    return (await attempt.ask(messages, role=role, max_tokens=max_tokens)).content or ""


def main() -> None:
    parser = episodes.parser_of("Play Codenames through an OpenAI API, one model in both roles.")
    parser.add_argument("--size", choices=tuple(cards.FORMS), default="small", help="of the board")
    parser.add_argument("--dictionary", type=float, help="share of the rewards that WordNet gives: 0 to 1")
    parser.add_argument("--max-tokens", type=int, help="longest answer; a model that reasons needs hundreds")
    episodes.main(parser, play)


if __name__ == "__main__":
    main()
