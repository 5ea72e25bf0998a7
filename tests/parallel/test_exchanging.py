"""What two ranks exchange is timed by size, for the estimates of models that ranks share."""

from quantbench.estimate.exchanges import Exchanges
from tests.parallel import work


def test_sums_and_gathers_are_timed_on_all_ranks(pool):
    for points in pool.run(2, work.exchange_times, (64, 4096), (64,)):
        assert [(p.kind, p.through, p.ranks, p.bytes) for p in points] == [
            ("all_reduce", "gloo", 2, 64), ("all_reduce", "gloo", 2, 4096),
            ("all_gather", "gloo", 2, 64),
        ]  # fmt: skip
        assert all(point.seconds > 0 for point in points)
        assert Exchanges(points).seconds("all_reduce", 1024, 2) > 0
