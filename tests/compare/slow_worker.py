"""A real worker whose samples take a share longer than they do: what `make trust` has to find.

slow_worker.py SHARE
"""

import sys
import time

from compare.worker import Worker, serve


class SlowWorker(Worker):
    def __init__(self, share: float) -> None:
        self.share = share

    def sample(self, index):
        """Waits after each token for a share of the time that has passed since the last one."""
        one_sample, last = self.one_sample, time.perf_counter()

        def slowed(index, after_token):
            def wait():
                nonlocal last
                now = time.perf_counter()
                while time.perf_counter() < now + self.share * (now - last):
                    pass
                after_token()
                last = time.perf_counter()

            return one_sample(index, after_token=wait)

        self.one_sample = slowed
        try:
            return super().sample(index)
        finally:
            self.one_sample = one_sample


if __name__ == "__main__":
    serve(SlowWorker(float(sys.argv[1])))
