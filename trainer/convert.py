"""Convert a GGUF file to a transformers folder, and check its answer to a question.

`python -m trainer.convert GGUF TEMPLATE DTYPE FOLDER QUESTION ANSWER`; `whetstone models get` starts it. Exit codes: 0
written; 2 not written, and the reason is on stderr.
"""

import sys
from pathlib import Path

from trainer.errors import TrainerError
from trainer.learner.gguf.conversion import convert


def main() -> None:
    """Convert the model that the command line names."""
    if len(sys.argv) != 7:
        sys.exit("python -m trainer.convert GGUF TEMPLATE DTYPE FOLDER QUESTION ANSWER")
    gguf, template, dtype, folder, question, answer = sys.argv[1:]
    try:
        convert(Path(gguf), Path(template).read_text(encoding="utf-8"), dtype, Path(folder), question, answer)
    except TrainerError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
