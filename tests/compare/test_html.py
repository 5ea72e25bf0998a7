"""report.html: what it holds as a file, and that Chromium shows its pictures without an error."""

import base64
import dataclasses
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from quantbench.compare import html
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.pareto import band, front, points
from quantbench.compare.recommend import recommend
from quantbench.compare.rows import rows
from quantbench.compare.tables import remarks, tables
from quantbench.quality.thresholds import BROKEN
from tests.bench.world import Behaviour, World
from tests.compare.example_results import ARMS, HOSTILE, example_results
from tests.programs import command, ran


class Text(HTMLParser):
    """The page's text, tags and links."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.links = "", set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += f"{data} "


@pytest.fixture(scope="module")
def results():
    return example_results(hostile=True)


def answered(results):
    return recommend(rows(results), Limits(max_kl=0.1), Compared(results).best)


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    """The page's path."""
    path, arm_rows = tmp_path_factory.mktemp("report") / html.FILE, rows(results)
    said = tables(arm_rows), remarks(results, arm_rows)
    path.write_text(html.render(results, arm_rows, answered(results), *said), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(report):
    return Text(report.read_text())


def test_every_figure_and_command_is_on_the_page(page, results):
    arm_rows, chosen = rows(results), answered(results)
    for words in (*sum(sum(tables(arm_rows), []), []), *remarks(results, arm_rows)):
        assert words in page.text
    for row in arm_rows:
        assert not row.command or row.command in page.text
    assert chosen.choices and all(remark in page.text for remark in chosen.remarks)
    for choice in chosen.choices:
        assert all(words in page.text for words in (choice.line, choice.run, choice.verify))
    for heading in ("Speed, memory and quality", "Speed of each turn", "Quality by layer"):
        assert heading in page.text


def test_a_hostile_name_is_text_and_nothing_is_loaded(page, report):
    assert HOSTILE in page.text and "script" not in page.tags
    icon, *pictures = page.links
    assert icon == "data:," and len(pictures) == 4
    texts = set()
    for url in pictures:
        kind, _, data = url.partition(";base64,")
        root = ElementTree.fromstring(base64.b64decode(data))
        assert kind == "data:image/svg+xml" and root.tag.endswith("svg")
        assert not any(node.tag.endswith(("}script", "}foreignObject")) for node in root.iter())
        texts |= {node.text for node in root.iter()}
    assert texts >= {arm for arm, *_ in ARMS}
    assert "default-src 'none'" in report.read_text() and "script-src" not in report.read_text()


def test_a_browser_shows_every_picture(report):
    """A picture that the policy forbids would be an error in the console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        pytest.skip("needs chromium (apt: chromium)")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9999"]
    options += ["--enable-logging=stderr", "--dump-dom", report.as_uri()]
    shown = ran(browser, *options, timeout=120)
    assert shown.stdout.count("<img") == 4
    assert "CONSOLE" not in shown.stderr


def test_the_page_of_every_scheme_is_small():
    """32 arms with a thousand turns each, as ten minutes of measuring leave."""
    results = example_results()
    many = (results.arms * 3)[:32]
    results.arms = [dataclasses.replace(arm, turns=arm.turns * 28) for arm in many]
    arm_rows = rows(results)
    arm_rows[1].perplexity, arm_rows[2].kl = float("nan"), float("inf")
    page = html.render(results, arm_rows, answered(results), tables(arm_rows), [])
    assert len(page) < 1_500_000


def test_the_front_by_hand():
    """All peaks are equal in the example, so the fastest of its quality is alone."""
    shown = points(rows(example_results()))
    assert {point.memory_bytes for point in shown} == {3_000_000_000}
    assert [point.arm for point in front(shown, ("not noticeable", "good"))] == ["nf4"]
    assert [p.arm for p in front(shown, (BROKEN,))] == ["uintx-2-64"]
    assert (band(0.06), band(None)) == ("usable", "quality not measured")


@pytest.mark.parametrize("has_a_browser", [True, False])
def test_open_shows_the_report(tmp_path, monkeypatch, has_a_browser):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or has_a_browser)
    World.of(Behaviour(), Behaviour(0.05)).install(monkeypatch)
    folder = tmp_path / "out"
    arms = ["--arm", "--quantization none", "--arm", "--quantization int8wo"]
    more = ["--output", folder, "--write_result", "none", "--tokens", "0", "--device", "cpu"]
    result = command("ab", "--open", *arms, *more)
    assert result.exit_code == 0 and opened == [(folder / "report.html").as_uri()]
    assert ("--open: there is no browser here" in result.stderr) != has_a_browser
