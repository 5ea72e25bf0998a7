"""Calibration: the inputs that a text gives to a model's linear layers.

autoquant measures each shape of layer on the inputs of the first layer (`samples`). Wanda weighs
each weight by the norm of its inputs (`pruning`).
"""

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantbench import files
from quantbench.errors import UsageError
from quantbench.models.config import ModelConfig
from quantbench.models.formats import EMBEDDED
from quantbench.models.llama import Transformer, rotation
from quantbench.models.tokenizer import Tokenizer
from quantbench.quantize import pruning as wanda

if TYPE_CHECKING:
    from quantbench.quantize.autoquant import Sample

ROWS, TOKENS = 8, 256  # of the calibration text: 8 sequences of 256 tokens
SAMPLED_EXPERTS = 2  # of a layer, for autoquant


def token_ids(path: str | None, tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """The beginning of a text, (rows, tokens) int64: ROWS · TOKENS tokens, or a shorter text.

    path: --calibration_text; the embedded text if None. Raises UsageError for a text that cannot be
    read, or has fewer than 2 · ROWS tokens.
    """
    source = Path(path or EMBEDDED / "heldout.txt")
    text = files.read_text("--calibration_text", source)
    ids = tokenizer.encode(text)[: ROWS * TOKENS]
    rows, length = min(ROWS, len(ids)), len(ids) // ROWS
    if length < 2:
        raise UsageError(
            f"--calibration_text {source}: {len(ids)} tokens are too few; {2 * ROWS} is the least, "
            f"{ROWS * TOKENS} are used"
        )
    return torch.tensor(ids[: rows * length], device=device).view(rows, length)


def samples(model: Transformer, ids: Tensor) -> "list[Sample]":
    """Every linear layer with its inputs (tokens, in_features), for token ids (B, S).

    An expert's inputs are the tokens that are routed to it. Only the SAMPLED_EXPERTS with the most
    are taken: their layers are alike, and measuring all would take minutes. Logits are not
    computed: with a large vocabulary they take most of the time.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    inputs: dict[str, Tensor] = {}
    for name, layer in linears.items():
        layer.register_forward_pre_hook(
            lambda _, x, name=name: inputs.__setitem__(name, x[0].flatten(0, -2))
        )
    inputs["output"] = model.norm(model.hidden(ids)).flatten(0, -2)
    taken = [name for name in linears if name not in _left_out(inputs)]
    from quantbench.quantize.autoquant import Sample

    return [Sample(name, linears[name], inputs[name]) for name in taken if name in inputs]


def _left_out(inputs: Mapping[str, Tensor]) -> set[str]:
    """The layers of experts that are not among those with the most tokens."""
    by_matrix: dict[str, list[str]] = {}
    for name in inputs:
        if ".experts." in name:
            by_matrix.setdefault(name.rpartition(".")[2], []).append(name)
    left_out: set[str] = set()
    for names in by_matrix.values():
        left_out.update(sorted(names, key=lambda name: -len(inputs[name]))[SAMPLED_EXPERTS:])
    return left_out


def pruning(architecture: ModelConfig, ids: Tensor) -> Callable[[str, nn.Module], None]:
    """A function of (name, part) that prunes a part to two of every four weights by Wanda.

    It must be called for each part in the model's order, as `load_model` calls `ready`.
    ids: the calibration text, (B, S).
    """
    run = _through_the_model(architecture, ids)
    next(run)
    return lambda name, part: run.send((name, part))


def _through_the_model(
    architecture: ModelConfig, ids: Tensor
) -> Generator[None, tuple[str, nn.Module], None]:
    """Run the calibration text through each part of the model that is sent, then prune the part.

    A layer runs before it is pruned, so all norms are those of the unpruned model.
    """
    x = ids
    positions = torch.arange(ids.shape[1])
    cos, sin = rotation(architecture, positions, ids.device)
    while True:
        name, part = yield
        if isinstance(part, nn.Linear):  # the output layer, whose logits are not needed
            wanda.prune(part, x.flatten(0, -2).float().norm(dim=0))
            continue
        inputs = (x, cos, sin, positions) if name.startswith("layers.") else (x,)
        outputs: list[Tensor] = []
        wanda.prune_linears(part, lambda: outputs.append(part(*inputs)))  # noqa: B023
        x = outputs[0]
