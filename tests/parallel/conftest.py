"""The ranks of all tests in this folder, and a model that they share."""

import json

import pytest

from tests.parallel.ranks import Pool
from tests.parallel.work import WIDE


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(WIDE))
    return f"dummy:{folder}"
