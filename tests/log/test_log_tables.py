"""Tables of a log: which lines they take, and what they make of them."""

import re
from pathlib import Path

import pytest

from quantbench.documents.tables import newest, runs
from quantbench.log.log import read as read_log
from quantbench.log.record import Record
from tests.programs import OLD_LOG


def line(
    date, tok_s, quant="None", mod="tiny", device="cpu", compile=True, kv=False, peak=2.0, more=""
):
    scheme = "" if quant == "None" else f"--quantization {quant} "
    flags = " --compile" * compile + " --kv_cache_quantization" * kv
    repro = f"python generate.py {scheme}--checkpoint_path {mod} --device {device}{flags}{more}"
    size, how = 4 if quant == "None" else 1, (compile, False, "torch.bfloat16", device)
    return Record(date, tok_s, 1, peak, size, quant, mod, kv, *how, repro).render()


LINES = [
    line("20260101000000", 10, peak=4.0),
    line("20260102000000", 30, "int8wo"),
    line("20260101000000", 15, "int8wo"),  # older, though it stands later
    line("20260103000000", 99, "int8wo", more=" --num_layers 1"),
    line("20260101000000", 5, "fp6", compile=False),
    line("20260101000000", 8, kv=True),
    line("20260101000000", 100, device="cuda"),
    line("20260101000000", 50, "fp6", device="cuda"),
    line("20260105000000", 40, more=" --batch_size 8"),
    line("20260107000000", 10, peak=4.0, more=" --batch_size 1"),
]


@pytest.fixture
def folder(in_tmp):
    Path("benchmarks.txt").write_text("title\n" + "\n".join(LINES) + "\n")


def tables(text):
    """By heading, rows of cells."""
    found = {}
    for block in re.split(r"^\*\*", text, flags=re.M)[1:]:
        lines = [line for line in block.splitlines() if line.startswith("|")][2:]
        heading = block.splitlines()[0].replace("**", "")
        found[heading] = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return found


def test_the_newest_lines_of_each_kind(folder):
    text = runs(["benchmarks.txt"])
    found = tables(text)
    assert list(found) == ["tiny on cpu", "tiny on cpu, batch size 8", "tiny on cuda"]
    assert found["tiny on cpu"] == [
        ["`none`", "dense", "bfloat16", "yes", "10.00", "4.00 GB", "4.00 GB"],
        ["`none`", "int8", "bfloat16", "yes", "8.00", "2.00 GB", "4.00 GB"],
        ["`fp6`", "dense", "bfloat16", "no", "5.00", "2.00 GB", "1.00 GB"],
        ["`int8wo`", "dense", "bfloat16", "yes", "30.00", "2.00 GB", "1.00 GB"],
    ]
    caption = text.splitlines()[-1]
    assert "`benchmarks.txt`, 2026-01-01 to 2026-01-07; lines of different days" in caption
    assert "`quantbench replay benchmarks.txt --all`" in caption


def test_every_line_of_the_old_log_is_read():
    found = newest([record for _, record in read_log(OLD_LOG).records])
    models = ("Llama-2-7b-chat-hf", "Meta-Llama-3-8B", "Meta-Llama-3.1-8B")
    assert {heading.split()[0].strip("*") for heading in found} == {*models}
    assert {row.quant for row in found["**Llama-2-7b-chat-hf** on cuda"]} >= {"None", "fp6"}
