"""Every test draws other random numbers in every run, and says how to draw the same again.

The run's seed comes from the clock; --seed N or QUANTBENCH_TEST_SEED=N sets it. A test's own seed
follows from the run's seed and the test's name, so a test draws the same numbers alone as among
others, and in whichever worker process of `pytest -n 2` it runs. Fixtures of a module or a session
have seeds of their own. Hypothesis gets the run's seed. A test that needs certain numbers seeds its
own generator, and says why.
"""

import os
import random
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

VARIABLE = "QUANTBENCH_TEST_SEED"
LARGEST = 2**32 - 1  # what numpy takes

# On a machine that sets CI, hypothesis would draw the same examples for ever.
hypothesis.settings.register_profile(
    "quantbench", derandomize=False, print_blob=True, deadline=None
)


def seed_of_run(given: str | None) -> str:
    given = given or os.environ.get(VARIABLE) or str(time.time_ns() % (LARGEST + 1))
    if not given.isascii() or not given.isdigit() or int(given) > LARGEST:
        raise pytest.UsageError(f"the seed is {given!r}; give a whole number from 0 to {LARGEST}")
    return given


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def new_generator() -> np.random.Generator:
    """numpy's generator of the test that asks: default_rng() alone draws what no seed repeats."""
    return np.random.default_rng(np.random.randint(2**31))


def sample(items: Iterable[Any], count: int) -> list[Any]:
    """Some of the items, others in every run: in the place of a test for each of a product."""
    items = list(items)
    return random.sample(items, min(count, len(items)))


@contextmanager
def naming(drawn: Any) -> Iterator[None]:
    """An error inside says what had been drawn."""
    try:
        yield
    except Exception as error:
        error.add_note(f"drawn: {drawn}")
        raise


def seed_for(config: pytest.Config, name: str) -> int:
    return zlib.crc32(f"{config.option.seed}:{name}".encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", metavar="N", help="Draw the random numbers of the run that said so.")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", vars(config.option))["seed"]
    config.option.seed = seed_of_run(given)
    seed_all(int(config.option.seed))
    hypothesis.settings.load_profile("quantbench")
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = config.option.seed


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that starts the workers
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_all(seed_for(item.config, item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    """What several tests share must not depend on which of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    name = f"{request.node.nodeid}:{fixturedef.argname}:{request.param_index}"
    seed_all(seed_for(request.config, name))
    try:
        return (yield)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seed = terminalreporter.config.option.seed
    terminalreporter.write_line(f"seed {seed}: --seed {seed} draws the same random numbers again")
