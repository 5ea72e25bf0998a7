"""A scheme's least share of the memory's limit: written from roofline's JSON, and warned of."""

import json

import pytest

from quantbench.answer.interval import Interval
from quantbench.answer.json_rows import DecodeRow
from quantbench.errors import LogError
from quantbench.log.about import About
from quantbench.log.config import RunConfig
from quantbench.report import floor
from quantbench.typed_json import to_json

ABOUT = About("quantbench roofline", "2026-11-25", None, "a machine", {})


def row(scheme, *share):
    return DecodeRow(scheme, None, 24, scheme, limit_share=Interval(*share) if share else None)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Writes the floor of these rows, measured with the default options."""
    monkeypatch.setattr(floor, "ROOT", tmp_path)
    monkeypatch.setattr(floor, "FOLDER", tmp_path / "floor")
    monkeypatch.setattr(floor, "file", lambda: tmp_path / "floor" / "avx2.json")

    def write(*rows):
        parts = {"about": ABOUT, "config": RunConfig(), "model": list(rows)}
        (tmp_path / "r.json").write_text(json.dumps(to_json(parts)))
        return floor.write(str(tmp_path / "r.json"))

    return write


def test_what_has_fallen(measured):
    assert floor.warning(RunConfig(), [row("fp6", 0.1)]) is None  # no floor yet
    measured(row("none", 0.9, 0.88, 0.92), row("fp6", 0.6, 0.55, 0.65), row("int8wo"))
    steady = [row("none", 0.84, 0.82, 0.86), row("fp6", 0.551), row("int8wo", 0.1), row("nf4", 0)]
    assert floor.warning(RunConfig(), steady) is None
    fallen = [row("none", 0.7, 0.6, 0.84), row("fp6", 0.5)]
    assert floor.warning(RunConfig(), fallen) == (
        "below the floor in floor/avx2.json by 5 points or more: none at most 84% (90%), fp6 at "
        "most 50% (60%); `quantbench roofline --parts layers --schemes none,fp6` shows which layers"
    )
    for other in ({"num_layers": 4}, {"batch_size": 2}, {"checkpoint_path": "tiny_moe"}):
        assert floor.warning(RunConfig(**other), fallen) is None
    assert floor.warning(RunConfig(seed=1, max_new_tokens=9), fallen)


def test_nothing_to_hold_to(measured):
    failed = row("none")
    failed.failed = "out of memory"
    with pytest.raises(LogError, match="r.json has no scheme's share of the limit: out of memory"):
        measured(failed)
