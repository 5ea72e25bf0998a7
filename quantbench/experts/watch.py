"""What two tiers of experts did for a sample, and where the experts are, for records."""

from collections.abc import Callable

from quantbench.experts.tiers import Tiers, tiers_of
from quantbench.experts.traffic import Phases, TwoTiers
from quantbench.models.llama import Transformer


def two_tiers(model: Transformer, policy: str, placement: str) -> TwoTiers | None:
    """Where a model's experts lie; None if they lie in one memory.

    policy, placement: as the options named them.
    """
    tiers = tiers_of(model)
    if tiers is None:
        return None
    return TwoTiers(
        fast=sum(tiers.quotas),
        landing=tiers.arrivals,
        every=len(tiers.keys),
        by_layer=tiers.quotas,
        expert_bytes=tiers.layout.nbytes,
        slow=tiers.slow.name,
        slow_place=tiers.slow.place,
        policy=policy,
        followed=tiers.policy.name,
        placement=placement,
    )


class Watch:
    """What tiers do for one sample, if there are any: its prompt and its decoding apart."""

    def __init__(self, tiers: Tiers | None) -> None:
        self.tiers = tiers
        self.marks = [tiers.counted()] if tiers else []  # at the start, and after the prompt

    def first(self, after_token: Callable[[], object]) -> Callable[[], object]:
        """`after_token`, to be called after each token; the first one ends the prompt."""

        def after() -> object:
            if self.tiers and len(self.marks) == 1:
                self.marks.append(self.tiers.counted())
            return after_token()

        return after

    def phases(self) -> Phases | None:
        """What was counted until now."""
        if self.tiers is None:
            return None
        start, prompted = self.marks
        return Phases(prompted.since(start), self.tiers.counted().since(prompted))
