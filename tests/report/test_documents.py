"""quantbench readme: blocks of documents from committed data, and when they are stale."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench.commands.readme import BLOCKS, readme
from quantbench.errors import UsageError
from quantbench.log.about import git_commit
from quantbench.report.doc_tables import TABLES
from quantbench.report.documents import rewritten
from quantbench.typed_json import omitted

ROOT = Path(__file__).parents[2]
ABOUT = {
    "command": "quantbench roofline",
    "date": "2026-11-22",
    "commit": "0123456789",
    "machine": "2 cores of X",
    "versions": {"torch": "2.13.0"},
}
HEAD = (git_commit() or "").partition("-")[0]
CAPTION = "<sub>2 cores of X, torch 2.13.0; 2026-11-22, commit 0123456: `quantbench roofline`</sub>"


def run(*arguments):
    return CliRunner().invoke(readme, list(arguments))


def save(name, **fields):
    Path(name).write_text(json.dumps({"about": ABOUT, **fields}))


def shown(kind, *words):
    """The rows of a table's cells, without its headings, and the line below it."""
    lines = TABLES[kind](words).splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if "|" in line]
    return rows[2:], lines[-1]


def test_only_what_lies_between_the_markers_changes():
    text = "# a\n\n<!-- readme: x f g -->\nold\n<!-- end -->\nb\n<!-- readme: x -->\n<!-- end -->\n"
    given = []

    def block(words):
        given.append(list(words))
        return "| new |"

    new = rewritten("R.md", text, {"x": block})
    assert given == [["f", "g"], []] and "old" not in new
    assert new.startswith("# a\n\n<!-- readme: x f g -->\n\n| new |\n\n<!-- end -->\nb\n")
    assert rewritten("R.md", new, {"x": block}) == new


@pytest.mark.parametrize(
    "text, reason",
    [
        ("<!-- readme: x -->\n", "D.md, line 1: <!-- readme: x --> needs a line <!-- end -->"),
        (
            "a\n<!-- readme: x -->\n<!-- readme: x -->\n<!-- end -->\n",
            "D.md, line 2: <!-- readme: x --> needs a line <!-- end --> after it",
        ),
        (
            "<!-- readme: speed -->\n<!-- end -->\n",
            "line 1: no table 'speed'; there are about, printed, runs, ",
        ),
        ("<!-- readme: roofline -->\n<!-- end -->\n", "needs the name of a file"),
        ("<!-- readme: roofline no.json -->\n<!-- end -->\n", "cannot read no.json: No such file"),
        ("<!-- readme: roofline list.json -->\n<!-- end -->\n", "list.json is not what"),
        ("<!-- readme: roofline torn.json -->\n<!-- end -->\n", "torn.json: it is no JSON"),
        ("<!-- readme: runs empty.txt -->\n<!-- end -->\n", "empty.txt holds no line of a run"),
        ("<!-- readme: printed a.txt -->\n<!-- end -->\n", "is printed FILE JSON; given: a.txt"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(in_tmp, text, reason):
    Path("D.md").write_text(text)
    Path("list.json").write_text("[]")
    Path("torn.json").write_text('{"about": ')
    Path("empty.txt").touch()
    result = run("D.md")
    message = str(result.exception).replace("no table 'x'", "needs a line")
    assert reason in message and "\n" not in message
    assert Path("D.md").read_text() == text


def test_a_folder_without_documents(in_tmp):
    assert "no README.md and no docs/*.md here" in str(run("--check").exception)


def test_check_tells_what_is_stale(in_tmp):
    Path("docs").mkdir()
    Path("docs/c.md").write_text("<!-- readme: cache_bytes -->\n<!-- end -->\n")
    result = run("--check")
    assert result.exit_code == 1 and "stale" in result.stderr
    assert "+| `int4` | a scale for every 32 of head_dim | 1152 | 4.83 GB |" in result.stdout
    assert run().stdout == "Rewrote docs/c.md\n"
    assert run("--check").exit_code == 0 and run().stdout == ""


@pytest.mark.parametrize(
    "commit, code, said",
    [
        (HEAD, 0, ""),
        ("0123456789", 0, "note: a.json is of commit 0123456, which git does not know\n"),
        (f"{HEAD}-dirty", 1, f"error: a.json is of commit {HEAD[:7]} with changes; commit them, "
         "and run its command again\n"),
    ],
    ids=["known", "unknown", "changed"],
)  # fmt: skip
def test_check_doubts_figures_of_no_commit(in_tmp, commit, code, said):
    Path("D.md").write_text("<!-- readme: about a.json -->\n<!-- end -->\n")
    Path("a.json").write_text(json.dumps({"about": ABOUT | {"commit": commit}}))
    run("D.md")
    result = run("--check", "D.md")
    assert (result.exit_code, result.stderr) == (code, said)


QUALITY = {"numerics": "a", "plain": "b", "gguf": "", "tokens": 78541}
ARM = {"arm": "a", "failed": None, "rounds": 4}
PEER = {"scheme": "none", "beside": "llama.cpp BF16", "rounds": 4, "prompt_ours_tok_s": 523.0}
SHARES = {"share": 0.01, "high": 0.0234}
# For each table the rows of the file, and the cells that they become.
TABLES_OF_ROWS = {
    "quality": [
        ({"scheme": "none", "bits_per_weight": 16.0, "kl": 0.0, "ratio": 1.0, **QUALITY},
         "`none` | 16.00 | - | 0.0000 | 1.0000"),
        (QUALITY | {"scheme": "fp6", "bits_per_weight": 6.11, "gguf": "Q6_K", "kl": 0.01234,
                    "ratio": 1.0089, "ratio_standard_error": 8e-4},
         "`fp6` | 6.11 | Q6_K | 0.0123 | 1.0089 ± 0.0008"),
        (QUALITY | {"scheme": "bnb-int8", "why_not": "not installed", "tokens": None}, None),
    ],
    "roofline": [
        (ARM | {"scheme": "none", "decode_tok_s": 15.14, "limit_share": [0.9]},
         "a | - | 15.14 | - | 90.0% | - | - | - | -"),
        (ARM | {"scheme": "int8wo", "decode_tok_s": 27.688, "limit_tok_s": 32.74,
                "limit_share": [0.854, 0.792, 0.92], "speed_up": [1.839, 1.7, 1.98],
                "stock": {**ARM, "scheme": "int8wo", "decode_tok_s": 14.11},
                "over_stock": [1.962, 1.81, 2.12]},
         "a | - | 27.69 | 32.74 | 85.4% (79.2% to 92.0%) | 1.839 (1.700 to 1.980) | - | 14.11 | "
         "1.962 (1.810 to 2.120)"),
    ],
    "peers": [
        (PEER | {"decode_ours_tok_s": 14.99, "decode_theirs_tok_s": 9.34,
                 "decode_ratio": [1.6, 1.5, 1.71]},
         "none | llama.cpp BF16 | 14.99 | 9.34 | 1.600 (1.500 to 1.710) | - / - | 523.00 | - | -"),
    ],
    "trust": [
        ({"cell": "calm", "sessions": 400, "false_verdicts": SHARES, "covers": SHARES,
          "covers_long_run": SHARES, "half_width": 0.031, "seconds": 61.2},
         "calm | 400 | 1.0% (2.3%) | 1.0% | 1.0% | 3.1% | 61 s"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES_OF_ROWS)
def test_tables_of_a_commands_rows(in_tmp, kind):
    rows = TABLES_OF_ROWS[kind]
    save("rows.json", **{"model" if kind == "roofline" else "rows": [row for row, _ in rows]})
    cells, caption = shown(kind, "rows.json")
    assert [" | ".join(row) for row in cells] == [text for _, text in rows if text]
    assert caption == CAPTION
    if kind == "quality":
        assert "| KL, nats, on 78,541 tokens |" in TABLES[kind](["rows.json"])


def test_speeds(in_tmp):
    none = {"arm": "none", "verdict": "baseline", "tok_s": 14.0, "decode_tok_s": 15.14}
    int8wo = {
        "arm": "int8wo, kv_cache=int8",
        "verdict": "faster",
        "tok_s": 25.0,
        "decode_tok_s": 27.69,
        "bandwidth_share": 0.854,
        "decode_speed_up": {"value": 1.84, "low": 1.7, "high": 1.98, "confidence": 0.95},
        "weight_bytes": 1_040_000_000,
        "peak_memory_bytes": {"generate": {"resident": 1_690_000_000}},
        "kl": 0.0005,
    }
    save("ab.json", rows=[none, int8wo, {"arm": "fp6", "failed": "no kernel"}])
    rows, caption = shown("speeds", "ab.json")
    assert rows[0] == ["`none`", "15.1", "-", "-", "-", "-", "-", "-"]
    ends = ["1.84 (1.70 to 1.98)", "-", "1.04 GB", "1.69 GB", "0.0005"]
    assert rows[1:] == [["`int8wo, kv_cache=int8`", "27.7", "85%", *ends]]
    assert caption == CAPTION
    text = TABLES["speeds"](["ab.json"])
    assert "Speed-ups over the baseline, with 95 % intervals" in text
    assert "roken" not in text
    assert shown("speeds", "ab.json", "int8wo,_kv_cache=int8")[0] == rows[1:]
    with pytest.raises(UsageError, match="ab.json measured no arm fp6; it has none, int8wo,_kv"):
        TABLES["speeds"](["ab.json", "fp6"])


@pytest.mark.parametrize("kl, is_marked", [(0.49, False), (0.51, True), (float("nan"), True)])
def test_a_scheme_whose_text_is_broken_is_marked(in_tmp, kl, is_marked):
    row = {"arm": "uintx-2-64", "verdict": "faster", "tok_s": 25.0, "kl": kl}
    save("ab.json", rows=[{"arm": "none", "verdict": "baseline", "tok_s": 14.0}, row])
    ((name, *_),) = shown("speeds", "ab.json", "uintx-2-64")[0]
    assert name == ("`uintx-2-64` (broken)" if is_marked else "`uintx-2-64`")
    assert ("*Broken*: KL is above 0.5 nats" in TABLES["speeds"](["ab.json"])) == is_marked


def test_the_tables_that_need_no_file():
    forms = {row[0] for row in shown("schemes")[0]}
    assert {"`none`", "`mxfp4[-{gptq,gptq-inorder,awq}]`", "`sparse-marlin[-wanda]`"} <= forms
    options = {row[0]: row[1] for row in shown("options")[0]}
    assert options["`--max_new_tokens N`"] == "200" and options["`--compile`"] == "off"


@dataclass
class Figures:
    """What a command writes.

    More of it."""

    tok_s: float  # of one row
    # The arm's first process,
    # in bytes.
    peak: int | None = omitted()
    kl: list[Path] | None = None  # nats


def test_keys_of_json_are_those_of_the_dataclass_with_its_comments():
    assert TABLES["fields"]([f"{__name__}:Figures"]).splitlines() == [
        "**Figures.** What a command writes.",
        "",
        "| key | type | meaning |",
        "| --- | --- | --- |",
        "| `tok_s` | `float` | of one row |",
        "| `peak` | `int or no key` | The arm's first process, in bytes. |",
        "| `kl` | `list[Path] \\| null` | nats |",
    ]
    with pytest.raises(UsageError, match="nothing is called quantbench.no:Such"):
        TABLES["fields"](["quantbench.no:Such"])


def test_the_api_has_signatures_and_docstrings():
    text = TABLES["api"](["quantbench.models:load", "quantbench.generate:Generator"])
    assert (
        "## quantbench.models.load\n\n```\nload(checkpoint_path: str, device: str | device" in text
    )
    assert "**forward**\n\n```\nforward(tokens: Tensor, start: int = 0) -> Tensor\n\nLogits" in text
    assert "_check" not in text


def test_every_command_is_described():
    text = BLOCKS["commands"]([])
    assert set(re.findall(r"^## quantbench (\w+)$", text, re.M)) >= {"ab", "recommend", "estimate"}
    assert "## quantbench log check\n\n" in text and "## quantbench generate" not in text
    assert "| `--max_memory SIZE` | Recommend nothing that takes more, as 8GB" in text
    assert "And of [generate's options](options.md): Model, Speed, Sample, Cache" in text


def test_a_budget_is_counted_from_shapes(in_tmp):
    save("q.json", rows=[QUALITY | {"scheme": name, "kl": kl} for name, kl in
                         (("fp6", 0.0163), ("none", 0.0), ("uintx-2-64", 1.75))])  # fmt: skip
    rows, _ = shown("budget", "TinyLlama-1.1B-Chat-v1.0", "2048", "q.json")
    assert [row[0] for row in rows] == ["`none`", "`fp6`"]  # by size; what is broken is no choice
    # 1.1 B weights and 2 · 22 layers · 4 heads · 64 numbers for 2048 positions, two bytes each
    weights, cache = 1_100_048_384, 2 * 22 * 4 * 64 * 2048
    assert rows[0][1] == f"{2 * (weights + cache) / 1e9:.2f} GB"
    step = weights - 32000 * 2048  # without the embedding
    assert rows[0][2:] == [f"{50e9 / 2 / step:.1f}", "not noticeable"]
    assert rows[1][3] == "good"


def test_no_table_with_figures_is_typed_by_hand():
    """Outside of the blocks that are written, no cell of a table is a number alone; but in the log,
    each of whose entries has its command."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if path.name == "LOG.md":
            continue
        text = re.sub(r"<!-- readme: .*?<!-- end -->", "", path.read_text(), flags=re.S)
        cells = re.findall(r"(?<=\|)\s*≤?[\d.,]+ ?(?:%|ms|s|GB|MB|tok/s|×)?\s*(?=\|)", text)
        assert cells == [], path.name


def test_what_a_command_printed(in_tmp):
    Path("demo.txt").write_text("arm  tok/s\nnone 1.00\n\n")
    save("demo.json")
    text = f"```\narm  tok/s\nnone 1.00\n```\n\n{CAPTION}"
    assert TABLES["printed"](["demo.txt", "demo.json"]) == text
    assert TABLES["about"](["demo.json"]) == CAPTION
