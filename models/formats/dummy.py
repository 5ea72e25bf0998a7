"""dummy:NAME and dummy:path/to/config.json: an architecture with random weights."""

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from quantbench.models.config import ModelConfig
from quantbench.models.formats.base import Checkpoint
from quantbench.models.formats.hugging_face import read_config
from quantbench.models.llama import Transformer
from quantbench.models.presets import preset
from quantbench.models.split import Cut

_STD = 0.02  # standard deviation of the weights
PERIOD = (1 << 20) + 7  # length of the repeated block; prime, so that a matrix's rows differ


class Dummy(Checkpoint):
    """Random weights, for measuring speed and memory without a download."""

    needs_tokenizer = False
    files = ()

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a name that is no preset, CheckpointError for a bad config.json."""
        name = str(path).removeprefix("dummy:")
        file = Path(name)
        if file.suffix == ".json" or (name and os.path.lexists(file)):
            file = file / "config.json" if file.is_dir() else file
            self.folder = Path(os.path.abspath(file)).parent
            self._config = read_config(file, self.folder.name)
        else:
            self.folder, self._config = None, preset(name)
        self.name = self._config.name

    @classmethod
    def of(cls, config: ModelConfig) -> "Dummy":
        """Random weights for an architecture that is known."""
        dummy = cls.__new__(cls)
        dummy.folder, dummy._config, dummy.name = None, config, config.name
        return dummy

    def config(self) -> ModelConfig:
        return self._config

    def tensors(self, device: torch.device | str = "cpu") -> "RandomTensors":
        return RandomTensors(device)


class RandomTensors:
    """The same random weights in every run: normal, with a standard deviation of 0.02; norms are 1.

    Drawing billions of normal numbers would take longer than the measurement, so one block of them
    is repeated. Where it begins depends on the parameter's name, and on nothing else: neither on
    the number of layers nor on that of threads.
    """

    def __init__(self, device: torch.device | str) -> None:
        block = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * _STD
        self._twice = block.to(device).repeat(2)  # so that every rotation is a slice

    def check(self, model: Transformer, depth: int) -> None:
        """Every parameter can be drawn."""

    def read(self, name: str, like: Tensor, cut: Cut | None = None) -> Tensor:
        if cut is not None and cut.dim == 0:
            parts = [self._rows(name, like, *span) for span in cut.ranges]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        weight = self._rows(name, like, 0, len(like))
        return weight if cut is None else cut.of([weight])

    def _rows(self, name: str, like: Tensor, start: int, end: int) -> Tensor:
        self._twice = self._twice.to(like.dtype)
        shape = (end - start, *like.shape[1:])
        weight = torch.empty(shape, dtype=like.dtype, device=self._twice.device)
        if "norm" in name:
            return weight.fill_(1.0)
        first = start * like[0].numel() - zlib.crc32(name.encode())
        block = self._twice[first % PERIOD :][:PERIOD]
        flat = weight.view(-1)
        repeats = flat.numel() // PERIOD
        end = repeats * PERIOD
        # In one op: each op ends by waiting for its slowest thread.
        flat[:end].view(repeats, PERIOD).copy_(block)
        flat[end:].copy_(block[: flat.numel() - end])
        return weight
