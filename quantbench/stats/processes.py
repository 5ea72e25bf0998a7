"""What two processes of one arm differ by, for as long as they live.

Cycles of one process are not replicates of a process, however many: where memory lies and which
pages are huge is drawn once, at the start. The standard deviation of the logarithm between
processes is a `Floor` under every interval. Two processes an arm cannot estimate it alone, so it
has a prior worth `freedom` degrees of freedom, which the session's processes update (moderated
variance: Smyth 2004). The prior is an assumption, measured on one machine (`ASSUMED_FROM`), and
`assumed` says how much of a floor it still is.

The update is MIVQUE (Rao 1971), iterated. Differences y of an arm's successive segments have the
covariance floor² K + V: K from the processes that they share (the baseline's are shared by arms), V
from the noise of turns. The estimate is the quadratic form that is best where the last floor is
right, and unbiased in any case; it counts floor⁴ tr((Cov⁻¹ K)²) degrees of freedom, nearly none
while turns are noisier than processes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quantbench.stats.paired import Contrast

ITERATIONS = 3  # each at the variance that the last one found
LEAST_FREEDOM = 1.0  # with less the multiple of Student's t has no use


ASSUMED_FROM = "1.5 % between processes of an Intel Xeon on 2026-11-21"


@dataclass(frozen=True)
class Floor:
    """Standard deviation between processes of the logarithm of seconds, above 0."""

    deviation: float = 0.015
    freedom: float = 4.0  # degrees of freedom behind it
    assumed: float = 1.0  # share of them that no session measured


def updated(prior: Floor, contrasts: Iterable[Contrast]) -> Floor:
    """The floor after a session, given by its arms' contrasts with the baseline.

    A prior that the session contradicts counts less (Phipson et al. 2016), in the variance as in
    its degrees of freedom, so that a machine whose processes differ more than others' is believed
    soon.
    """
    own = variance = prior.deviation**2
    weight, freedom = prior.freedom, 0.0
    known = list(contrasts)
    for _ in range(ITERATIONS):
        estimate, freedom = _variance(variance, known)
        total = max(0.0, estimate * freedom)
        pooled = (prior.freedom * own + total) / (prior.freedom + freedom)
        weight = prior.freedom * min(1.0, own / pooled) ** 2
        variance = (weight * own + total) / (weight + freedom)
    assumed = prior.assumed * weight / (weight + freedom)
    return Floor(math.sqrt(variance), max(LEAST_FREEDOM, weight + freedom), assumed)


def _variance(guess: float, contrasts: Iterable[Contrast]) -> tuple[float, float]:
    """Variance between processes, which may be negative, and its degrees of freedom."""
    usable = [one for one in contrasts if one.freedom]
    rows = [
        (arm, segment, one.variance / len(segment.logs))
        for arm, one in enumerate(usable, start=1)
        for segment in one.segments
    ]
    names = [((arm, segment.process), (0, segment.partner)) for arm, segment, _ in rows]
    columns = {name: column for column, name in enumerate(sorted(set(sum(names, ()))))}
    effects = np.zeros((len(rows), len(columns)))  # log ratio of a segment = effects @ processes
    for row, (own, partner) in enumerate(names):
        effects[row, columns[own]], effects[row, columns[partner]] = 1, -1
    of_arm = np.array([arm for arm, _, _ in rows])
    successive = np.flatnonzero(of_arm[1:] == of_arm[:-1])
    if not len(successive):
        return 0.0, 0.0
    identity = np.eye(len(rows))
    apart = identity[successive + 1] - identity[successive]  # differences of segments
    y = apart @ [segment.mean for _, segment, _ in rows]
    shared = apart @ effects @ (apart @ effects).T
    noise = apart @ np.diag([variance for _, _, variance in rows]) @ apart.T
    inverse = np.linalg.pinv(guess * shared + noise, hermitian=True)
    weights = inverse @ shared @ inverse
    information = float((weights * shared).sum())
    estimate = float(y @ weights @ y - (weights * noise).sum()) / information
    return estimate, guess**2 * information
