"""Errors that a person can cause; the command prints the message and exits with the exit code.

`code` says in one word what failed; programs and tests compare it instead of the message.
"""


class QuantbenchError(Exception):
    """The run failed: a missing file, a full disk, a device that is not there."""

    exit_code = 1
    code = "failed"


class UsageError(QuantbenchError):
    """The command line asked for something that does not exist or cannot be combined."""

    exit_code = 2
    code = "usage"


class CheckpointError(QuantbenchError):
    """A checkpoint or tokenizer that is missing, damaged or not of a kind we read."""

    code = "checkpoint"


class KernelError(QuantbenchError):
    """A kernel that the user names cannot run on this device, dtype or shape."""

    code = "kernel"


class MemoryShortage(QuantbenchError):
    """What the run would allocate does not fit into the device's free memory."""

    code = "memory"


class LogError(QuantbenchError):
    """The benchmark log could not be read or appended to; it is left as it was."""

    code = "file"


class TierError(QuantbenchError):
    """The slow tier of experts cannot be written or read."""

    code = "expert-tier"
