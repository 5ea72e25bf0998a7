"""benchmarks/gpu_first.py, the CPU standing in for a card: its checks, and what ends it early."""

import json
import tarfile

import pytest

from benchmarks import gpu_first
from quantbench.errors import KernelError
from quantbench.ops.cpu import build
from quantbench.ops.triton import linear


@pytest.fixture
def no_builds(monkeypatch):
    """No C++ compiler, as the program has it, and Triton's interpreter."""

    def refuse():
        raise KernelError("no compiler")

    monkeypatch.setattr(build, "load", refuse)
    monkeypatch.setattr(build, "refusal", lambda: "no compiler")  # which remembers an earlier load
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def records(folder, call):
    return json.loads((folder / f"{call}.json").read_text())["checks"]


def test_right_then_fast(tmp_path, no_builds, capsys):
    pytest.importorskip("triton")
    for call, parts in gpu_first.CALLS.items():
        assert gpu_first.main([call, "--device", "cpu", "--folder", str(tmp_path)]) == 0
        found = records(tmp_path, call)
        assert {record["part"] for record in found} == set(parts)
        assert not any(record["wrong"] for record in found)
        table = (tmp_path / f"{call}.txt").read_text()
        assert table in capsys.readouterr().out and len(table.splitlines()) == len(found)
        with tarfile.open(tmp_path / f"{call}.tar.gz") as archive:
            assert archive.getnames() == [f"gpu-first/{call}.{kind}" for kind in ("json", "txt")]


def test_wrong_numbers_end_it(tmp_path, no_builds, monkeypatch, capsys):
    """And where `right` has found some, nothing is timed."""
    pytest.importorskip("triton")
    multiply = linear.linear
    monkeypatch.setattr(linear, "linear", lambda x, weight: multiply(x, weight) * 1.01)
    arguments = ["--device", "cpu", "--folder", str(tmp_path)]
    assert gpu_first.main(["right", *arguments]) == 1
    parts = [record["part"] for record in records(tmp_path, "right")]
    assert set(parts) == {"machine", "products"}
    assert "times what is allowed" in capsys.readouterr().out
    assert gpu_first.main(["fast", *arguments]) == 1
    assert not (tmp_path / "fast.json").exists()


def test_what_does_not_fit_is_left_out_by_name(tmp_path, capsys):
    card = gpu_first.Card(gpu_first.torch.device("cpu"))
    assert gpu_first.carry_out("fast", card, tmp_path, limit=-1) == 0
    assert "left out for want of time: none, row 1; int8wo, row 1" in capsys.readouterr().out
    assert all("left" in record for record in records(tmp_path, "fast"))
