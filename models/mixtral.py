"""Llama-family decoders with a mixture of experts in their layers, in one file.

It computes Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088), Qwen2-MoE, Qwen3-MoE and
OLMoE: models.llama.Transformer, whose feed-forward networks are replaced. In each layer a router
gives every token to some of many narrower networks, the experts, and adds up what they return,
weighed. `ModelConfig.mixture` says how many there are, how they are weighed, whether there is an
expert for all tokens, and which layers have none.

Each expert has its own two matrices, so a scheme quantizes it as it would alone. The routers stay
in full precision: they have a thousandth of the weights, and decide over all others.

Shapes: T tokens (rows times positions), D model width, X experts, k experts of a token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.devices import stored_bytes
from quantbench.models.config import Mixture, ModelConfig, compiles
from quantbench.models.llama import Block, FeedForward, Transformer
from quantbench.models.stacked import Stacked


class Mixtral(Transformer):
    """The whole model; see models.llama.Transformer."""

    def block(self, number: int) -> Block:
        dense = self.config.mixture.is_dense(number)
        return Block(self.config, number, None if dense else MixtureOfExperts(self.config))

    def compiles(self) -> bool:
        device, elsewhere = self.tok_embeddings.weight.device.type, elsewhere_of(self)
        return compiles(self.config.mixture, device, elsewhere is not None)

    def prepare_to_compile(self) -> None:
        """The graph then computes no expert that no token takes."""
        stacks: list[Stacked] = []
        for module in self.modules():
            if isinstance(module, MixtureOfExperts) and not (module.stacked or module.elsewhere):
                module.stacked = Stacked.of(module.experts, stacks)
                stacks += [module.stacked] if module.stacked else []

    def unread_bytes(self, rows: int) -> float:
        """One row reads k of X experts. Several rows are taken to choose independently and evenly:
        then a step reads X · (1 - (1 - k/X)^rows) of them on average."""
        unread = 0.0
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                share = 1 - module.experts_per_token / len(module.experts)
                unread += share**rows * sum(map(stored_bytes, module.experts.parameters()))
        return unread


def elsewhere_of(model: nn.Module) -> "Outputs | None":
    """What computes the experts of a model that are in another tier of memory; None if none are."""
    mixtures = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    return next((mixture.elsewhere for mixture in mixtures if mixture.elsewhere is not None), None)


# (tokens (T, D), rows of them by expert's number) -> what each expert returns for its rows, in the
# order of numbers.
Outputs = Callable[[Tensor, Mapping[int, Tensor]], Iterable[tuple[int, Tensor]]]


class MixtureOfExperts(nn.Module):
    """Σ weight · expert(x) over the experts that the router chooses for each token."""

    # Computes the experts where their weights are not all in the modules (experts/tiers.py).
    elsewhere: Outputs | None = None
    expert: type[FeedForward] = FeedForward
    # For a compiled graph (`prepare_to_compile`); without it the graph computes all experts.
    stacked: Stacked | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mixture = config.mixture
        self.experts_per_token = mixture.experts_per_token
        self.router = Router(config.dim, mixture)
        self.experts = nn.ModuleList(
            self.expert(config, width=mixture.expert_dim) for _ in range(mixture.num_experts)
        )
        if mixture.shared_dim:
            self.shared = FeedForward(config, width=mixture.shared_dim)
            self.shared_gate = Gate(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D) → (…, D). Sums are in float32, and rounded once."""
        tokens = x.flatten(0, -2)  # (T, D)
        y = self.routed(tokens, *self.router(tokens))
        if hasattr(self, "shared"):
            y = y + self.shared(tokens).float() * self.shared_gate(tokens)
        return y.type_as(x).view_as(x)

    def routed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighed sum (T, D) float32 of what each token's experts return.

        tokens (T, D); chosen (T, k) int64, the experts' numbers; weights (T, k) float32. Each
        expert computes all of its tokens at once, and none that has no token.
        """
        if torch.compiler.is_compiling():
            return self.routed_in_graph(tokens, chosen, weights)
        if len(tokens) == 1 and not tokens.is_meta:
            return self.routed_one(tokens, chosen[0].tolist(), weights[0])
        order = chosen.flatten().argsort(stable=True)  # assignments, expert by expert
        counts = tokens_per_expert(chosen, len(self.experts))
        rows = (order // chosen.shape[1]).split(counts)
        shares = weights.flatten()[order].split(counts)
        y = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        work = {expert: taken for expert, taken in enumerate(rows) if len(taken)}
        for expert, output in (self.elsewhere or self.outputs)(tokens, work):
            y.index_add_(0, rows[expert], output.float() * shares[expert][:, None])
        return y

    def routed_one(self, token: Tensor, chosen: list[int], weights: Tensor) -> Tensor:
        """`routed` for one token (1, D), in the same order of sums: a step waits for no sorting."""
        row = torch.zeros(1, dtype=torch.long, device=token.device)
        y = torch.zeros(token.shape, dtype=torch.float32, device=token.device)
        work = dict.fromkeys(sorted(chosen), row)
        for expert, output in (self.elsewhere or self.outputs)(token, work):
            y += output.float() * weights[chosen.index(expert)]
        return y

    def routed_in_graph(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`routed` without a number that is read from the device, in the same order of sums.

        Each token's experts are gathered (models/stacked.py), as long as these are at most all
        experts. Otherwise all experts compute all tokens.
        """
        chosen, order = chosen.sort(-1)
        weights, (T, k) = weights.gather(1, order), chosen.shape
        y = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        if self.stacked and T * k <= len(self.experts):
            results = [
                self.stacked(tokens[t : t + 1], chosen[t, j : j + 1]).float() * weights[t, j]
                for t in range(T)
                for j in range(k)
            ]
            return y + torch.cat(results).view(T, k, -1).sum(1)
        every = weights.new_zeros(T, len(self.experts))
        shares = every.scatter(1, chosen, weights)
        taken = every.bool().scatter(1, chosen, True)
        for number, expert in enumerate(self.experts):
            result = self.stacked(tokens, number) if self.stacked else expert(tokens)
            output = result.float() * shares[:, number, None]
            y = y + output.masked_fill(~taken[:, number, None], 0.0)
        return y

    def outputs(self, tokens: Tensor, rows: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """What each expert returns for its rows of tokens (T, D), one expert at a time."""
        for expert, taken in rows.items():
            yield expert, self.experts[expert](tokens[taken])


def tokens_per_expert(chosen: Tensor, experts: int) -> list[int]:
    """How many assignments each expert has. chosen (T, k): experts' numbers.

    On the meta device, which has no numbers, the assignments are spread evenly.
    """
    if not chosen.is_meta:
        return chosen.flatten().bincount(minlength=experts).tolist()
    each, remainder = divmod(chosen.numel(), experts)
    return [each + (expert < remainder) for expert in range(experts)]


class Router(nn.Module):
    """Chooses each token's experts: those with the largest products with the token."""

    def __init__(self, dim: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.num_experts, dim))
        self.bias = nn.Parameter(torch.zeros(mixture.num_experts)) if mixture.router_bias else None
        nn.init.uniform_(self.weight, -0.035, 0.035)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (T, D) → their experts' numbers (T, k) int64, and weights (T, k) float32."""
        scores = F.linear(tokens.float(), self.weight.float())
        if self.bias is not None:
            scores = scores + self.bias.float()
        weights, chosen = scores.softmax(-1).topk(self.mixture.experts_per_token)
        if self.mixture.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights


class Gate(nn.Module):
    """How much each token takes from the expert that all tokens share."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))
        nn.init.uniform_(self.weight, -0.035, 0.035)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, D) → (T, 1) float32, from 0 to 1."""
        return F.linear(tokens.float(), self.weight.float()).sigmoid()
