"""The beginning of tiny_moe: tiny's weights as a mixture of experts that computes the same.

This is "sparse upcycling" (Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055). The
feed-forward network becomes the expert that all tokens share. Beside it each layer gets 8 experts,
of which a token takes two:

- The layer's inputs, for some text, are put into 8 clusters by k-means. The router begins with the
  clusters' centers, so at first an expert gets the tokens of one kind.
- An expert begins with the 128 neurons of the network that are most active on its own tokens, as in
  MoEfication (Zhang et al. 2022, https://arxiv.org/abs/2110.01786). Their weights of the second
  matrix begin at zero, so at first the model computes exactly what the embedded model computes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.llama import FeedForward, Transformer
from quantbench.models.loading import load_model
from quantbench.models.mixtral import MixtureOfExperts
from quantbench.models.registry import build


def upcycled(config: ModelConfig, tokens: Tensor) -> Transformer:
    """The mixture that the embedded model becomes; its logits are the same.

    config: of the mixture. tokens (B, S): the text whose tokens are put into clusters.
    """
    teacher, model = load_model("tiny"), build(config)
    layers = list(zip(teacher.layers, model.layers, strict=True))
    inputs = [_inputs(old.feed_forward) for old, _ in layers]
    with torch.no_grad():
        teacher(tokens)
        for name, parameter in model.named_parameters():
            if ".feed_forward." not in name:
                parameter.copy_(teacher.get_parameter(name))
        for (old, new), x in zip(layers, inputs, strict=True):
            _add_experts(old.feed_forward, new.feed_forward, torch.cat(x))
    return model


def _inputs(module: nn.Module) -> list[Tensor]:
    """A list to which the inputs (T, D) of the module's calls will be added."""
    inputs: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, x: inputs.append(x[0].flatten(0, -2)))
    return inputs


def _add_experts(old: FeedForward, new: MixtureOfExperts, x: Tensor) -> None:
    """Give a mixture the weights with which it computes what `old` computes. x (T, D): inputs."""
    centers, cluster = clusters(x, len(new.experts))
    new.router.weight.copy_(centers - centers.mean(0))
    new.shared_gate.weight.zero_()  # a gate of one half for every token
    new.shared.w13.weight.copy_(old.w13.weight)
    new.shared.w2.weight.copy_(2 * old.w2.weight)
    gate, up = old.w13.weight.chunk(2)
    activity = (F.silu(x @ gate.T) * (x @ up.T)).abs() * old.w2.weight.norm(dim=0)  # (T, F)
    for number, expert in enumerate(new.experts):
        neurons = (
            (activity[cluster == number].mean(0) - activity.mean(0))
            .topk(expert.w2.weight.shape[1])
            .indices
        )
        expert.w13.weight.copy_(torch.cat((gate[neurons], up[neurons])))
        expert.w2.weight.zero_()


def clusters(x: Tensor, count: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """Spherical k-means: the centers (count, D), of unit length, and each row's cluster (T,) int64.

    x (T, D). A row belongs to the center with which it has the largest product. Centers begin at
    rows drawn at random; one that loses all of its rows begins anew at another.
    """
    unit = F.normalize(x, dim=1)
    centers = unit[torch.randperm(len(unit))[:count]]
    for _ in range(rounds):
        cluster = (unit @ centers.T).argmax(1)
        sums = torch.zeros_like(centers).index_add_(0, cluster, unit)
        empty = cluster.bincount(minlength=count) == 0
        sums[empty] = unit[torch.randint(len(unit), (int(empty.sum()),))]
        centers = F.normalize(sums, dim=1)
    return centers, (unit @ centers.T).argmax(1)
