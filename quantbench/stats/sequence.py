"""How many standard errors an interval needs, where a session is looked at while it goes on.

An interval of 1.96 standard errors leaves out the truth in far more than 5 % of sessions if every
cycle is a look. The noise of turns counts as larger by what the looks cost:

- Where it is known how much of the session is over, by Wang and Tsiatis's boundary (1987): looks
  before its end need wider intervals by the fourth root, and those at its end hardly any. At most
  the level's share of sessions is ever wrong, however often they are looked at, and whichever look
  is the last.
- Where nothing is known, by Pocock's constant (1977) for eight looks.

Standard errors are estimated, so Student's t of the same tail probability takes the place of the
normal distribution (Jennison and Turnbull 2000, section 4.4).
"""

from scipy import special  # scipy.stats would take every command a second longer

FIRST = 12  # cycles: no interval before
AT_THE_END = 1.16  # 2.27 ÷ 1.96: the boundary of a session looked at after each tenth more cycles
EIGHT_LOOKS = 1.28  # 2.51 ÷ 1.96
EARLY = 0.1  # of a session: four standard errors, which looks before hardly ever meet


def of_looks(spent: float | None) -> float:
    """The factor by which the standard error of turns counts as larger. spent: how much of the
    session is over, up to 1; None: unknown, and eight looks are allowed for."""
    return EIGHT_LOOKS if spent is None else AT_THE_END * max(EARLY, spent) ** -0.25


def multiple(level: float, freedom: float) -> float:
    """Standard errors of a two-sided interval."""
    return -float(special.stdtrit(freedom, level / 2))
