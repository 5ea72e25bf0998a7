"""What each scheme does to a model's predictions in each layer, from one backward pass.

    tokens = calibration_tokens(plan, text)                  # (B, S)
    damage = damages(model, tokens, others, specs, report)   # model: plain modules, load_model's
    damage["layers.0.feed_forward.w2", "int4wo-64"]          # KL(full ‖ quantized), nats a token

To second order, the KL of a change is half the mean square of the change of log p(y), where the
model itself draws y (Fisher's information). For row n of a weight and a sequence, that change is
Σ_s g_sn · Δ_n x_s = G_n · Δ_n, where g is the gradient at the layer's output, x its input, Δ the
error of the weight and G = Σ_s g_s x_sᵀ. Rows are rounded independently of each other, so the
squares of rows add up, and so do those of layers. Every scheme is tried on the same rows, drawn by
what they weigh, since a few tokens' rows have most of an output's; -gptq goes by the inputs that
other tokens make.

The model is taken block by block, each in float32 while it is computed. Memory holds the weights,
the blocks' inputs and the gradient of some rows.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.models.llama import Transformer
from quantbench.progress import Report
from quantbench.quantize import observe
from quantbench.quantize.gptq import corrected, inverse_of
from quantbench.quantize.observe import products
from quantbench.quantize.packed import dequantized
from quantbench.quantize.registry import Quantizer, with_weight
from quantbench.quantize.spec import Int8Embedding, Spec

GRADIENT_ELEMENTS = 1 << 21  # of outputs' gradients at once
LOGIT_ROWS = 64  # tokens whose logits are computed at once
SAMPLED_ROWS, LIGHTEST = 256, 1e-20  # of a weight, with replacement
M = TypeVar("M", bound=nn.Module)
Rows = slice | Tensor  # of a weight, or their numbers
Damage = dict[tuple[str, str], float]  # nats a token, by (layer, scheme)


@torch.no_grad()
def damages(
    model: Transformer, ids: Tensor, others: Tensor, specs: Sequence[Spec], report: Report
) -> Damage:
    """The damage of each scheme in each layer that it takes; nothing of Int8Embedding but in
    tok_embeddings.

    model: in full precision, of plain modules. ids (B, S): tokens of B texts. others (C, S): tokens
    that calibrate; C = 0: calibrated schemes get no damage. report: called as (blocks done,
    blocks).
    """
    device, dtype = ids.device, model.norm.weight.dtype
    quantizers = {str(s): Quantizer.of_shapes(s, device, dtype) for s in specs}
    layers = _Layers(quantizers, ids.numel())
    positions = torch.arange(ids.shape[1])
    every, inputs = torch.cat([ids, others]), list[Tensor]()
    x = model.embed(every)
    beside, x = model.beside(every, x, positions), x.float()
    for block, more in zip(model.layers, beside, strict=True):
        inputs.append(x.to(dtype))
        x = _float(block)(x, *more, positions)
    gradient = _at_the_head(model, x[: len(ids)], x[len(ids) :], layers)
    for i in reversed(range(len(inputs))):
        block, rest = model.layers[i], (*beside[i], positions)
        gradient = _through_block(
            block, f"layers.{i}", inputs.pop().float(), gradient, rest, layers
        )
        report(len(model.layers) - i, len(model.layers))
    gradient *= model.config.embedding_multiplier
    table = Quantizer.of_shapes(Int8Embedding(), device, dtype)
    rounded = table.quantized("tok_embeddings", model.tok_embeddings)
    error = (rounded(ids) - model.tok_embeddings(ids)).float()
    square = (gradient * error).square().sum().item()  # tokens' rows are rounded independently
    layers.found["tok_embeddings", str(Int8Embedding())] = square / 2 / ids.numel()
    return layers.found


class _Layers:
    """The damage of every scheme in the layers that `add` was called with."""

    def __init__(self, quantizers: dict[str, Quantizer], tokens: int) -> None:
        self.quantizers, self.tokens, self.found = quantizers, tokens, Damage()

    def add(
        self,
        name: str,
        layer: nn.Linear,
        x: Tensor,
        gradient: Callable[[Rows], Tensor],
        hessian: Tensor | None,
    ) -> None:
        """layer: with the weight (N, K) that is quantized. x (B, S, K): its inputs. gradient: of
        log p at the outputs (B, S, n) of some rows. hessian: XᵀX (K, K) of the inputs that tokens
        which calibrate make; None where there are none.

        A scale for a whole tensor, as nvfp4 has it, is that of the rows that are drawn."""
        weighs = _weighs(layer, x, gradient)
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.multinomial(weighs, SAMPLED_ROWS, replacement=True, generator=generator)
        stands_for = weighs.sum() / weighs[rows] / SAMPLED_ROWS  # rows, a row that was drawn
        part = with_weight(nn.Linear(1, 1, bias=False), layer.weight.data[rows])
        exact, G = part.weight.data, gradient(rows).mT @ x
        inverse = None if hessian is None else inverse_of(hessian)
        for scheme, quantizer in self.quantizers.items():
            spec = quantizer.spec
            untaught = spec.calibrated and hessian is None
            if untaught or quantizer.scheme.refuses(spec, layer.in_features):
                continue
            weight: Any = quantizer.quantized(name, part).weight.data
            if spec.way == "gptq" and inverse is not None:
                weight = corrected(exact, weight, inverse)
            change = (G * (dequantized(weight) - exact.float())).sum(-1)  # (B, rows)
            square = (change.square() * stands_for).sum().item()
            self.found[name, scheme] = square / 2 / self.tokens


def _weighs(layer: nn.Linear, x: Tensor, gradient: Callable[[Rows], Tensor]) -> Tensor:
    """About what each row (N,) has in a damage: the square of its weights, and of G without the
    products of different tokens."""
    squares = x.square().sum(-1, keepdim=True)  # (B, S, 1)
    count = max(1, GRADIENT_ELEMENTS // squares.numel())
    starts = range(0, layer.out_features, count)
    found = [(gradient(slice(n, n + count)).square() * squares).sum((0, 1)) for n in starts]
    size = layer.weight.data.float().square().sum(1)
    return (torch.cat(found) * size).clamp(min=LIGHTEST)


def _float(module: M) -> M:
    return copy.deepcopy(module).float()


def _at_the_head(model: Transformer, x: Tensor, others: Tensor, layers: _Layers) -> Tensor:
    """Adds the output layer; the gradient of log p(y) at the last block's outputs x (B, S, D).
    others (C, S, D): the same of tokens that calibrate."""
    norm, output, bounded = _float(model.norm), _float(model.output), model.bounded
    gradient, drawn = torch.empty_like(x), x.new_empty(x.shape[:2], dtype=torch.long)
    log_sum = torch.empty_like(drawn, dtype=torch.float32)
    generator = torch.Generator(x.device).manual_seed(0)
    flat = (t.flatten(0, 1) for t in (x, gradient, drawn, log_sum))
    parts = (torch.split(t, LOGIT_ROWS) for t in flat)
    for rows, of_rows, y, total in zip(*parts, strict=True):
        with torch.enable_grad():
            logits = bounded(output(norm(rows.requires_grad_())))
        total.copy_(logits.logsumexp(-1))
        p = logits.softmax(-1)
        y.copy_(torch.multinomial(p, 1, generator=generator)[:, 0])
        of_rows.copy_(torch.autograd.grad(logits, rows, p - F.one_hot(y, p.shape[-1]))[0])
    x = norm(x)

    def at_logits(rows: Rows) -> Tensor:
        weight = output.weight[rows]
        with torch.enable_grad():
            y = F.linear(x, weight).requires_grad_()
            logits = bounded(y)
        numbers = torch.arange(output.out_features, device=x.device)[rows]
        p = (logits - log_sum[..., None]).exp()
        return torch.autograd.grad(logits, y, p - (drawn[..., None] == numbers).float())[0]

    hessian = products(norm(others).flatten(0, 1)) if len(others) else None
    layers.add("output", model.output, x, at_logits, hessian)
    return gradient


def _through_block(
    block: nn.Module,
    name: str,
    x: Tensor,
    gradient: Tensor,
    rest: Sequence[Any],
    layers: _Layers,
) -> Tensor:
    """Adds the linear layers of a block with these inputs x (B + C, S, D); the gradient at the
    first B, from that (B, S, D) at their outputs. The others calibrate. rest: further arguments."""
    copied, seen = _float(block), dict[str, tuple[Tensor, Tensor]]()
    x, others = x[: len(gradient)], x[len(gradient) :]
    hessians = {}
    if len(others):
        run = functools.partial(copied, others, *rest)
        hessians = observe.observed(observe.linears_of(copied), run, products)
    for key, layer in copied.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda _, given, y, key=key: seen.__setitem__(key, (given[0].detach(), y))
            )
    with torch.enable_grad():
        y = copied(x.requires_grad_(), *rest)
    outputs = [output for _, output in seen.values()]
    at_x, *at_outputs = torch.autograd.grad(y, [x, *outputs], gradient)
    for (key, (given, _)), found in zip(seen.items(), at_outputs, strict=True):
        given, found = _by_text(given, len(x)), _by_text(found, len(x))
        layer, of = cast(nn.Linear, block.get_submodule(key)), hessians.get(key)
        layers.add(f"{name}.{key}", layer, given, functools.partial(_rows, found), of)
    return at_x


def _rows(gradient: Tensor, rows: Rows) -> Tensor:
    return gradient[..., rows]


def _by_text(x: Tensor, texts: int) -> Tensor:
    """(B, S, K) as it is; an expert's tokens (T, K), which are in the texts' order, in B parts."""
    if x.dim() == 3:
        return x
    length = -(-len(x) // texts)
    return F.pad(x, (0, 0, 0, texts * length - len(x))).view(texts, length, -1)
