"""Learns a task from its description alone: makes attempts at inputs, and has RULER rank each group of attempts."""

import sys
from pathlib import Path

import compare
import invent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes


async def play(attempt: episodes.Attempt) -> episodes.Result:
    """Make one attempt. With --against, the reward is the judge's points; else only task.txt has a rule for it."""
    args = attempt.args
    text = invent.input_of(args.split, args.inputs, attempt.rng())
    messages = [{"role": "system", "content": args.task.read_text().strip()}, {"role": "user", "content": text}]
    answer = (await attempt.ask([*messages], max_tokens=args.max_tokens)).content or ""
    if not args.against:
        odd = [word for word in text.split() if word not in invent.WORDS["colors"]]
        return episodes.Result(reward=0, solved=args.inputs is None and answer.split() == odd)
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "extra_headers": {"X-Split": "eval"}}
    other = await attempt.client.chat.completions.create(model=args.against, messages=messages, **options)
    judge = attempt.client.with_options(base_url=args.judge_url, api_key=args.judge_key)
    points = await compare.points(judge, args.judge_model, messages, [answer, other.choices[0].message.content or ""])
    return episodes.Result(reward=points, solved=points > 0.5)


if __name__ == "__main__":
    parser = episodes.parser_of("Learn a task from its description, by a judge, through an OpenAI API.")
    parser.add_argument("--task", type=Path, default=invent.HERE / "task.txt", help="a text file that describes it")
    parser.add_argument("--inputs", type=Path, help="with another --task: a file with one input a line, by invent.py")
    parser.add_argument("--max-tokens", type=int, default=8, help="longest answer")
    parser.add_argument("--against", help="with --split eval: also ask this model, and have a judge compare the two")
    parser.add_argument("--judge-url", help="the server of the judge that compares")
    parser.add_argument("--judge-model", default="rule", help="its name there")
    parser.add_argument("--judge-key", default="none", help="its API key")
    parser.set_defaults(judge=True)
    episodes.main(parser, play)
