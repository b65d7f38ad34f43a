"""The errors of training, as one tree.

TrainerError
├── RowError              logged data cannot be trained on (also a ValueError)
├── RewardError           a reward is NaN or infinite (also a ValueError)
├── NotFinite             a loss or gradient is NaN or infinite; no weight has moved
├── LeaseLost             another worker has taken the step over
├── DeviceBusy            vLLM does not free the accelerator that it shares with the trainer
├── OutOfMemory           the device's memory does not suffice
├── RowsDoNotFit          rows do not fit into the device's memory even alone
├── PeerFailed            another process of the step failed, so all stop
│   └── PeerOutOfMemory   its device's memory does not suffice (also an OutOfMemory)
├── PeersMissing          the processes or devices that the settings require do not exist
├── SinkMissing           the package of a metrics sink is not installed
├── LeftOut               (domain/examples/sft_examples) an example cannot be imitated; the others go on
├── CandidateUnfit        (gate/probe) the candidate does not pass the gate
├── LoadRefused           (vllm/pool) all servers are healthy, and none loads the adapter
├── NotAForest            (learner/attention) the model passes an argument that a forest does not support
├── NotProven             (learner/self_checks) the model does not read forests as it reads rows
├── AnswerRefused         (vllm/teacher) a teacher refuses this one answer; the others go on
├── TeacherUnusable       a teacher cannot be reached, or is none for this policy
├── ServiceDown           the training service cannot be reached, is too slow, or refuses a request
├── ServiceRefused        the Tinker API has no step of this kind, or the service gives another adapter than wanted
├── ModelUnusable         the base model cannot be loaded, or does not compute its logits as we do
└── AdapterError
    ├── AdapterExists     the folder exists; adapters are never overwritten
    ├── AdapterNotWritten the disk refused the write; nothing exists under the final name
    └── AdapterMismatch   the adapter is complete, but of another base model or another shape

`whetstone.registry.adapters.AdapterDamaged` is not in this tree: other programs load adapters too.
"""


class TrainerError(Exception):
    """Training cannot continue; the message gives the cause and the remedy."""


class RowError(TrainerError, ValueError):
    """Logged data cannot be trained on."""


class RewardError(TrainerError, ValueError):
    """A reward is NaN or infinite."""


class NotFinite(TrainerError):
    """A loss or gradient is NaN or infinite. Weights, optimizer and RNG are as they were before the step."""


class LeaseLost(TrainerError):
    """Another worker has taken the step over; this one writes nothing more."""


class DeviceBusy(TrainerError):
    """vLLM does not free the accelerator that it shares with the trainer. The step waits and is retried."""


class OutOfMemory(TrainerError):
    """The device's memory does not suffice. The step waits and is retried."""


class RowsDoNotFit(TrainerError):
    """Rows do not fit into the device's memory even alone. The step can be taken without their trajectories."""

    def __init__(self, trajectory_ids: frozenset[str]) -> None:
        """`trajectory_ids`: whose rows they are."""
        super().__init__(
            f"{len(trajectory_ids)} trajectories have a row that does not fit into the device's memory even alone: "
            f"{', '.join(sorted(trajectory_ids)[:3])}{' ...' if len(trajectory_ids) > 3 else ''}. Set "
            "trainer.max_row_tokens to what fits"
        )
        self.trajectory_ids = trajectory_ids


class PeerFailed(TrainerError):
    """Another process of the step failed, so all stop. No weight has moved in any of them."""


class PeerOutOfMemory(PeerFailed, OutOfMemory):
    """The memory of another process's device does not suffice, so all stop. No weight has moved in any of them."""


class PeersMissing(TrainerError):
    """The processes or devices that the settings require do not exist."""


class SinkMissing(TrainerError):
    """The package of a sink for a step's figures is not installed."""


class TeacherUnusable(TrainerError):
    """A teacher cannot be reached, has another tokenizer, or is a server of ours."""


class ServiceDown(TrainerError):
    """The training service cannot be reached, is too slow, or refuses a request. The step waits and begins again from
    what was saved."""


class ServiceRefused(TrainerError):
    """The Tinker API has no step of this kind, or the service gives another adapter than wanted."""


class ModelUnusable(TrainerError):
    """The base model cannot be loaded, or does not compute its logits as we do."""


class AdapterError(TrainerError):
    """An adapter cannot be written or read."""


class AdapterExists(AdapterError):
    """The folder exists; adapters are never overwritten."""


class AdapterNotWritten(AdapterError):
    """The disk refused the write. Nothing exists under the final name."""


class AdapterMismatch(AdapterError):
    """The adapter is complete, but belongs to another base model or has another shape than required."""
