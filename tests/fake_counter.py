"""A counter of energy that is not there."""


class Counter:
    """3 J for each look at it; an idle machine takes nothing."""

    name = "a fake"

    def __init__(self):
        self.total = 0.0

    def joules(self):
        self.total += 3.0
        return [self.total]

    def difference(self, before, after):
        return after[0] - before[0]
