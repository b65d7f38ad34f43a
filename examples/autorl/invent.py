"""Inputs for a task that a text file describes: invented by a model, or, for task.txt, drawn from words."""

import argparse
import json
import random
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent
WORDS = {name: text.split() for name, text in json.loads((HERE / "words.json").read_text()).items()}
ASK = """An AI gets this task, and then one input: {task}
Invent 40 inputs for it, as different as those of real users: a JSON list of strings of one line, and nothing else.
There are already: {known}"""


def input_of(split: str, file: Path | None, rng: random.Random) -> str:
    """Return an input: a line of the file (every fifth line is held out), or else three colors and a thing."""
    if file:
        lines = file.read_text().splitlines()
        return rng.choice(lines[4::5] if split == "eval" else [line for k, line in enumerate(lines) if k % 5 < 4])
    words = [*rng.sample(WORDS["colors"], 3), rng.choice(WORDS[split])]
    return " ".join(rng.sample(words, len(words)))


def usable(answer: str, known: list[str]) -> list[str]:
    """Return the inputs in a model's answer: texts of one line, none too long, none twice or known already."""
    try:
        texts = json.loads(answer[answer.index("[") : answer.rindex("]") + 1])
    except ValueError:
        return []
    lines = [" ".join(text.split()) for text in texts if isinstance(text, str) and "\n" not in text.strip()]
    new = {line.casefold(): line for line in lines if 0 < len(line) < 400}
    return [line for name, line in new.items() if name not in {text.casefold() for text in known}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have a model invent inputs for a task; print them, one a line.")
    parser.add_argument("task", type=Path, help="a text file that describes the task")
    parser.add_argument("--model", required=True, help="who invents; OPENAI_BASE_URL and OPENAI_API_KEY say where")
    parser.add_argument("--inputs", type=int, default=300, help="how many, if the model has so many ideas")
    args, client, known = parser.parse_args(), OpenAI(), list[str]()
    for _ in range(args.inputs):
        ask = ASK.format(task=args.task.read_text(), known=json.dumps(known[-100:]))
        answer = client.chat.completions.create(model=args.model, messages=[{"role": "user", "content": ask}])
        known += usable(answer.choices[0].message.content or "", known)
        if len(known) >= args.inputs:
            break
    print("\n".join(known[: args.inputs]))
