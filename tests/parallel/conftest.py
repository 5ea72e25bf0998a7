"""The ranks of all tests in this folder."""

import pytest

from tests.parallel.ranks import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()
