"""report.html: what it holds as a file, and that Chromium draws its charts without an error."""

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from quantbench.answer.choices import Limits
from quantbench.answer.recommendation import recommend
from quantbench.answer.tuning import answer

from quantbench.answer.rows import best_of, rows
from quantbench.compare.commands.ab import ab
from quantbench.compare.figures import timings
from quantbench.compare.figures.contrasts import fit
from quantbench.compare.sampling.results import Results
from quantbench.report import html
from quantbench.report.points import band, points, staircase
from quantbench.report.tables import full_table, remarks
from tests.compare.example_results import ARMS, HOSTILE, example_results
from tests.compare.test_estimated_rows import with_figures


class Text(HTMLParser):
    """The page's text, tags and links; scripts apart."""

    def __init__(self, page):
        super().__init__()
        self.last = ""
        self.words, self.tags, self.links, self.scripts = [], set(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.last = tag
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        (self.scripts if self.last == "script" and len(data) > 80 else self.words).append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def results():
    results = with_figures(example_results(hostile=True))
    results.recommendation = recommend(rows(results), Limits(), best_of(results))
    return results


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    """The page's path."""
    folder, arm_rows = tmp_path_factory.mktemp("report"), rows(results)
    html.write(folder, results, arm_rows, full_table(arm_rows), remarks(results, arm_rows))
    return folder / html.FILE


@pytest.fixture(scope="module")
def page(report):
    return Text(report.read_text())


def test_every_figure_and_command_is_on_the_page(page, results):
    arm_rows, chosen = rows(results), results.recommendation
    for words in (*sum(full_table(arm_rows), []), *remarks(results, arm_rows)):
        assert words in page.text
    for row in arm_rows:
        assert not row.command or row.command in page.text
    assert chosen.choices and chosen.exclusions() in page.text
    for choice in chosen.choices:
        assert choice.line() in page.text and choice.command in page.text
    for heading in ("Speed, memory and quality", "Speed of each sample", "Quality by layer"):
        assert heading in page.text


def test_a_hostile_name_is_text_and_nothing_is_loaded(page, report):
    assert HOSTILE in page.text and "img" not in page.tags
    assert page.links == ["data:,"]
    text = report.read_text()
    assert "<img" not in re.sub(html.SCRIPT, "", text) and len(page.scripts) >= 4
    assert all(HOSTILE not in script and "<img src=x" not in script for script in page.scripts)
    policy = re.search(r'Policy" content="([^"]*)"', text)[1]
    assert policy.count("sha256-") >= 4 and "default-src 'none'" in policy


def test_a_browser_draws_every_chart(report):
    """A script that the policy forbids, or one that fails, would leave its chart empty."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        pytest.skip("needs chromium (apt: chromium)")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9999"]
    shown = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", report.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert shown.stdout.count('class="cartesianlayer"') == 4
    assert "CONSOLE" not in shown.stderr


@pytest.mark.parametrize(
    ("equal", "begins"), [(False, "Take int8"), (True, "Keep none: no setting is shown to be fast")]
)
def test_the_answer_of_a_tune(equal, begins):
    """Four settings, one measured for another one of the same plan."""
    results = example_results()
    del results.arms[4:]
    if equal:
        for arm in results.arms[1:]:
            arm.samples = results.arms[0].samples
    results.arms[1].also = [HOSTILE]
    results.looks = [results.plan.look([], fit(timings.of(results)))]
    results.tune = answer(results, rows(results), Limits(max_perplexity_increase=math.inf))
    assert results.tune.lines[0].startswith(begins)
    arm_rows = rows(results)
    page = Text(html.render(results, arm_rows, full_table(arm_rows), []))
    assert all(line in page.text for line in results.tune.all_lines())
    assert f"identical plans: int8wo was measured for {HOSTILE}, too" in page.text
    assert "4 settings" in page.text and results.about.command in page.text


def test_the_page_of_a_real_comparison_of_every_scheme_is_small(tmp_path):
    """32 arms with all of their samples, as the documentation's table has them."""
    measured = Path(__file__).parents[2] / "docs/data/llama32_4layers.json"
    (tmp_path / "results.json").write_text(measured.read_text())
    results = Results.load(tmp_path)
    arm_rows = rows(results)
    assert len(arm_rows) > 30 and all(row.samples for row in arm_rows)
    arm_rows[1].perplexity, arm_rows[2].kl = float("nan"), float("inf")
    page = html.render(results, arm_rows, full_table(arm_rows), [])
    assert len(page) < 6_000_000 and "MIT license" in page


def test_bands_of_quality():
    assert [band(ratio) for ratio in (0.99, 1.01, 1.0101, 1.05, 1.9, 2.1, float("inf"), None)] == [
        *("same", "same", "near", "near", "worse", "broken", "broken", "unknown")
    ]


def test_the_staircase_by_hand():
    """Not on it: int8dq, which is larger and slower than fp6; nf4, than int4."""
    shown = points(rows(example_results()))
    assert [point.arm for point in staircase(shown, ("same",))] == ["fp6"]
    assert [point.arm for point in staircase(shown, ("same", "near"))] == ["int4wo-128"]
    assert [p.arm for p in staircase(shown, ("broken", "worse"))] == ["uintx-2-64"]


def test_open_needs_output():
    from click.testing import CliRunner

    arms = ["--arm", "--quantization none", "--arm", "--quantization int8wo"]
    result = CliRunner().invoke(ab, ["--open", *arms])
    assert "give --output" in str(result.exception) + result.output and result.exit_code


@pytest.mark.parametrize("has_a_browser", [True, False])
def test_open_shows_the_report(tmp_path, monkeypatch, has_a_browser):
    from click.testing import CliRunner

    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or has_a_browser)
    monkeypatch.setattr("quantbench.compare.commands.ab.compare", lambda *given, **more: 0)
    folder = tmp_path / "out"
    arms = ["--arm", "--quantization none", "--arm", "--quantization int8wo"]
    more = ["--output", str(folder), "--write_result", "none"]
    result = CliRunner().invoke(ab, ["--open", *arms, *more])
    assert result.exit_code == 0 and opened == [(folder / "report.html").as_uri()]
    assert ("--open: there is no browser here" in result.stderr) != has_a_browser


def test_the_picture_names_every_arm(tmp_path):
    from quantbench.report import pareto

    arm_rows = rows(example_results())
    pareto.draw(arm_rows, [tmp_path / "pareto.svg"], "title")
    text = (tmp_path / "pareto.svg").read_text()
    assert all(f">{arm}<" in text for arm, *_ in ARMS)
