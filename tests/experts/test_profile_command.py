"""quantbench experts: counts are written and shown, and bad input is one line."""

import re

import pytest

from quantbench.experts.popularity import Popularity
from quantbench.models.formats import EMBEDDED
from quantbench.report.experts import heat
from tests.experts.counted import ROUTERS, counts_of
from tests.programs import command
from tests.refusals import one_line

WORDS = (EMBEDDED / "heldout.txt").read_text()[:3000]
PROFILE = "profile --checkpoint_path tiny_moe --device cpu"


def run(arguments):
    return command("experts", *arguments.split())


def printed(arguments):
    result = run(arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def files(in_tmp):
    (in_tmp / "words.txt").write_text(WORDS)
    first, second = counts_of(ROUTERS, 20, 1), counts_of(ROUTERS, 20, 2)
    Popularity(ROUTERS, "a & b.txt", 40, (first, second)).save("", "mine.json")
    return in_tmp


def test_a_text_is_counted_and_shown(files):
    profiled = printed(f"{PROFILE} --text words.txt --output p.json")
    popularity = Popularity.load("", "p.json")
    assert popularity.text == "words.txt" and popularity.routers.experts == (8,) * 5
    assert sum(map(sum, popularity.counts)) == 5 * 2 * popularity.tokens
    title = rf"tiny_moe: 5 layers of 8 experts, 2 for each token; {popularity.tokens} tokens of wor"
    assert re.match(title, profiled)
    shown = printed("show p.json --against p.json")
    assert shown.startswith(profiled)
    assert "popularity is tried on the text words.txt" in shown
    for capacity in range(5, 41, 5):
        (line,) = re.findall(rf"^ *{capacity} \({capacity / 40:.0%}\) .*$", shown, re.M)
        uniform, popular, hits, ideal, best = line.split()[2:7]
        assert uniform == f"{capacity / 40:.1%}" and (popular, hits) == (ideal, best)
        assignments = sum(map(sum, popularity.counts))
        assert (
            popular == f"{int(hits) / assignments:.1%}"
            and float(popular[:-1]) >= 100 * capacity / 40
        )


def test_without_output_the_counts_are_kept_in_the_cache_folder(files, monkeypatch):
    """Here of fewer layers and tokens."""
    monkeypatch.setattr("quantbench.files.cache_folder", lambda: files / "cache")
    result = run(f"{PROFILE} --tokens 50 --num_layers 2")
    assert result.exit_code == 0, result.output
    (path,) = (files / "cache" / "popularity").glob("*.json")
    popularity = Popularity.load("", path)
    assert f"Wrote {path}" in result.stderr and popularity.text == "heldout.txt"
    assert popularity.tokens == 50 and popularity.routers.experts == (8, 8)
    message = one_line(run(f"show {path} --against mine.json"))
    assert message.startswith("--against mine.json is of another model: mine has 4 experts a layer")


@pytest.mark.parametrize("name", ["p.svg", "p.html"])
def test_it_is_drawn(name, files):
    printed(f"show mine.json --output {name}")
    drawn = (files / name).read_text()
    assert "mine: 2 layers of 4 experts" in drawn and "a &amp; b.txt" in drawn
    assert "chosen, × an even share" in drawn and "popularity" in drawn
    assert drawn.count("<svg") == 1 and "http-equiv" in drawn or name == "p.svg"
    printed(f"show mine.json --output {name}")
    assert (files / name).read_text() == drawn


def test_a_heat_map_of_many_experts_fits_into_a_line():
    assert heat([0.25] * 4) == "▄▄▄▄"
    assert heat([0, 0.5, 0.25, 0.25]) == " █▄▄"
    assert heat([1 / 128] * 128) == "▄" * 64
    assert heat([1.0, 0.0]) == "█ "


def test_a_text_that_is_too_short(files):
    (files / "empty.txt").write_text("")
    message = one_line(run(f"{PROFILE} --text empty.txt"))
    assert message == "--text empty.txt: 1 token; give a longer text"
