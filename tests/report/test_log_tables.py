"""Tables of a log: which lines they take, and what they make of them."""

import json
import re
from pathlib import Path

import pytest

from quantbench.log.reading import read as read_log
from quantbench.report.doc_tables import runs
from quantbench.report.log_tables import groups

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "data" / "torchao_llama_log.txt"


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


ABOUT = {"command": "c", "date": "2026-01-01", "commit": None, "machine": "m", "versions": {}}
ROW = {"numerics": "", "plain": "", "gguf": "", "tokens": 78541}
QUALITY = [
    ROW | {"scheme": "none", "ratio": 1.0},
    ROW | {"scheme": "int8wo", "ratio": 1.00019},
    ROW | {"scheme": "bnb-int8", "why_not": "not installed"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("benchmarks.txt").write_text("title\n" + "\n".join(LINES) + "\n")
    Path("quality.json").write_text(json.dumps({"about": ABOUT, "rows": QUALITY}))
    return tmp_path


def tables(text):
    """By heading, rows of cells."""
    found = {}
    for block in re.split(r"^\*\*", text, flags=re.M)[1:]:
        lines = [line for line in block.splitlines() if line.startswith("|")][2:]
        heading = block.splitlines()[0].replace("**", "")
        found[heading] = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return found


def test_the_newest_lines_against_full_precision(folder):
    found = tables(runs(["benchmarks.txt", "quality.json"]))
    assert list(found) == ["tiny on cpu", "tiny on cuda"]
    scheme, speeds = (
        [row[0] for row in found["tiny on cpu"]],
        [row[4] for row in found["tiny on cpu"]],
    )
    assert scheme == ["`none`", "`none`", "`fp6`", "`int8wo`"]
    assert speeds == ["10.00", "8.00", "5.00", "30.00"]
    none, quantized_cache, not_compiled, int8wo = found["tiny on cpu"]
    assert none[5:] == ["1.00", "4.00 GB", "1.00", "4.00 GB", "1.00", "1"]
    assert int8wo[5:] == ["3.00", "2.00 GB", "0.50", "1.00 GB", "0.25", "1.0002"]
    assert quantized_cache[1] == "int8" and quantized_cache[5] == "0.80"
    assert not_compiled[3] == "no" and not_compiled[5] == "-"  # no such full precision
    assert not_compiled[-1] == "-"  # fp6's quality was not measured
    assert found["tiny on cuda"][1][5] == "0.50"


def test_the_caption_says_of_which_days_and_what_perplexity_is(folder):
    caption = runs(["benchmarks.txt", "quality.json"]).splitlines()[-1]
    assert "`benchmarks.txt`, 2026-01-01 and 2026-01-02; the device is as the line says" in caption
    assert "days or machines are not to be compared" in caption
    assert "on 78,541 tokens (`quality.json`), whatever the cache" in caption
    assert "`quantbench replay benchmarks.txt --all`" in caption


def test_other_work_is_another_table(folder):
    """A step with a long context, or one of a larger batch, is not compared with an ordinary one;
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
    found = tables(runs(["benchmarks.txt", "quality.json"]))
    titles = [
        "tiny on cpu",
        "tiny on cpu, batch size 8",
        "tiny on cpu, with 65536 tokens in the context",
    ]
    assert list(found) == [*titles, "tiny on cuda"]
    assert found[titles[0]][0][4] == "10.50"
    assert [row[4:6] for row in found[titles[1]]] == [["40.00", "1.00"]]
    behind = [(row[1], *row[4:6]) for row in found[titles[2]]]
    assert behind == [("dense", "4.00", "1.00"), ("int4", "7.00", "1.75"), ("int8", "6.00", "1.50")]


def test_two_decimals_of_a_small_model_give_no_ratio(folder):
    lines = [line("20260101000000", 5), line("20260101000000", 10, "int8wo")]
    lines = [re.sub("model_size= *[0-9.]+", "model_size= 0.01", one) for one in lines]
    Path("benchmarks.txt").write_text("\n".join(lines) + "\n")
    none, int8wo = tables(runs(["benchmarks.txt", "quality.json"]))["tiny on cpu"]
    assert none[8:10] == ["0.01 GB", "1.00"] and int8wo[8:10] == ["0.01 GB", "-"]
    assert int8wo[5] == "2.00"


def test_every_line_of_the_old_log_is_read():
    found = groups([record for _, record in read_log(REFERENCE).records])
    assert {model for _, model in found} == {
        *("Llama-2-7b-chat-hf", "Meta-Llama-3-8B", "Meta-Llama-3.1-8B"),
    }
    llama2 = {row.record.quant: row for row in found["cuda", "Llama-2-7b-chat-hf"]}
    # 170.83 over 107.38 tok/s; fp6 ran in float16, and is compared with bfloat16
    assert llama2["int8wo"].over_full("tok_s") == pytest.approx(1.591, abs=1e-3)
    assert llama2["fp6"].full == llama2["None"].record
