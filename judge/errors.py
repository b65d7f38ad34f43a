"""The errors of judging, as one tree.

JudgeError
├── NoReward              (reward_functions/sandbox) a reward function gave no answer
│   └── NotFound          it does not exist, or its module cannot be imported
├── NotNumbers            (decisions/reward_parts) a reward function's answer is neither a number nor named numbers
├── CallFailed            (ruler/errors) a judge gave no answer
│   ├── JudgeUnavailable  it is busy, down, slow or unintelligible: ask again later
│   ├── TooLarge          the prompt exceeds the model's limit: a shorter one may pass
│   └── JudgeRefused      it will never answer this: ask another one
├── NotAnswered           (ruler/parse) a judge's answer cannot be used
├── LeaseLost             (ruler/lease) another worker has the group, or it does not have to be ranked any more
├── Waits                 (ruler/lease) the group cannot be ranked yet
├── NoReferences          (audit/references) there is nothing to compare judges with
└── NoMatplotlib          (audit/report) matplotlib is not installed

`reward_functions.sandbox_child.ProgramFailed` is not in this tree: that process imports nothing of ours.
"""


class JudgeError(Exception):
    """A trajectory or group cannot be judged, or judges cannot be measured; the message gives the reason."""
