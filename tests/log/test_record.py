"""Record against the lines of the real log and a line worked by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantbench.errors import LogError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.log import config_of, problem
from quantbench.log.record import Record
from tests.models.refused import refusal
from tests.programs import OLD_LOG

LINES = [line for line in OLD_LOG.read_text().splitlines() if "tok/s=" in line]
RECORD = Record(
    timestamp="20240831230013",
    tok_s=170.834,
    mem_s=31.184,
    peak_mem=8.95,
    model_size=0.0123,
    quant="int8wo",
    mod="Llama-2-7b-chat-hf",
    kv_quant=False,
    compile=True,
    compile_prefill=False,
    dtype="torch.bfloat16",
    device="cuda",
    repro="python generate.py --quantization int8wo --temperature 0.8",
)
LINE = (
    "20240831230013, tok/s=170.83, mem/s=  31.18 GB/s, peak_mem= 8.95 GB, model_size= 0.01 GB "
    "quant: int8wo, mod: Llama-2-7b-chat-hf, kv_quant: False, compile: True, "
    "compile_prefill: False, dtype: torch.bfloat16, device: cuda "
    "repro: python generate.py --quantization int8wo --temperature 0.8"
)


@pytest.mark.parametrize("line", LINES)
def test_every_reference_line_renders_byte_for_byte(line):
    assert Record.parse(line).render() == line
    assert problem(line) is None


def test_a_line_worked_by_hand():
    assert RECORD.render() == LINE
    rounded = {"tok_s": 170.83, "mem_s": 31.18, "model_size": 0.01}
    assert Record.parse(LINE) == dataclasses.replace(RECORD, **rounded)
    assert config_of(RECORD) == RunConfig(quantization="int8wo")


NUMBERS = st.floats(0, 1e6)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), min_size=1)


@given(*[NUMBERS] * 4, NAMES | st.just("a, mod: b, device: y repro: z"), *[st.booleans()] * 3)
def test_any_record_reads_back_within_its_two_decimals(a, b, c, d, mod, kv_quant, fast, prefill):
    record = dataclasses.replace(
        RECORD,
        **{"tok_s": a, "mem_s": b, "peak_mem": c, "model_size": d, "mod": mod},
        **{"kv_quant": kv_quant, "compile": fast, "compile_prefill": prefill},
    )
    line = record.render()
    back = Record.parse(line)
    assert back.render() == line
    for name in ("tok_s", "mem_s", "peak_mem", "model_size"):
        assert getattr(back, name) == pytest.approx(getattr(record, name), abs=0.005001)
    assert (back.mod, back.kv_quant, back.compile) == (mod, kv_quant, fast)


@pytest.mark.parametrize(
    "change",
    [
        {"tok_s": float("nan")},
        {"mem_s": float("inf")},
        {"peak_mem": -1.0},
        {"timestamp": "2024083123"},
        {"timestamp": "20241331230013"},
        {"mod": "two\nlines"},
        {"mod": "two\u2028lines"},
        {"mod": ""},
        {"mod": "x, kv_quant: True, compile: True, compile_prefill: False, dtype: y"},
        {"mod": "x, kv_quant: y"},
        {"quant": "int8, wo"},
        {"device": "cuda repro: x"},
        {"repro": "python generate.py --prompt 'a\nb'"},
        {"repro": ""},
        {"kv_quant": 1},
    ],
)
def test_what_would_not_read_back_is_refused(change):
    line = refusal(LogError, lambda: dataclasses.replace(RECORD, **change).render())
    assert line.splitlines() == [line]


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("2024083123", "20240831xx", "column 1: expected timestamp"),
        ("20240831", "20240231", "column 1: 20240231230013 is not a date"),
        ("tok/s=170.83", "tok/s=fast", "column 23: expected tok_s, a number with two decimals"),
        ("tok/s=170.83", "tok/s=170.8", "column 23: expected tok_s"),
        (" GB/s,", " MB/s,", "column 44: expected ' GB/s, peak_mem='"),
        ("compile: True", "compile: yes", "expected compile, True or False"),
        ("compile_prefill: False", "compile_prefill: No", "expected compile_prefill, True or"),
        (" repro: ", " repro ", "expected ' repro: '"),
        ("--temperature 0.8", "\r", "control character '\\r'"),
        (" repro: python generate.py --quantization int8wo --temperature 0.8", "", "the end of"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_where(old, new, says):
    line = LINE.replace(old, new)
    assert says in refusal(LogError, Record.parse, line) and says in problem(line)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("mem/s=  31.18", "mem/s=31.18", "column 37: '31.18 GB/s, peak_mem= 8.' is written '  31."),
        ("ture 0.8", "ture 0.8 --sparsity semi", "repro line: no such option: '--sparsity'"),
        ("ture 0.8", "ture 0.8 --prompt 'open", "repro line: the quote opened"),
        ("generate.py", "eval.py", "does not start with python generate.py"),
    ],
)
def test_a_line_that_parses_can_still_be_bad(old, new, says):
    line = LINE.replace(old, new)
    Record.parse(line)
    assert says in problem(line)


def test_a_repro_line_not_understood_is_a_usage_error():
    with pytest.raises(UsageError):
        config_of(dataclasses.replace(RECORD, repro="python"))
