"""A real worker whose every step takes a share longer than it does: what `make trust` has to find.

slow_worker.py SHARE
"""

import sys
import time

import generate
from compare.sampling.worker import Worker, serve


def slowed(step, share):
    """`step`, and then a wait for that share of the time it took."""

    def longer(*arguments, **options):
        started = time.perf_counter()
        result = step(*arguments, **options)
        end = time.perf_counter()
        end += share * (end - started)
        while time.perf_counter() < end:
            pass
        return result

    return longer


class SlowWorker(Worker):
    """The prompt's step too: a wait between two steps would be left out as one that was halted."""

    def __init__(self, share: float) -> None:
        self.share = share

    def get_ready(self):
        make_generator = generate.make_generator

        def make_slow_generator(*arguments):
            generator = make_generator(*arguments)
            generator.step = slowed(generator.step, self.share)
            generator.prefill = slowed(generator.prefill, self.share)
            return generator

        generate.make_generator = make_slow_generator
        try:
            return super().get_ready()
        finally:
            generate.make_generator = make_generator


if __name__ == "__main__":
    serve(SlowWorker(float(sys.argv[1])))
