"""The ranks of all tests in this folder, and a model that they share."""

import pytest

from tests.models.small import small_checkpoint
from tests.parallel.ranks import Pool
from tests.parallel.work import WIDE


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("wide"), **WIDE)
