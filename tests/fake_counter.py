"""A counter of energy that moves whenever it is read."""


class Counter:
    """3 J for each look at it; an idle machine takes nothing."""

    name = "a fake"
    interval = 1e-9  # seconds between updates: one run is enough

    def __init__(self):
        self.total = 0.0

    def read(self):
        self.total += 3.0
        return [self.total]

    def between(self, before, after):
        return after[0] - before[0]
