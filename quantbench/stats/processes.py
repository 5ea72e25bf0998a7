"""What two processes of one arm differ by, for as long as they live.

Cycles of one process are not replicates of a process, however many: where memory lies and which
pages are huge is drawn once, at the start. The standard deviation of the logarithm between
processes is a `Floor` under every interval. Two processes an arm cannot estimate it alone, so it
begins as what earlier sessions of this machine found (compare/machine_floor.py), or as an
assumption of three degrees of freedom, from one machine (`ASSUMED_FROM`); the session's
processes update it (moderated variance: Smyth 2004). `assumed` says how much of it still is one.

`between` is MIVQUE (Rao 1971), iterated. Differences y of an arm's successive segments have the
covariance floor² K + V: K from the processes that they share (the baseline's are shared by arms), V
from the noise of turns. The estimate is the quadratic form that is best where the last floor is
right, and unbiased in any case; it counts floor⁴ tr((Cov⁻¹ K)²) degrees of freedom, nearly none
while turns are noisier than processes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import special

from quantbench.stats.paired import Contrast

ITERATIONS = 3  # each at the variance that the last one found
AGREES = 0.7  # variance ÷ the prior's up to which the prior counts in full
ASSUMED_FROM = "1.6 %, where 1.5 % was measured between processes of an Intel Xeon on 2026-11-21"


@dataclass(frozen=True)
class Floor:
    """Standard deviation between processes of the logarithm of seconds, above 0."""

    deviation: float = 0.016
    freedom: float = 3.0  # degrees of freedom behind it
    assumed: float = 1.0  # share of them that no session measured


def updated(prior: Floor, contrasts: Iterable[Contrast]) -> Floor:
    """The floor after a session, given by its arms' contrasts with the baseline."""
    floor, known = prior, list(contrasts)
    for _ in range(ITERATIONS):
        floor = pooled(prior, *between(floor.deviation**2, known))
    return floor


def pooled(prior: Floor, variance: float, freedom: float) -> Floor:
    """The prior and what was found: a variance, which may be negative, with its degrees of freedom.

    A prior below what was found counts less, in the variance as in its degrees of freedom, by how
    improbable it is to find that much more by chance: a machine whose processes differ more than
    others' is believed soon, and with the few degrees of freedom that it has shown. AGREES and the
    square are as tests/trust needs them where processes differ by 3 and 5 %.
    """
    own, found = prior.deviation**2, max(0.0, variance)
    beyond = max(0.0, found / own - AGREES) * math.sqrt(freedom / 2)  # in standard errors
    weight = prior.freedom * (2 * float(special.ndtr(-beyond))) ** 2
    total = max(1.0, weight + freedom)  # with less, the multiple of Student's t has no use
    deviation = math.sqrt((weight * own + freedom * found) / (weight + freedom))
    return Floor(deviation, total, prior.assumed * weight / (weight + freedom))


def between(guess: float, contrasts: Iterable[Contrast]) -> tuple[float, float]:
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
