"""What can go wrong in training, as one tree. Knows no torch and opens nothing.

TrainerError
├── RowError              what was logged cannot be trained on (also a ValueError)
├── RewardError           a reward is no number (also a ValueError)
├── NotFinite             a loss or gradient is NaN or infinite; nothing has moved
├── LeaseLost             another worker has taken the step over
├── DeviceBusy            vLLM does not leave the accelerator that it shares with the trainer
├── PeerFailed            another process of the step failed, so none goes on
├── PeersMissing          the processes or devices that the settings ask for are not there
├── SinkMissing           figures are to go where nothing is installed
├── ModelUnusable         the base model cannot be loaded, or does not compute its logits as we do
└── AdapterError
    ├── AdapterExists     the folder is taken; adapters are never overwritten
    ├── AdapterNotWritten the disk refused; nothing stands under the final name
    └── AdapterMismatch   the adapter is whole, but of another base model or another shape

Beside it stands `whetstone.adapters.AdapterDamaged`: whoever loads adapters meets it, not the trainer alone.
"""


class TrainerError(Exception):
    """Training cannot go on; the message says what was wrong and what to do."""


class RowError(TrainerError, ValueError):
    """What was logged cannot be trained on."""


class RewardError(TrainerError, ValueError):
    """A reward is NaN or infinite."""


class NotFinite(TrainerError):
    """A loss or gradient is NaN or infinite. Weights, optimizer and RNG are as they were before the step."""


class LeaseLost(TrainerError):
    """Another worker has taken the step over; this one writes nothing more."""


class DeviceBusy(TrainerError):
    """vLLM does not leave the accelerator that it shares with the trainer. The step waits and is tried again."""


class PeerFailed(TrainerError):
    """Another process of the step failed, so none goes on. No weight has moved in any of them."""


class PeersMissing(TrainerError):
    """The processes or devices that the settings ask for are not there."""


class SinkMissing(TrainerError):
    """A step's figures are to go to a sink whose package is not installed."""


class ModelUnusable(TrainerError):
    """The base model cannot be loaded, or does not compute its logits as we do."""


class AdapterError(TrainerError):
    """An adapter cannot be written or read."""


class AdapterExists(AdapterError):
    """The folder is taken; adapters are never overwritten."""


class AdapterNotWritten(AdapterError):
    """The disk refused. Nothing stands under the final name."""


class AdapterMismatch(AdapterError):
    """The adapter is whole, but of another base model or another shape than asked for."""
