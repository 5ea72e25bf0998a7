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
from quantbench.models.loading import load_model
from quantbench.models.tokenizer import Tokenizer
from quantbench.quantize import autoquant
from quantbench.quantize import pruning as wanda
from quantbench.quantize.autoquant import Sample
from quantbench.quantize.mixed import MixedQuantizer, by_name

if TYPE_CHECKING:
    from quantbench.run.loading import Loading

ROWS, TOKENS = 8, 256  # of the calibration text: 8 sequences of 256 tokens
SAMPLED_EXPERTS = 2  # of a layer, for autoquant


def autoquantizer(loading: "Loading", say: Callable[[str], None]) -> MixedQuantizer:
    """Choose a scheme for each shape of layer, on the inputs of the first layer and of the output;
    for a saved checkpoint, take the choices that were saved."""
    checkpoint, config = loading.checkpoint, loading.config
    how = loading.device, loading.precision
    if saved := checkpoint.saved:
        return MixedQuantizer(by_name(saved.layers), *how)
    say("Timing every candidate for each shape of layer …")
    choices = autoquant.choose(
        samples(load_model(checkpoint, *how, num_layers=1), _text(loading)),
        loading.spec,
        config.batch_size,
        config.min_sqnr,
        lambda done, total: say(f"Timed {done} of {total} shapes"),
        compile=config.compile,
        kernel=config.kernel,
    )
    say(autoquant.table(choices))
    return MixedQuantizer(autoquant.by_shape(choices), *how)


def pruner(loading: "Loading") -> Callable[[str, nn.Module], None]:
    """For sparse-marlin-wanda: the function that prunes each part as soon as it is loaded."""
    return pruning(loading.checkpoint.config(), _text(loading))


def _text(loading: "Loading") -> Tensor:
    """The token ids of the calibration text."""
    checkpoint = loading.checkpoint
    tokenizer = loading.tokenizer or checkpoint.tokenizer(checkpoint.config().vocab_size)
    return token_ids(loading.config.calibration_text, tokenizer, loading.device)


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


def samples(model: Transformer, ids: Tensor) -> list[Sample]:
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
    return [Sample(name, linears[name], inputs[name]) for name in taken if name in inputs]


def _left_out(inputs: Mapping[str, Tensor]) -> set[str]:
    """The layers of experts that are not among those with the most tokens."""
    by_matrix: dict[str, list[str]] = {}
    for name in sorted(inputs, key=lambda name: -len(inputs[name])):
        if ".experts." in name:
            by_matrix.setdefault(name.rpartition(".")[2], []).append(name)
    return {name for names in by_matrix.values() for name in names[SAMPLED_EXPERTS:]}


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
    while True:
        name, part = yield
        if isinstance(part, nn.Linear):  # the output layer, whose logits are not needed
            wanda.prune(part, x.flatten(0, -2).float().norm(dim=0))
            continue
        inputs: tuple[Tensor, ...] = (x,)
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            inputs += (*rotation(architecture, positions, ids.device, number), positions)
        outputs: list[Tensor] = []
        wanda.prune_linears(part, lambda: outputs.append(part(*inputs)))  # noqa: B023
        x = outputs[0]
