"""A real worker whose steps take longer than they do, by a share that is known: what `make trust`
has to find, or to find equal.

    slow_worker.py 0.05             # every step and prompt, by 5 %
    slow_worker.py 0.18 0.09        # 9 % of them by twice their time: 18 % in the mean
"""

import random
import sys
import time

from quantbench import generate
from quantbench.compare.sampling.worker import Worker, serve


def slowed(step, share, late):
    """`step`, and then a wait: with the probability `late` of share ÷ late of the time it took."""
    drawn = random.Random()

    def longer(*arguments, **options):
        started = time.perf_counter()
        result = step(*arguments, **options)
        end = time.perf_counter()
        if drawn.random() < late:
            end += share / late * (end - started)
        while time.perf_counter() < end:
            pass
        return result

    return longer


class SlowWorker(Worker):
    """The prompt's step is slowed, too: seconds per token are over whole samples."""

    def __init__(self, share: float, late: float = 1.0) -> None:
        super().__init__()
        self.share, self.late = share, late

    def get_ready(self):
        make_generator = generate.make_generator

        def make_slow_generator(*arguments):
            generator = make_generator(*arguments)
            for name in ("decode_one_token", "read_chunk"):
                setattr(generator, name, slowed(getattr(generator, name), self.share, self.late))
            return generator

        generate.make_generator = make_slow_generator
        try:
            return super().get_ready()
        finally:
            generate.make_generator = make_generator


if __name__ == "__main__":
    serve(SlowWorker(*map(float, sys.argv[1:])))
