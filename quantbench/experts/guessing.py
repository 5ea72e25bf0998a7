"""Whether to fetch the next layer's experts ahead: as long as guesses are right often enough.

    guessing = Guessing(prices)
    guessing.guessed(layer=4, experts={1, 7})   # that are not in fast memory, in layer 3's turn
    guessing.asked(layer=4, wanted={7, 9})      # one was right, one was wrong
    guessing.pays, guessing.pays_alone

A right guess saves the wait for its expert's copy, and a wrong one keeps the copies of others
waiting. Where a layer fetches experts of its own, guesses go with these, and nothing else is lost:
that pays while what the right ones save is more than what the wrong ones cost. Where all that a
layer wants is in fast memory, guesses alone would have to be asked for, and there is less time for
them. What counts are the last guesses, whether they were followed or only noted down: so guessing
begins when it would pay, and ends when it does not.
"""

from collections.abc import Collection
from dataclasses import dataclass

FIRST = 16  # guesses that are noted before any is followed
LAST = 256  # guesses that count; older ones weigh less and less
EVERY = 8  # steps: in one of them guesses are noted down where none is followed


@dataclass(frozen=True)
class Prices:
    """Seconds, or anything proportional to them."""

    saving: float = 1.0  # of a right guess that is fetched with other experts
    loss: float = 1.0  # of a wrong one
    saving_alone: float = 1.0  # of a right guess that is fetched while nothing is missing
    asking: float = 0.0  # of a guess, right or wrong, that is fetched while nothing is missing


class Guessing:
    """What became of guesses, of one model."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.right = self.wrong = 0.0
        self.steps = 0  # that have begun
        self.open: tuple[int, Collection[int]] | None = None  # a layer, and its guessed experts

    @property
    def is_known(self) -> bool:
        """Whether enough guesses were made to tell."""
        return self.right + self.wrong >= FIRST

    @property
    def pays(self) -> bool:
        """Whether to fetch guessed experts with others."""
        lost = self.wrong * self.prices.loss
        return self.is_known and self.right * self.prices.saving > lost

    @property
    def pays_alone(self) -> bool:
        """Whether to fetch them where nothing else is missing."""
        lost = self.wrong * self.prices.loss + (self.right + self.wrong) * self.prices.asking
        return self.is_known and self.right * self.prices.saving_alone > lost

    def begin_step(self) -> bool:
        """A step begins. Whether its guesses are to be noted down even if they are not followed."""
        self.asked(-1, ())
        self.steps += 1
        return not self.is_known or self.steps % EVERY == 0

    def guessed(self, layer: int, experts: Collection[int]) -> None:
        """These experts of a layer, which are not in fast memory, will probably be wanted."""
        self.open = (layer, experts) if experts else None

    def asked(self, layer: int, wanted: Collection[int]) -> None:
        """A layer wants these experts, not all of which are in fast memory. What a layer wants that
        asks for nothing was not among its guesses."""
        if self.open is None:
            return
        number, experts = self.open
        self.open = None
        right = sum(expert in wanted for expert in experts) if number == layer else 0
        self.right, self.wrong = self.right + right, self.wrong + len(experts) - right
        if self.right + self.wrong > LAST:
            self.right, self.wrong = self.right / 2, self.wrong / 2
