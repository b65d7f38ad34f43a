"""Plays any task of reasoning-gym by its name, through any OpenAI-compatible server, and posts the task's own score.

reasoning-gym needs an environment of its own: `pip install reasoning-gym openai`.
"""

import json
import sys
from pathlib import Path

import reasoning_gym

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes

SYSTEM = "Think first. Then give the answer alone, between <answer> and </answer>."
PLAIN = "Give the answer alone."
RIGHT = 0.99
"""The least score of an answer that is right; some tasks give less to one that is not in the shortest form."""


def answer_in(text: str) -> str:
    """Return what stands between the last tags, or else the whole text."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Ask one question. Its seed is odd in training and even in held-out tasks, so that no seed is in both."""
    args = attempt.args
    seed = attempt.rng().randrange(2**30) * 2 + int(attempt.trains)
    # A set of one: some tasks make their question k from seed + k.
    dataset = reasoning_gym.create_dataset(args.dataset, seed=seed, size=1, **args.config)
    entry = dataset[0]
    messages = [{"role": "system", "content": PLAIN if args.plain else SYSTEM}]
    messages.append({"role": "user", "content": entry["question"]})
    message = await attempt.ask(messages, max_tokens=args.max_tokens)
    score = float(dataset.score_answer(answer_in(message.content or ""), entry))
    return episodes.Result(reward=score, solved=score >= RIGHT)


if __name__ == "__main__":
    parser = episodes.parser_of("Play a task of reasoning-gym through an OpenAI API.")
    parser.add_argument("--dataset", default="leg_counting", help="the name of the task")
    parser.add_argument("--config", type=json.loads, default={}, help="its options, as JSON: '{\"max_animals\": 2}'")
    parser.add_argument("--plain", action="store_true", help="ask for the answer alone, for models that cannot think")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer")
    episodes.main(parser, play)
