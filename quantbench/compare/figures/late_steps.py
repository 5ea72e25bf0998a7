"""The typical step beside the mean: where they disagree, which arm has late steps, and how many.

The verdict is about the mean over whole samples. An arm whose typical step is as fast as the
baseline's, but of whose steps one in ten takes three times as long, has 18 % less throughput; the
row then says both, and why. A step is late if it took more than LATE times its sample's median.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantbench.compare.figures.contrasts import BASELINE, Fit, ProcessTiming, contrasts, fit
from quantbench.compare.figures.families import FALSE_VERDICTS, Interval, against_baseline

MATTERS = math.log(1.01)  # mean and typical step that differ by less are not worth a sentence
PROMPT = 0.01  # shares of time that prompts take in two arms: what they differ by to be the reason


@dataclass(frozen=True)
class LateSteps:
    """How an arm's ratio of means differs from its ratio of typical steps."""

    arm: int
    typical: Interval  # ratio of the typical steps
    mean_over_typical: Interval  # ratio of means ÷ ratio of typical steps
    share: float  # of the arm's steps that were late
    baseline_share: float
    shares_differ: bool  # by a test over processes, simultaneous over arms
    prompt_share: float = 0.0  # of the arm's seconds
    baseline_prompt_share: float = 0.0

    @property
    def disagree(self) -> bool:
        """Whether the two ratios differ beyond their intervals."""
        ratio = self.mean_over_typical
        return ratio.verdict != "no difference shown" and abs(math.log(ratio.ratio)) > MATTERS

    def sentence(self) -> str:
        """What the arm's row says of late steps; empty where speed and typical step agree."""
        if not self.disagree:
            return ""
        shares = (
            f"{self.share:.1%} of its steps are late, {self.baseline_share:.1%} of the baseline's"
        )
        if not self.shares_differ and abs(self.prompt_share - self.baseline_prompt_share) > PROMPT:
            shares = (
                f"the prompt takes {self.prompt_share:.0%} of its time, "
                f"{self.baseline_prompt_share:.0%} of the baseline's"
            )
        elif not self.shares_differ:
            shares += " (these shares cannot be told apart)"
        return f"its typical step takes {self.typical.ratio:.2f} × the baseline's: {shares}"


def late_steps(timings: Sequence[ProcessTiming], level: float = FALSE_VERDICTS) -> list[LateSteps]:
    """For every arm; each of the three comparisons is simultaneous over arms at `level`.

    The two ratios come from the same processes, so their difference is tested process by process.
    """
    means, typical = contrasts(timings), contrasts(timings, "typical_step")
    difference = replace(
        means, values=means.values - typical.values, noise=np.zeros_like(means.noise)
    )
    shares = against_baseline(fit(contrasts(timings, "late_share")), level)
    return [
        LateSteps(
            arm=steps.arm,
            typical=steps,
            mean_over_typical=apart,
            share=_share(timings, steps.arm),
            baseline_share=_share(timings, BASELINE),
            prompt_share=_prompt_share(timings, steps.arm),
            baseline_prompt_share=_prompt_share(timings, BASELINE),
            shares_differ=share.verdict != "no difference shown",
        )
        for steps, apart, share in zip(
            against_baseline(fit(typical), level),
            against_baseline(fit(difference), level),
            shares,
            strict=True,
        )
    ]


def scatter_sentence(fitted: Fit) -> str:
    """What the report says of this machine: how far processes of one arm scatter."""
    if not math.isfinite(float(fitted.scatter)):
        return "too few processes to say how far they scatter on this machine"
    freedom = int(np.max(fitted.freedom))
    return (
        f"processes of one arm scatter by {float(fitted.scatter):.1%} on this machine "
        f"(standard deviation, {freedom} degrees of freedom)"
    )


def _share(timings: Sequence[ProcessTiming], arm: int) -> float:
    return float(np.mean([timing.late_share for timing in timings if timing.arm == arm]))


def _prompt_share(timings: Sequence[ProcessTiming], arm: int) -> float:
    return float(np.mean([timing.prompt_share for timing in timings if timing.arm == arm]))
