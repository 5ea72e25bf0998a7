"""python -m compare readme: which lines it takes, what it makes of them, and when it is stale."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchlog import log
from compare.commands.readme import BEGIN, END, groups, readme

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "data" / "torchao_llama_log.txt"
TEXT = f"# title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"


def line(
    date, tok_s, quant="None", mod="tiny", device="cpu", compile=True, kv=False, peak=2.0, more=""
):
    scheme = "" if quant == "None" else f"--quantization {quant} "
    flags = " --compile" * compile + " --kv_cache_quantization" * kv
    return (
        f"{date}, tok/s={tok_s:6.2f}, mem/s={1:7.2f} GB/s, peak_mem={peak:5.2f} GB, "
        f"model_size={4 if quant == 'None' else 1:5.2f} GB quant: {quant}, mod: {mod}, "
        f"kv_quant: {kv}, compile: {compile}, compile_prefill: False, dtype: torch.bfloat16, "
        f"device: {device} repro: python generate.py {scheme}--checkpoint_path {mod} "
        f"--device {device} --precision torch.bfloat16{flags} --num_samples 5 "
        f"--max_new_tokens 200 --top_k 200 --temperature 0.8{more}"
    )


LINES = [
    line("20260101000000", 10, peak=4.0),
    line("20260102000000", 30, "int8wo"),
    line("20260101000000", 15, "int8wo"),  # older, though it stands later
    line("20260103000000", 99, "int8wo", more=" --num_layers 1"),
    line("20260101000000", 5, "fp6", compile=False),
    line("20260101000000", 8, kv=True),
    line("20260101000000", 100, device="cuda"),
    line("20260101000000", 50, "fp6", device="cuda"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("README.md").write_text(TEXT)
    Path("benchmarks.txt").write_text("title\n" + "\n".join(LINES) + "\n")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(readme, list(arguments))


def tables(text):
    """By heading, rows of cells."""
    found = {}
    for block in re.split(r"^\*\*", text, flags=re.M)[1:]:
        lines = [line for line in block.splitlines() if line.startswith("|")][2:]
        heading = block.splitlines()[0].replace("**", "")
        found[heading] = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return found


def test_the_newest_lines_against_full_precision(folder):
    assert run().exit_code == 0
    text = Path("README.md").read_text()
    assert text.startswith("# title\n\nbefore\n\n") and text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text
    found = tables(text)
    assert list(found) == ["tiny on cpu", "tiny on cuda"]
    scheme, speeds = (
        [row[0] for row in found["tiny on cpu"]],
        [row[4] for row in found["tiny on cpu"]],
    )
    assert scheme == ["`none`", "`none`", "`fp6`", "`int8wo`"]
    assert speeds == ["10.00", "8.00", "5.00", "30.00"]
    none, quantized_cache, not_compiled, int8wo = found["tiny on cpu"]
    assert none[5:] == ["1.00", "4.00 GB", "1.00", "4.00 GB", "1.00"]
    assert int8wo[5:] == ["3.00", "2.00 GB", "0.50", "1.00 GB", "0.25"]
    assert quantized_cache[1] == "int8" and quantized_cache[5] == "0.80"
    assert not_compiled[3] == "no" and not_compiled[5] == "-"  # no such full precision
    assert found["tiny on cuda"][1][5] == "0.50"


def test_other_work_is_another_table(folder):
    """A step behind 65536 positions, or one of eight rows, is not compared with an ordinary one;
    nor does one kind of quantized cache hide another."""
    deep = " --context_depth 65536"
    more = [
        line("20260105000000", 4, more=deep),
        line("20260105000000", 6, more=f" --kv_cache int8{deep}"),
        line("20260106000000", 7, more=f" --kv_cache int4{deep}"),
        line("20260105000000", 40, more=" --batch_size 8"),
        line("20260107000000", 10.5, more=" --batch_size 1"),
    ]
    Path("benchmarks.txt").write_text("\n".join([*LINES, *more]) + "\n")
    assert run().exit_code == 0
    found = tables(Path("README.md").read_text())
    titles = ["tiny on cpu", "tiny on cpu, 8 rows at once", "tiny on cpu, behind 65536 positions"]
    assert list(found) == [*titles, "tiny on cuda"]
    assert found[titles[0]][0][4] == "10.50"
    assert [row[4:6] for row in found[titles[1]]] == [["40.00", "1.00"]]
    behind = [(row[1], *row[4:6]) for row in found[titles[2]]]
    assert behind == [("dense", "4.00", "1.00"), ("int4", "7.00", "1.75"), ("int8", "6.00", "1.50")]


def test_two_decimals_of_a_small_model_give_no_ratio(folder):
    lines = [line("20260101000000", 5), line("20260101000000", 10, "int8wo")]
    lines = [re.sub("model_size= *[0-9.]+", "model_size= 0.01", one) for one in lines]
    Path("benchmarks.txt").write_text("\n".join(lines) + "\n")
    assert run().exit_code == 0
    none, int8wo = tables(Path("README.md").read_text())["tiny on cpu"]
    assert none[8:] == ["0.01 GB", "1.00"] and int8wo[8:] == ["0.01 GB", "-"]
    assert int8wo[5] == "2.00"


def test_the_chart(folder):
    run()
    root = ElementTree.parse("docs/benchmarks.svg").getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "3.00 ×" in words and "tiny on cuda" in words and "fp6, not compiled" not in words
    widths = [float(bar.get("width")) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[3] == pytest.approx(3 * widths[1], rel=0.01)  # after the background


def test_check_tells_what_is_stale(folder):
    result = run("--check")
    assert result.exit_code == 1 and "-old" in result.stdout and "stale" in result.stderr
    assert "| `int8wo` | dense" in result.stdout
    assert Path("README.md").read_text() == TEXT and not Path("docs/benchmarks.svg").exists()
    run()
    assert run("--check").exit_code == 0 and run().stdout == ""
    Path("docs/benchmarks.svg").write_text("")
    assert run("--check").exit_code == 1
    run()
    log.append("benchmarks.txt", line("20260201000000", 44, "int8wo"))
    result = run("--check")
    assert (
        result.exit_code == 1
        and "+| `int8wo` | dense | bfloat16 | yes | 44.00 | 4.40" in result.stdout
    )


def test_every_line_of_the_old_log_is_read():
    found = groups([record for _, record in log.read(REFERENCE).records])
    assert {model for _, model in found} == {
        *("Llama-2-7b-chat-hf", "Meta-Llama-3-8B", "Meta-Llama-3.1-8B"),
    }
    llama2 = {row.record.quant: row for row in found["cuda", "Llama-2-7b-chat-hf"]}
    # 170.83 over 107.38 tok/s; fp6 ran in float16, and is compared with bfloat16
    assert llama2["int8wo"].over_full("tok_s") == pytest.approx(1.591, abs=1e-3)
    assert llama2["fp6"].full == llama2["None"].record


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (("--log", "nowhere"), "cannot read 'nowhere'"),
        (("--log", "empty"), "empty holds no line of a run"),
        (("--readme", "nowhere.md"), "cannot read nowhere.md: No such file"),
        (("--readme", "empty"), "empty needs a line"),
        (("--readme", "twice"), "once each"),
        (("--chart", "no/folder.svg"), "cannot write no/folder.svg"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, reason):
    Path("empty").touch()
    Path("twice").write_text(TEXT + TEXT)
    result = run(*arguments)
    assert reason in str(result.exception) and "\n" not in str(result.exception)


def test_this_readme_is_not_stale(monkeypatch):
    monkeypatch.chdir(ROOT)
    result = run("--check")
    assert result.exit_code == 0 and result.exception is None, result.output
