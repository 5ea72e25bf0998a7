"""Every sentence of a report in prose is parsed, and its numbers and directions computed anew.

The computations here use the samples and scipy, not the code that wrote the report. A sentence
that no pattern here matches as a whole fails the test: nothing is claimed that is not checked.
"""

import math
import re

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from quantbench.__main__ import commands
from quantbench.compare.figures.latency import Cell
from quantbench.compare.output.narrative import METHOD, OTHER_FOLDER, OTHER_MACHINE, percent
from quantbench.compare.sampling.latency_results import Carried, ModelFacts
from tests.compare.latency_folders import CARRIED, MODEL, results

NUMBER = r"(\d+(?:\.\d+)?)"
METRIC = (
    r"The (.+?)(?:, counted in (.+) tokens,)? is (\d+\.\d\d) (\S+) for the target at batch size "
    r"(\d+) and (\d+\.\d\d) (\S+) for the baseline at batch size (\d+)"
)
RATIO = rf"(Ratio_\w+) is {NUMBER}"
DECIDED = (
    rf"{RATIO}, with an interval from {NUMBER} to {NUMBER}: the target's (latency|throughput) is "
    rf"{NUMBER} % (lower|higher), which is (better|worse)"
)
UNDECIDED = (
    rf"{RATIO}, with an interval from {NUMBER} to {NUMBER}, which contains 1: "
    "no difference is shown"
)
FEW = rf"{RATIO}, from too few runs for an interval: no difference is shown"
MISSING = r"The (.+?)(?:, counted in (.+) tokens,)? was not measured on both sides: NAME(\d+)"
COUNTS = (
    r"Of (\d+) metrics, the target is better in (\d+) and worse in (\d+); (\d+) show no "
    r"difference, and (\d+) lack a measurement"
)
ARM = r"The (baseline|target) is arm NAME(\d+) of NAME(\d+) on (\d+) ranks?"
SHAPE = (
    r"Its model NAME(\d+) has (\d+) layers? of width (\d+), (\d+) query heads?, (\d+) key/value "
    r"heads?, a feed-forward width of (\d+) and a vocabulary of (\d+) tokens?"
)
RAN = r"It ran in NAME(\d+) on NAME(\d+)(?: with .*)?, on NAME(\d+)"
COMPILED = r"Compiled was NAME\d+(?:, NAME\d+)*|Nothing was compiled"
RUNS = r"Each of its cells has up to (\d+) runs? after (\d+) warm-ups?"
CELL = r"For the (baseline|target), batch size (\d+) was not measured: NAME(\d+)"
HEADING = r"Prompts of (\d+) tokens?, answers of (\d+) tokens?"

# Which seconds each metric takes, whether of several users, and which tokens are counted.
PREFILL = {"time to first token", "maximum prompt throughput", "single-user prompt throughput"}


class Checker:
    """Checks the sentences of one report about these two tables."""

    def __init__(self, baseline, target, folders=("a", "a")):
        self.made = {"baseline": baseline, "target": target}
        self.folders = dict(zip(("baseline", "target"), folders, strict=True))
        self.tables = {}
        self.names = []
        self.which = "baseline"
        self.metric = None
        self.verdicts = {"better": 0, "worse": 0, "none": 0, "missing": 0}
        self.counts = None

    def check(self, text):
        text = re.sub(r"`([^`]*)`", self._named, text)
        for constant in (METHOD, OTHER_MACHINE, OTHER_FOLDER):
            text = text.replace(constant, "")
        for block in text.split("\n\n"):
            if block.startswith("#"):
                heading = block.lstrip("# ").strip()
                if match := re.fullmatch(HEADING, heading):
                    self._section(int(match[1]), int(match[2]))
                else:
                    assert re.fullmatch(r"NAME\d+ compared with NAME\d+|What was compared", heading)
                continue
            for sentence in filter(
                None, re.split(r"(?<=[^\d])\.\s+|(?<=\d)\.\s+|\.$", block.strip())
            ):
                self._sentence(sentence)
        counted = self.verdicts
        assert self.counts == [sum(counted.values()), *counted.values()]

    def _named(self, match):
        self.names.append(match[1])
        return f"NAME{len(self.names) - 1}"

    def _sentence(self, sentence):
        rules = {
            METRIC: self._values, DECIDED: self._decided, UNDECIDED: self._undecided,
            FEW: self._few,
            MISSING: self._missing, COUNTS: self._counts, ARM: self._arm, SHAPE: self._shape,
            RAN: self._ran, COMPILED: lambda match: None, RUNS: self._runs, CELL: self._cell,
        }  # fmt: skip
        matches = [(rule, m) for rule in rules if (m := re.fullmatch(rule, sentence))]
        assert len(matches) == 1, f"{len(matches)} rules for {sentence!r}"
        rules[matches[0][0]](matches[0][1])

    # ------------------------------------------------------------------------ what was compared

    def _counts(self, match):
        self.counts = [int(number) for number in match.groups()]

    def _arm(self, match):
        self.which = match[1]
        made = self.made[self.which]
        assert self.names[int(match[3])] == self.folders[self.which]
        self.arm, self.ranks = self.names[int(match[2])], int(match[4])
        fitting = [t for t in made.tables if (t.arm, t.ranks) == (self.arm, self.ranks)]
        assert fitting
        self.tables[self.which] = fitting

    def _shape(self, match):
        model = self.tables[self.which][0].model
        assert self.names[int(match[1])] == model.name
        numbers = [int(number) for number in match.groups()[1:]]
        assert numbers == [
            model.layers, model.width, model.heads, model.kv_heads, model.feed_forward,
            model.vocabulary,
        ]  # fmt: skip

    def _ran(self, match):
        carried = self.tables[self.which][0].carried
        names = [self.names[int(number)] for number in match.groups()]
        assert names == [carried.precision, carried.device, carried.machine]

    def _runs(self, match):
        assert [int(match[1]), int(match[2])] == [self.made[self.which].plan.runs, 1]

    # ------------------------------------------------------------------------ the metrics

    def _section(self, prompt, output):
        self.prompt, self.output = prompt, output
        self.now = {
            which: next(t for t in tables if t.sequence_length == prompt)
            for which, tables in self.tables.items()
        }
        assert all(made.plan.decode_length == output for made in self.made.values())

    def _seconds(self, name, cell):
        decode = name not in PREFILL
        return [s.prefill_seconds + decode * sum(s.step_seconds) for s in cell.samples]

    def _tokens(self, name, counted):
        return {
            None: None, "input": self.prompt, "output": self.output,
            "input + output": self.prompt + self.output,
        }[counted]  # fmt: skip

    def _best(self, name, counted, which):
        """The value and the cell: at batch size 1, or the largest above it."""
        cells = [cell for cell in self.now[which].cells if cell.reason is None]
        if name == "time to first token":
            (cell,) = [cell for cell in cells if cell.batch_size == 1]
            return 1e3 * np.mean(self._seconds(name, cell)), cell
        several = "maximum" in name
        values = [
            (c.batch_size * self._tokens(name, counted) / np.mean(self._seconds(name, c)), c)
            for c in cells
            if (c.batch_size > 1) == several
        ]
        return max(values, key=lambda pair: pair[0])

    def _values(self, match):
        name, counted, *rest = match.groups()
        self.metric = name, counted
        unit = "ms" if name == "time to first token" else "tokens/s"
        for which, (written, said, size) in zip(
            ("target", "baseline"), (rest[:3], rest[3:]), strict=True
        ):
            value, cell = self._best(name, counted, which)
            assert written == f"{value:.2f}" and said == unit and int(size) == cell.batch_size

    def _interval(self):
        """Seconds for the same work, target ÷ baseline; Welch's t, written out; 2 % for all
        four ratios that differ."""
        logs, errors, freedoms = [], [], []
        for which in ("target", "baseline"):
            _, cell = self._best(*self.metric, which)
            seconds = np.array(self._seconds(self.metric[0], cell)) / cell.batch_size
            logs.append(math.log(seconds.mean()))
            errors.append(stats.sem(seconds) / seconds.mean() if len(seconds) > 1 else math.nan)
            freedoms.append(len(seconds) - 1)
        total = errors[0] ** 2 + errors[1] ** 2
        parts = sum(e**4 / f for e, f in zip(errors, freedoms, strict=True) if f)
        reach = (
            stats.t.ppf(1 - 0.02 / 4 / 2, total**2 / parts) * math.sqrt(total)
            if parts
            else math.nan
        )
        centre = logs[0] - logs[1]
        return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)

    def _ratio_is(self, name, *written):
        latency = self.metric[0] == "time to first token"
        assert name == ("Ratio_Latency" if latency else "Ratio_Throughput")
        computed = self._interval()
        for text, number in zip(written, computed, strict=False):
            decimals = len(text.partition(".")[2])
            assert float(text) == pytest.approx(number, abs=0.51 * 10**-decimals)
        return computed

    def _decided(self, match):
        name, value, low, high, noun, change, direction, verdict = match.groups()
        computed = self._ratio_is(name, value, low, high)
        latency = self.metric[0] == "time to first token"
        assert noun == ("latency" if latency else "throughput")
        target, baseline = (self._best(*self.metric, w)[0] for w in ("target", "baseline"))
        assert change == percent(target / baseline - 1)
        assert float(change) == pytest.approx(100 * abs(target / baseline - 1), abs=0.051)
        assert direction == ("higher" if target > baseline else "lower")
        is_better = target < baseline if latency else target > baseline
        assert verdict == ("better" if is_better else "worse")
        assert computed[2] < 1 if is_better else computed[1] > 1
        assert float(high) < 1 if is_better else float(low) > 1
        self.verdicts[verdict] += 1

    def _undecided(self, match):
        computed = self._ratio_is(*match.groups())
        assert computed[1] <= 1 <= computed[2]
        self.verdicts["none"] += 1

    def _few(self, match):
        self._ratio_is(*match.groups())
        sizes = [len(self._best(*self.metric, which)[1].samples) for which in self.now]
        assert min(sizes) < 4
        self.verdicts["none"] += 1

    def _missing(self, match):
        several = "maximum" in match[1]
        reasons = self.names[int(match[3])]
        without = [
            which
            for which, table in self.now.items()
            if all(c.reason for c in table.cells if (c.batch_size > 1) == several)
        ]
        assert (
            without
            and [part.split(":")[0] for part in reasons.split("; ") if ":" in part] == without
        )  # noqa: E501
        self.verdicts["missing"] += 1

    def _cell(self, match):
        (cell,) = [c for c in self.now[match[1]].cells if c.batch_size == int(match[2])]
        assert cell.reason == self.names[int(match[3])]


def written(tmp_path, form, *words):
    done = CliRunner().invoke(commands, ["metrics", *words, "--narrative", form])
    assert done.exit_code == 0, done.output
    return done.stdout


def from_latex(text):
    """The same report as Markdown, as far as the checker reads it."""
    begun = text.partition("\\begin{document}\n\n")[2].partition("\n\n\\end{document}")[0]
    assert not re.search(r"(?<!\\)[&%$#_~^]", begun)
    begun = re.sub(r"\\texttt\{([^{}]*)\}", r"`\1`", begun)
    begun = re.sub(r"\\(?:sub)?section\*\{(.*)\}", r"# \1", begun)
    begun = begun.replace(r"\ensuremath{\div}", "÷")
    return re.sub(r"\\([&%$#_])", r"\1", begun)


ARMS = {
    "faster": {"none": 1.0, "int8wo": 0.8},
    "slower": {"none": 1.0, "int8wo": 1.3},
    "equal": {"none": 1.0, "int8wo": 1.0001},
    "hardly": {"none": 1.0, "int8wo": 0.985},
}


@pytest.mark.parametrize("form", ["markdown", "latex"])
@pytest.mark.parametrize("name", ARMS)
def test_every_sentence_recomputes(tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    made = results(ARMS[name], sequence_lengths=[100, 300], seed=4)
    made.tables[3].cells[2] = Cell(
        4, [], "out of memory: 12.5 GB more than the 8.0 GB that are free"
    )
    made.save(tmp_path)
    text = written(
        tmp_path, form, "--baseline", f"{tmp_path}:none", "--target", f"{tmp_path}:int8wo"
    )
    if form == "latex":
        text = from_latex(text)
    checker = Checker(made, made, (str(tmp_path), str(tmp_path)))
    checker.check(text)
    # Without batch size 4, the target's multi-user throughput is that of batch size 2.
    expected = {
        "faster": {"better": 14},
        "slower": {"worse": 14},
        "equal": {"none": 12, "worse": 2},
    }
    for verdict, count in expected.get(name, {}).items():
        assert checker.verdicts[verdict] == count
    assert sum(checker.verdicts[verdict] for verdict in ("better", "worse", "none")) == 14


def test_two_folders_of_different_machines_and_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    carried = Carried("4 cores_of & another", "cuda:0", "torch.float16")
    other = ModelFacts("other `1 B`", 1, 64, 8, 8, 128, 512)
    made = {
        "a": results({"none": 1.0}, runs=2),
        "b": results({"none": 0.5}, runs=12, carried=carried, model=other),
    }
    made["b"].tables[0].cells[0] = Cell(1, [], "killed")
    for name, kept in made.items():
        (tmp_path / name).mkdir()
        kept.save(tmp_path / name)
    text = written(tmp_path, "markdown", "--baseline", "a", "--target", "b")
    assert OTHER_MACHINE in text and OTHER_FOLDER in text and "other '1 B'" in text
    other_name = ModelFacts("other '1 B'", 1, 64, 8, 8, 128, 512)
    for table in made["b"].tables:
        table.model = other_name
    checker = Checker(made["a"], made["b"], ("a", "b"))
    checker.check(text)
    assert checker.verdicts == {"better": 0, "worse": 0, "none": 3, "missing": 4}
    latex = written(tmp_path, "latex", "--baseline", "a", "--target", "b")
    assert r"4 cores\_of \& another" in latex


def test_the_checker_sees_a_wrong_number_and_a_wrong_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = results(ARMS["faster"])
    made.save(tmp_path)
    text = written(
        tmp_path, "markdown", "--baseline", f"{tmp_path}:none", "--target", f"{tmp_path}:int8wo"
    )  # noqa: E501
    for wrong in (
        text.replace("lower, which", "higher, which", 1),
        text.replace("which is better", "which is worse", 1),
        text.replace(" ms for the target", "1 ms for the target", 1),
        re.sub(r"Ratio_Latency is 0\.(\d)", lambda m: f"Ratio_Latency is 0.{9 - int(m[1])}", text),
        text.replace("better in 7", "better in 6"),
        text.replace("22 layers", "23 layers", 1),
        text.replace("batch size 4 and", "batch size 2 and", 1),
        text + "\n\nIt is much faster.",
    ):
        assert wrong != text
        with pytest.raises(AssertionError):
            Checker(made, made, (str(tmp_path), str(tmp_path))).check(wrong)


def test_a_report_is_written_to_a_file_and_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = results(ARMS["faster"])
    made.save(tmp_path)
    words = ["metrics", "--baseline", f"{tmp_path}:none", "--target", f"{tmp_path}:int8wo"]
    for name in ("report.md", "report.tex", "report.md"):
        done = CliRunner().invoke(commands, [*words, "--narrative", name])
        assert done.exit_code == 0 and done.stdout == "" and f"Wrote {name}" in done.stderr
    assert (tmp_path / "report.md").read_text().startswith("# `int8wo` compared with `none`\n")
    assert MODEL.name in (tmp_path / "report.tex").read_text() and CARRIED.kernel == "cpu"


def test_percents_do_not_read_as_zero():
    assert percent(-0.177) == "17.7" and percent(0.0004) == "0.04" and percent(0.0) == "0.0"
