"""Whether checkpoints hold the same model, and which of them is the nearest to full precision.

same_model(["model-Q8_0.gguf", "model-awq"]).schemes        # ["gguf-Q8_0", "awq-4-128"]
"""

import dataclasses

from quantbench.errors import UsageError
from quantbench.models.formats import Checkpoint, open_checkpoint
from quantbench.models.tokenizer import other_encoding
from quantbench.quality.texts import TEXTS
from quantbench.quality.types import SameModel
from quantbench.text import shown


def same_model(paths: list[str]) -> SameModel:
    """Raises UsageError, one line, for an architecture or a tokenizer other than the first's;
    CheckpointError for a checkpoint that cannot be read."""
    checkpoints = [open_checkpoint(path) for path in paths]
    for path, checkpoint in zip(paths[1:], checkpoints[1:], strict=True):
        if different := _difference(checkpoints[0], checkpoint):
            what, first, other = different
            raise UsageError(
                f"--same_model: {path} is another model than {paths[0]}: its {what} is "
                f"{shown(other)}, not {shown(first)}; leave out --same_model (in ab, "
                "--allow_different compares them even so)"
            )
    saved = [checkpoint.saved for checkpoint in checkpoints]
    schemes = [None if how is None else how.label or how.scheme for how in saved]
    if None in schemes:
        best = schemes.index(None)
    else:  # each has the same number of weights
        sizes = [sum(file.stat().st_size for file in one.files) for one in checkpoints]
        best = sizes.index(max(sizes))
    return SameModel(schemes, best, checkpoints[best].in_full_precision() is not None)


def _difference(one: Checkpoint, other: Checkpoint) -> tuple[str, object, object] | None:
    """What differs first, and its two values."""
    configs = one.config(), other.config()
    for field in dataclasses.fields(configs[0]):
        values = [getattr(config, field.name) for config in configs]
        if field.name != "name" and values[0] != values[1]:
            return field.name, values[0], values[1]
    size = configs[0].vocab_size
    samples = "".join(path.read_text("utf-8") for path in TEXTS.values())
    tokenizers = one.tokenizer(size), other.tokenizer(size)
    return other_encoding(*tokenizers, samples.splitlines(keepends=True))
