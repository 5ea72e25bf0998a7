"""The experts of a mixture-of-experts model, as data: how many, how wide, how they are chosen.

Mixture(num_experts=8, experts_per_token=2, expert_dim=14336)       # Mixtral-8x7B's
"""

from dataclasses import dataclass

from quantbench.errors import CheckpointError
from quantbench.models.accepted import by_field, check_fields, whole


@dataclass(frozen=True)
class Mixture:
    """Each token goes through `experts_per_token` of `num_experts` feed-forward networks.

    Raises CheckpointError for values that no model can have.
    """

    num_experts: int  # of each layer
    experts_per_token: int
    expert_dim: int  # width of each expert's feed-forward network
    # Whether the weights of a token's experts add up to 1. If not, they are the router's
    # probabilities, which add up to 1 over all experts.
    normalized: bool = True
    shared_dim: int = 0  # width of an expert that every token goes through; 0: there is none
    router_bias: bool = False  # whether the router adds a bias to its scores
    dense_layers: tuple[int, ...] = ()  # layers that have one feed-forward network and no experts

    def __post_init__(self) -> None:
        check_fields("mixture of experts", _ACCEPTED, self)
        if self.experts_per_token > self.num_experts:
            raise CheckpointError(
                f"mixture of experts: a token goes through {self.experts_per_token} experts, and "
                f"there are {self.num_experts}"
            )

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward network and no experts."""
        return layer in self.dense_layers

    def distinct(self, tokens: int) -> float:
        """Experts that are chosen by at least one of so many tokens, on average, if each chooses
        independently and evenly: X · (1 − (1 − k/X)^tokens)."""
        left = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - left)


_ACCEPTED = by_field(Mixture, shared_dim=whole(0))


def compiles(mixture: Mixture | None, device: str, two_tiers: bool) -> bool:
    """Whether torch.compile makes one graph of a decoding step.

    A mixture's is compiled only on CUDA, where reading the experts' numbers stalls the device. A
    graph cannot fetch experts from a second tier of memory. device: its type.
    """
    return mixture is None or (device == "cuda" and not two_tiers)
