"""How warming up ends, on samples of given lengths; and that its samples are short."""

from types import SimpleNamespace

import pytest
import torch

from quantbench.log.config import RunConfig
from quantbench.run import measure


@pytest.mark.parametrize(
    ("given", "taken", "steady"),
    [
        ([3.0, 3.0, 9.0], 2, True),
        ([3.0, 2.0, 2.09, 9.0], 3, True),
        ([1.0, 2.0] * 9, 5, False),
        ([0.1, 0.2] * 9, 5, False),  # five took 0.7 s
        ([0.01, 0.02] * 3 + [0.02], 7, True),  # five took 0.07 s: more are taken
        ([0.01, 0.02] * 99, 30, False),
    ],
)
def test_it_ends_when_two_samples_agree_or_the_time_is_up(given, taken, steady):
    lengths = iter(given)
    seconds, agreed = measure.warm_up(lambda index: next(lengths))
    assert seconds == given[:taken] and agreed == steady


@pytest.mark.parametrize(("asked", "taken"), [(200, measure.WARM_UP_TOKENS), (7, 7)])
def test_its_samples_are_short(asked, taken):
    """A warm-up of the length of the samples would take longer than most comparisons."""
    counts = []

    def one_sample(index, tokens=None, after_token=lambda: None):
        counts.append(tokens)
        after_token()
        return None, SimpleNamespace(seconds=1.0)

    config = RunConfig(max_new_tokens=asked)
    one_sample.plan = SimpleNamespace(config=config, device=torch.device("cpu"))
    one_sample.generator = SimpleNamespace(compiles=False)
    ready = measure.get_ready(one_sample)
    assert counts == [measure.FIRST_TOKENS, taken, taken]
    assert ready.warm_ups == [1.0, 1.0] and ready.warm_up_steady and ready.compile_seconds is None
