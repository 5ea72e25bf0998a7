"""recommend of one model's files: which are listed, judged, downloaded and timed."""

from functools import partial

import pytest

from quantbench.compare import uploads
from quantbench.errors import UsageError
from quantbench.models.formats import hub
from quantbench.quality.types import SameModel
from tests.bench.world import Behaviour, World
from tests.programs import command, worked
from tests.refusals import one_line

MB = 1_000_000
REPO = "org/Small-GGUF"
# In the order of their sizes, which is the one in which they are read: MB, a step's seconds, KL.
FILES = {
    "F16": (1600, 0.1, 0.0),
    "Q8_0": (850, 0.06, 0.001),
    "Q4_K_M": (500, 0.04, 0.02),
    "Q3_K_S": (380, 0.035, 0.3),
    "Q2_K": (300, 0.03, 1.0),
}
run = partial(command, "recommend", "--device", "cpu", "--write_result", "none")
ALL = ("--checkpoint_path", f"{REPO}:all")


class Opened:
    """The worker that opens files, to compare their models."""

    def __init__(self):
        self.paths = []

    def answer(self, kind, do, paths):
        assert (kind, do) == (SameModel, "same_model")
        self.paths += paths
        return SameModel([None], 0, False)

    def close(self): ...


@pytest.fixture
def opened(monkeypatch):
    """The files that were opened before any was judged."""
    worker = Opened()
    monkeypatch.setattr(uploads, "Process", lambda: worker)
    sizes = {f"{REPO}:{name}": mb * MB for name, (mb, _, _) in reversed(FILES.items())}
    monkeypatch.setattr(hub, "published", lambda repository: {REPO: sizes}[repository])
    return worker.paths


@pytest.fixture
def world(monkeypatch):
    made = World.of(
        *(
            Behaviour(seconds, between=0.002, noise=0.002, kl=kl)
            for _, seconds, kl in FILES.values()
        )
    )
    made.install(monkeypatch)
    made.weight_bytes = lambda config: FILES[config.checkpoint_path.rpartition(":")[2]][0] * MB
    return made


def test_a_repository_s_files_are_read_from_the_finest_on(world, opened):
    """Q2_K is neither read nor downloaded: Q3_K_S is ten times beyond the limit."""
    result = worked("recommend", "--device", "cpu", "--write_result", "none", *ALL)
    assert opened == [f"{REPO}:F16"]
    assert world.asked("judge") == [1, 2, 3] and 3 not in world.asked("turn")
    assert result.stdout.startswith("Use Q4_K_M: the fastest of those shown to be within the")
    assert f"    run:    quantbench generate --checkpoint_path {REPO}:Q4_K_M " in result.stdout
    assert f"--arm '--checkpoint_path {REPO}:Q4_K_M'" in result.stdout
    said = " ".join(result.stderr.split())
    assert "against F16: file size decode ×, at most Q8_0 850.00 MB 1.88" in said
    assert "5 files of org/Small-GGUF:all, the finest first, at most 3.63 GB to download" in said
    excluded = result.stdout.partition("Excluded: ")[2]
    assert "far above 0.03: Q2_K" in excluded and "KL above 0.03: Q3_K_S" in excluded


def test_what_does_not_fit_is_left_out(world, opened):
    """The baseline may be larger than --max_memory, but not than the memory."""
    needs = uploads.needed([f"{REPO}:all"])
    limits = uploads.Limits(max_memory=600 * MB)

    def names(free):
        return [need.scheme.rpartition(":")[2] for need in uploads.chosen(needs, limits, free)]

    assert names(None) == ["F16", "Q4_K_M", "Q3_K_S", "Q2_K"]
    assert names(1000 * MB) == ["Q8_0", "Q4_K_M", "Q3_K_S", "Q2_K"]
    with pytest.raises(UsageError, match="by --max_memory 600.00 MB and 310.00 MB of free"):
        names(310 * MB)
    refused = one_line(run(*ALL, "--max_memory", "200MB"))
    assert "nothing is left to compare by --max_memory 200.00 MB" in refused
    assert not opened and not world.journal
