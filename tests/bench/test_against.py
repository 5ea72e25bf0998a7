"""benchmarks/against.py: a command of this tree and of another commit, in turns."""

import re

import pytest

from benchmarks import against
from tests.programs import OLD_LOG, git

# A quantbench that writes the log line of a run, or the rows of a comparison, and no more.
MAIN = """
import json, random, re, sys
from pathlib import Path

speed = SPEED * random.lognormvariate(0, 0.002)
line = re.sub(r"tok/s= *[0-9.]+", f"tok/s={speed:.2f}", LINE)
path = Path(sys.argv[-1])
if sys.argv[1] == "ab":
    path.mkdir()
    rows = [{"arm": "none", "tok_s": speed}, {"arm": "fp6", "tok_s": None, "failed": "why"}]
    (path / "results.json").write_text(json.dumps({"rows": rows}))
else:
    path.write_text(line + "\\n")
"""
LINE = next(line for line in OLD_LOG.read_text().splitlines() if "quant: int8wo," in line)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits: the first makes 100 tok/s, and `now`, the working tree, 80."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "quantbench").mkdir()
    for speed in (100, 80):
        main = MAIN.replace("SPEED", str(speed)).replace("LINE", repr(LINE))
        (tmp_path / "quantbench" / "__main__.py").write_text(main)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", str(speed))
    monkeypatch.setattr(against, "ROOT", tmp_path)
    yield tmp_path
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1  # nothing is left behind


@pytest.mark.parametrize(("command", "arm"), [("generate", "int8wo"), ("ab", "none")])
def test_the_ratio_of_two_commits(repository, monkeypatch, capsys, command, arm):
    monkeypatch.setattr("sys.argv", ["against", "--rounds", "12", "HEAD~1", command])
    assert against.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = rf"{arm}: tok/s of this tree ÷ HEAD~1: ([\d.]+) \(([\d.]+) to ([\d.]+)\), 12 rounds"
    ratio, low, high = map(float, re.fullmatch(words, line).groups())
    assert low <= ratio <= high and high - low < 0.05
    assert ratio == pytest.approx(0.8, rel=0.01)


def test_a_command_that_fails_is_named(repository, monkeypatch):
    (repository / "quantbench" / "__main__.py").write_text("raise SystemExit('too hot')")
    monkeypatch.setattr("sys.argv", ["against", "HEAD~1", "generate"])
    with pytest.raises(SystemExit, match="too hot"):
        against.main()
