"""report.html in a real browser: Chromium without a window, by way of chromedriver.

One browser and one loading of the page for all tests; each leaves the page as it found it.
"""

import json
import math
import operator
import re
import time
from pathlib import Path

import pytest

from quantbench.compare.commands.ab import ab
from quantbench.compare.figures import timings
from quantbench.compare.figures.choices import Limits
from quantbench.compare.figures.contrasts import fit
from quantbench.compare.figures.recommendation import recommend
from quantbench.compare.figures.rows import best_of, rows
from quantbench.compare.figures.tuning import answer
from quantbench.compare.output import html
from quantbench.compare.output.points import band, points, staircase
from quantbench.compare.output.tables import remarks
from quantbench.compare.sampling.results import Results
from quantbench.typed_json import to_json
from tests.compare.browser import chromium, prefer, programs, resize
from tests.compare.example_results import ARMS, HOSTILE, example_results
from tests.compare.test_estimated_rows import with_figures

NARROW, WIDE = 360, 1200


@pytest.fixture(scope="module")
def results():
    results = with_figures(example_results(hostile=True))
    results.recommendation = recommend(rows(results), Limits(), best_of(results))
    return results


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    """The page's path."""
    folder = tmp_path_factory.mktemp("report")
    arm_rows = rows(results)
    results.save(folder, arm_rows)
    html.write(folder, results, arm_rows, remarks(results, arm_rows))
    return folder / html.FILE


@pytest.fixture(scope="module")
def saved(report):
    """The rows of results.json, by arm."""
    value = json.loads((report.parent / "results.json").read_text())
    return {row["arm"]: row for row in value["rows"]}


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium")
    if programs() is None:
        pytest.skip("needs chromium and chromedriver (apt: chromium chromium-driver)")
    with chromium() as session:
        yield session


@pytest.fixture(scope="module")
def loaded(browser, report):
    resize(browser, WIDE)
    prefer(browser, "light")
    browser.get(report.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    return browser


@pytest.fixture
def page(loaded):
    yield loaded
    loaded.execute_script("chosenTheme('light'); setTheme('light'); localStorage.clear()")


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def column(page, key):
    """data-value of the column's cells, or their text, from the top."""
    script = """return [...document.querySelectorAll(`tbody [data-column="${arguments[0]}"]`)]
        .map((cell) => cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value)"""
    return page.execute_script(script, key)


def heading(page, key):
    return page.find_element("css selector", f'thead [data-column="{key}"] button')


def sort_state(page, key):
    return page.find_element("css selector", f'thead [data-column="{key}"]').get_attribute(
        "aria-sort"
    )


# ------------------------------------------------------------------------- in a browser


def test_it_is_quiet_and_asks_nothing_of_the_network(loaded, report):
    """This one comes first: the log holds all since the page was loaded."""
    assert loaded.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in loaded.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if not url.startswith("data:")] == [report.as_uri()]


def test_all_charts_are_drawn(page):
    drawn = "return document.querySelectorAll(arguments[0]).length"
    assert page.execute_script(drawn, "#pareto .point") >= len(ARMS)
    for chart in ("samples", "latency"):
        assert page.execute_script(drawn, f"#{chart} .trace.scatter") == 6  # the baseline and five


NUMBERS = ("tok_s", "decode_tok_s", "perplexity", "kl", "top1", "time_to_first_token_s",
           "token_p50_s", "token_p90_s", "token_p99_s", "weight_bytes", "kv_cache_bytes",
           "bandwidth_share", "joules_per_token", "samples")  # fmt: skip


def value_of(row, name):
    """Reads a ratio with its ends; None where the row has none."""
    return row[name]["value"] if name in row else None


def peak(row, phase):
    """Reads the first kind of memory that was counted."""
    return next(iter(row.get("peak_memory_bytes", {}).get(phase, {}).values()), None)


def perplexity_ratio(row):
    if row["verdict"] == "baseline":
        return 1
    return row["perplexity_ratio"][0] if "perplexity_ratio" in row else None


# Columns whose figure is not a key of the row: by column, the figure of a row of results.json.
DERIVED = {
    "speed_up": lambda row: 1 if row["verdict"] == "baseline" else value_of(row, "speed_up"),
    "typical_step": lambda row: value_of(row, "typical_step"),
    "memory": lambda row: row["weight_bytes"] + row["kv_cache_bytes"] if "tok_s" in row else None,
    "perplexity_ratio": perplexity_ratio,
    "peak_load": lambda row: peak(row, "load"),
    "peak_generate": lambda row: peak(row, "generate"),
}


def test_every_number_equals_results_json(page, saved):
    arms = column(page, "arm")
    assert sorted(arms) == sorted(saved)
    figures = {key: operator.methodcaller("get", key) for key in NUMBERS} | DERIVED
    for key, figure in figures.items():
        shown = dict(zip(arms, column(page, key), strict=True))
        expected = {arm: figure(row) for arm, row in saved.items()}
        wanted = {arm: "–" if value is None else value for arm, value in expected.items()}
        assert shown == wanted, key
        assert any(value is not None for value in expected.values()), key


UNITS = {"": 1, "×": 1, "ms": 1e-3, "%": 1e-2, "MB": 1e6, "GB": 1e9}


def test_quality_by_layer_is_drawn_where_it_is_known(page, results):
    drawn = page.execute_script(
        "return $('by-layer').hidden ? null : $('layers').data.map(line => [...line.y])"
    )
    known = [arm.quality.layers for arm in results.arms if getattr(arm.quality, "layers", None)]
    assert drawn == [pytest.approx([layer.outputs for layer in layers]) for layers in known]


def test_every_number_is_written_as_it_is(page):
    """To half of its last digit."""
    script = """return [...document.querySelectorAll("tbody [data-value]")]
        .map((cell) => [cell.textContent, +cell.dataset.value])"""
    cells = page.execute_script(script)
    assert len(cells) > 200
    for text, value in cells:
        number, unit = re.match(r"(\d+\.?\d*) ?(ms|%|×|MB|GB|)", text).groups()
        digits = len(number.partition(".")[2])
        unit = UNITS[unit]
        assert abs(float(number) * unit - value) <= 0.501 * 10**-digits * unit, text


@pytest.mark.parametrize("key", ["speed_up", "typical_step"])
def test_intervals_are_those_of_results_json(page, saved, key):
    script = """return [...document.querySelectorAll("#results tbody tr")].map((row) => [
        row.querySelector("th").textContent,
        row.querySelector(`[data-column="${arguments[0]}"] .interval`)?.textContent])"""
    shown = page.execute_script(script, key)
    assert sum(key in saved[arm] for arm, _ in shown) > 5
    for arm, text in shown:
        if key in saved[arm]:
            ratio = saved[arm][key]
            assert text == f"({ratio['low']:.2f} to {ratio['high']:.2f})"


def test_estimates_stand_beside_what_was_measured(page, saved):
    """Only one arm has an estimate: its step a tenth too long, its peak half of the 3 GB."""
    rows = page.execute_script(
        """return [...document.querySelectorAll("#estimated tbody tr")].map((row) => [
            row.dataset.arm, row.dataset.figure, ...[...row.cells].slice(2).map((c) => c.innerText)
        ])"""
    )
    assert {arm for arm, *_ in rows} == {"int8wo"}
    shown = {figure: texts for _, figure, *texts in rows}
    estimated, measured = (float(text.split()[0]) for text in shown["token_seconds"][:2])
    assert estimated == pytest.approx(1.1 * measured, rel=0.01)
    assert measured == pytest.approx(1e3 / saved["int8wo"]["decode_tok_s"], abs=0.05)
    assert shown["token_seconds"][2] == "+10.0 %"
    assert shown["peak_memory_bytes"] == ["1.50 GB", "3.00 GB", "−50.0 %"]
    assert shown["prompt_seconds"][0] == shown["prompt_seconds"][1]
    assert shown["joules_per_token"][1] == f"{saved['int8wo']['joules_per_token']:.4f}"


def test_a_click_sorts_and_another_the_other_way(page):
    heading(page, "tok_s").click()
    assert sort_state(page, "tok_s") == "descending"
    *speeds, none = column(page, "tok_s")
    assert speeds == sorted(speeds, reverse=True) and none == "–"
    heading(page, "tok_s").click()
    assert sort_state(page, "tok_s") == "ascending"
    *speeds, none = column(page, "tok_s")
    assert speeds == sorted(speeds) and none == "–"  # what has no number stays last


def test_the_keyboard_sorts(page):
    from selenium.webdriver.common.keys import Keys

    page.execute_script("arguments[0].focus()", heading(page, "memory"))
    press(page, Keys.ENTER)
    assert sort_state(page, "memory") == "ascending" and sort_state(page, "tok_s") == "none"
    sizes = [size for size in column(page, "memory") if size != "–"]
    assert sizes == sorted(sizes)
    press(page, Keys.TAB, Keys.SPACE)
    assert sort_state(page, "perplexity_ratio") == "ascending"


def test_filters(page):
    page.find_element("id", "filter").send_keys("int4WO")
    kept = column(page, "arm")
    assert len(kept) == 3 and all("int4wo" in arm for arm in kept)
    assert page.find_element("id", "count").text == f"3 of {len(ARMS) + 2} arms"
    page.execute_script("$('verdict').value = 'slower'; drawBody()")
    assert column(page, "arm") == ["int4wo-128, kernel=reference"]
    page.execute_script("$('filter').value = $('verdict').value = ''; $('worst').value = '1.01'")
    page.execute_script("drawBody()")
    assert sorted(column(page, "arm")) == ["float8wo", "fp6", "int8dq", "int8wo", "none"]
    page.execute_script("$('worst').value = ''; drawBody()")
    assert len(column(page, "arm")) == len(ARMS) + 2


def test_a_hostile_name_is_only_text(page):
    assert HOSTILE in column(page, "arm")
    assert page.execute_script("return document.images.length") == 0
    assert not [e for e in page.get_log("browser") if e["level"] == "SEVERE"]
    assert HOSTILE in page.find_element("id", "ran").text


def test_the_chart_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    page.execute_script("$('pareto').focus()")
    press(page, Keys.ARROW_RIGHT)
    smallest = "uintx-2-64"
    assert smallest in page.find_element("id", "live").get_attribute("textContent")
    assert smallest in page.find_element("css selector", "#pareto .hoverlayer").text


def test_the_first_tab_skips_to_the_table(loaded, report):
    from selenium.webdriver.common.keys import Keys

    loaded.get(report.as_uri())
    press(loaded, Keys.TAB)
    focused = loaded.switch_to.active_element
    assert focused.get_attribute("class") == "skip" and focused.is_displayed()
    press(loaded, Keys.ENTER)
    assert loaded.switch_to.active_element.get_attribute("id") == "table"


def test_commands_are_copied(page, saved):
    page.execute_script("window.copied = []; copy = (text) => { copied.push(text); }")
    for button in page.find_elements("css selector", "#ran .command button"):
        page.execute_script("arguments[0].click()", button)
    copied = page.execute_script("return copied")
    assert copied[: len(ARMS)] == [saved[name]["command"] for name, *_ in ARMS]


def test_the_recommendation_stands_at_the_top(page, results):
    answer = results.recommendation
    text = page.find_element("id", "answer").text
    assert answer.choices
    for choice in answer.choices:
        assert choice.line() in text and choice.command in text
    assert answer.exclusions() in text


def tuned(equal):
    """Results of a tune of four settings, one measured for another one of the same plan."""
    results = example_results()
    del results.arms[4:]
    if equal:
        for arm in results.arms[1:]:
            arm.samples = results.arms[0].samples
    results.arms[1].also = [HOSTILE]
    results.looks = [results.plan.look([], fit(timings.of(results)))]
    results.tune = answer(results, rows(results), Limits(max_perplexity_increase=math.inf))
    return results


@pytest.mark.parametrize(
    ("equal", "begins"), [(False, "Take int8"), (True, "Keep none: no setting is shown to be fast")]
)
def test_the_answer_of_a_tune_stands_at_the_top(loaded, report, tmp_path, equal, begins):
    results = tuned(equal)
    assert results.tune.lines[0].startswith(begins)
    html.write(tmp_path, results, rows(results))
    loaded.get((tmp_path / html.FILE).as_uri())
    shown = loaded.find_element("id", "answer")
    text = shown.text
    assert shown.is_displayed() and all(line in text for line in results.tune.all_lines())
    assert f"identical plans: int8wo was measured for {HOSTILE}, too" in text
    assert "4 settings" in loaded.find_element("css selector", "header").text
    assert results.about.command in loaded.find_element("id", "repeat").text
    assert not [e for e in loaded.get_log("browser") if e["level"] == "SEVERE"]
    loaded.get(report.as_uri())


CONTRAST = """
const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255, 255, 255)"; };
return [...document.querySelectorAll("h1,h2,h3,p,td,th,label,button,code,dt,dd,li,summary,td span")]
  .filter((e) => e.innerText && e.checkVisibility()).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.innerText]; })
  .filter(([ratio]) => ratio < 4.5);"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_as_the_system_has_it(loaded, scheme):
    prefer(loaded, scheme)
    from selenium.webdriver.support.ui import WebDriverWait

    body = "return getComputedStyle(document.body).backgroundColor"
    theme = "return document.documentElement.dataset.theme"
    WebDriverWait(loaded, 5).until(lambda _: loaded.execute_script(theme) == scheme)
    red = int(re.findall(r"\d+", loaded.execute_script(body))[0])
    assert red < 40 if scheme == "dark" else red > 230
    assert loaded.execute_script(CONTRAST) == []  # WCAG AA
    prefer(loaded, "light")
    WebDriverWait(loaded, 5).until(lambda _: loaded.execute_script(theme) == "light")


def test_the_button_changes_colours_and_charts(page):
    before = page.execute_script("return $('pareto').layout.font.color")
    page.find_element("id", "theme").click()
    assert page.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert page.execute_script("return $('pareto').layout.font.color") != before


def test_a_phone_never_scrolls_sideways(loaded, report):
    resize(loaded, NARROW, 740)
    loaded.get(report.as_uri())
    width = "return document.documentElement.scrollWidth"
    assert loaded.execute_script(width) == NARROW
    loaded.execute_script("$('chosen').open = true; $('all-columns').click()")
    assert loaded.execute_script(width) == NARROW
    scrolls = "const e = document.querySelector('.scroll'); return e.scrollWidth > e.clientWidth"
    assert loaded.execute_script(scrolls)
    resize(loaded, WIDE)


CUT = """// texts of charts that reach out of their chart, but for those of a legend that scrolls
return [...document.querySelectorAll(".chart text")].filter((text) => {
  const scrolled = text.closest(".legend")?.querySelector(".scrollbar")?.getBoundingClientRect();
  const own = text.getBoundingClientRect(), box = text.closest(".chart").getBoundingClientRect();
  return own.width && !scrolled?.width && (own.left < box.left - 1 || own.right > box.right + 1
    || own.top < box.top - 1 || own.bottom > box.bottom + 1);
}).map((text) => text.textContent)"""


@pytest.mark.parametrize("width", [320, 390, 700])
def test_nothing_of_a_chart_is_cut_after_the_window_got_narrow(loaded, report, width):
    resize(loaded, WIDE)
    loaded.get(report.as_uri())
    resize(loaded, width)
    until = time.monotonic() + 5
    while (cut := loaded.execute_script(CUT)) and time.monotonic() < until:
        time.sleep(0.1)  # plotly draws again a moment later
    assert cut == []
    inside = """const edge = document.querySelector("section").getBoundingClientRect().right;
    return [...document.querySelectorAll("select")].every((e) => !e.offsetWidth ||
      e.getBoundingClientRect().right <= edge)"""
    assert loaded.execute_script(inside)
    resize(loaded, WIDE)


# ------------------------------------------------------------------------- without one


def test_the_page_is_one_small_file(report):
    text = report.read_text()
    assert report.stat().st_size < 6_000_000
    own = text.replace(html._plotly(), "")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", own)
    assert "MIT license" in text


def test_the_page_of_a_real_comparison_of_every_scheme_is_small(tmp_path):
    """32 arms with all of their samples, as the documentation's table has them."""
    measured = Path(__file__).parents[2] / "docs/data/llama32_4layers.json"
    (tmp_path / "results.json").write_text(measured.read_text())
    results = Results.load(tmp_path)
    arm_rows = rows(results)
    html.write(tmp_path, results, arm_rows, remarks(results, arm_rows))
    assert len(arm_rows) > 30 and all(row.samples for row in arm_rows)
    assert (tmp_path / html.FILE).stat().st_size < 6_000_000


def test_no_text_of_the_results_is_markup(report):
    text = report.read_text()
    assert "<img" not in text.replace(html._plotly(), "") and "alert(1)\\u003e" in text


def test_numbers_that_are_none_in_json(results):
    arm_rows = rows(results)
    arm_rows[1].perplexity, arm_rows[2].kl = float("nan"), float("inf")
    data = re.search(r'id="data">(.*?)</script>', html.render(results, arm_rows, []), re.S)
    shown = json.loads(data[1], parse_constant=pytest.fail)["rows"]
    assert shown[1]["perplexity"] is None and shown[2]["kl"] is None
    assert shown[3] == json.loads(json.dumps(to_json(arm_rows[3])))


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


def test_bars_and_pareto_name_every_arm(results, tmp_path):
    from quantbench.compare.output import bars, pareto

    arm_rows = rows(example_results())
    bars.draw(arm_rows, tmp_path / "bars.svg", "title")
    pareto.draw(arm_rows, [tmp_path / "pareto.svg"], "title")
    for name in ("bars.svg", "pareto.svg"):
        text = (tmp_path / name).read_text()
        assert all(f">{arm}<" in text for arm, *_ in ARMS)
