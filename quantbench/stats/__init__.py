"""Statistics of paired turns: how much faster is an arm, and which may be the fastest?

    found = ratios(seconds, process)    # arrays (cycles, arms) and (cycles,): what outsiders call
    found = intervals(baseline, {1: turns, 2: turns}, Floor())    # the same, of arms in groups
    fastest = best(baseline, arms, Floor(), among={0, 1, 2})      # contains the fastest, 95 %

Arms take short turns in cycles, A B C then C B A. `paired` has the mean log ratio and its noise,
`sequence` what looks at a session cost, `processes` what two processes of one arm differ by, and
`arms` answers. Only numpy and scipy are imported, nothing of the project. When a session stops is
decided in compare/stop.py.
"""

from quantbench.stats.arms import Interval, Verdict, best, evidence, intervals, ratios
from quantbench.stats.paired import Turns
from quantbench.stats.processes import ASSUMED_FROM, Floor

__all__ = ["ASSUMED_FROM", "Floor", "Interval", "Turns", "Verdict",
           "best", "evidence", "intervals", "ratios"]  # fmt: skip
