"""The feed-forward networks of Gemma 4 with experts: one for all tokens, and a mixture beside it.

Each network has a norm before and a norm behind it, and the router a norm without weights.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.gemma import Scale, gelu
from quantbench.models.mixtral import MixtureOfExperts, Router


class BesideExperts(MixtureOfExperts):
    """norm(shared(norm(x))) + norm(Σ weight · expert(norm(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.shared_gate
        self.router = ScaledRouter(config)
        for network in (self.shared, *self.experts):
            network.activation = gelu
        for name in ("shared_norm", "shared_post_norm", "norm", "post_norm"):
            self.add_module(name, nn.RMSNorm(config.dim, config.norm_eps))

    def forward(self, x: Tensor) -> Tensor:
        """x (…, D), not normed → (…, D)."""
        tokens = x.flatten(0, -2)  # (T, D)
        y = self.routed(self.norm(tokens), *self.router(tokens)).type_as(x).view_as(x)
        return self.shared_post_norm(self.shared(self.shared_norm(x))) + self.post_norm(y)


class ScaledRouter(Router):
    """A router of normed and scaled tokens, which multiplies weights by a number of each expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.dim, config.mixture)
        self.epsilon = config.norm_eps
        self.scale, self.expert_scale = Scale(config.dim), Scale(config.mixture.num_experts)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        D = tokens.shape[-1]
        normed = F.rms_norm(tokens, (D,), eps=self.epsilon) * self.scale.weight * D**-0.5
        chosen, weights = super().forward(normed)
        return chosen, weights * self.expert_scale.weight[chosen]
