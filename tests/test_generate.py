"""The command: what it prints and logs, and its one error line when it cannot run."""

import json
import os
import re
import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
import sentencepiece
import torch

from quantbench import devices
from quantbench.log.config import split
from quantbench.log.log import read as read_log
from quantbench.log.options import parse
from quantbench.log.record import NO_COUNTER, Record
from quantbench.models.loading import load_model
from quantbench.ops.cpu import build
from quantbench.run.loading import Loading
from tests import fake_counter, seeds
from tests.programs import OLD_LOG, ROOT, command, started
from tests.refusals import one_line

TINY = ROOT / "models" / "tiny"
SHORT = ["--num_samples", "2", "--max_new_tokens", "5"]


def run(*arguments, code=0, **options):
    """What the command prints, and that it ends with this code."""
    result = command("generate", *arguments, **options)
    assert result.exit_code == code, (arguments, result.output)
    return result


def detailed(*arguments):
    """What the command writes as JSON, and what it prints."""
    result = run(*arguments, "--output_json_path", "runs.jsonl")
    (details,) = map(json.loads, Path("runs.jsonl").read_text().splitlines())
    return details, result


# ---------------------------------------------------------------------------------- runs


def test_a_run_appends_one_line_that_repeats_it(in_tmp):
    first = run(*SHORT, "--quantization", "int8wo", "--prompt", "def f(x):")
    assert "def f(x):" in first.stdout and "int8wo" in first.stdout
    (_, record), *others = read_log("benchmarks.txt").records
    assert not others and record.quant == "int8wo" and record.mod == "tiny"
    again = run(*split(record.repro)[2:])
    assert len(read_log("benchmarks.txt").records) == 2
    assert again.stdout.split("scheme")[0] == first.stdout.split("scheme")[0]  # the same text


def test_the_json_holds_what_the_line_was_made_of(in_tmp):
    details, result = detailed(*SHORT, "--batch_size", "3", "--cache_size", "1000")
    lines = result.stderr.splitlines()
    # 5 · 2 · 4 heads · 1000 · 64 · 2 bytes · 3 rows
    told = "Weights: 12.72 MB; KV cache: 15.36 MB, dense, 1000 positions, batch 3"
    assert lines.count("Each text starts with <s> (id 1)") == 1
    assert lines.index(told) < next(i for i, line in enumerate(lines) if "Loading" in line)
    record = Record.parse(Path("benchmarks.txt").read_text().splitlines()[0])
    samples = details["samples"]
    for sample in samples:
        seconds = sample["prefill_seconds"] + sample["decode_seconds"]
        assert sample["tok_s"] == pytest.approx(5 / seconds)
        assert sample["decode_tok_s"] == pytest.approx(4 / sample["decode_seconds"])
    mean = sum(sample["tok_s"] for sample in samples) / 2
    assert record.tok_s == pytest.approx(mean, abs=0.01)
    assert details["tok_s_all_rows"] == pytest.approx(3 * mean)
    # 5 layers of (768 + 256 + 1536 + 768) · 256, the output's 4096 · 256 and 11 norms of 256
    weights = 2 * (5 * (768 + 256) * 256 + 5 * 3 * 768 * 256 + 4096 * 256 + 11 * 256)
    assert details["weight_bytes"] == weights
    assert record.mem_s == pytest.approx(mean * weights / 1e9, abs=0.01)
    assert details["kv_cache_bytes"] == 5 * 2 * 3 * 1000 * 256 * 2
    peaks = details["peak_memory_bytes"]
    assert set(peaks) == {"load", "warm_up", "generate"}
    assert record.peak_mem == pytest.approx(peaks["generate"]["resident"] / 1e9, abs=0.01)
    assert 0 < details["first_token_s"] < details["first_steps_s"]
    assert details["kernel"] == "cpu" and details["versions"]["torch"] == version("torch")
    assert f"{mean:.2f}" in result.stdout


def test_the_json_has_the_energy_of_a_sample_or_why_not(in_tmp, monkeypatch):
    """Two samples between two looks: 1.5 J each, for 3 rows of 5 new tokens, and the
    idle machine takes nothing."""
    words = (*SHORT, "--output_json_path", "runs.jsonl", "--write_result", "none")
    with monkeypatch.context() as patched:
        fake_counter.install(patched)
        run(*words, "--batch_size", "3")
    monkeypatch.setattr("quantbench.run.energy.POWERCAP", Path("/none"))
    run(*words)
    assert not Path("benchmarks.txt").exists()
    counted, alone = map(json.loads, Path("runs.jsonl").read_text().splitlines())
    assert counted["joules_per_token"] == pytest.approx(1.5 / 15)
    used = counted["energy"]
    assert used.pop("seconds") > 0
    assert used == {"counter": "a fake", "joules": 1.5, "idle_watts": 0.0, "repeats": 2}
    assert len(counted["samples"]) == 2
    assert alone["joules_per_token"] is None
    assert alone["energy"] == {"why_not": f"{NO_COUNTER} (there is no RAPL counter in /none)"}


def test_compiled_run_as_the_old_log_has_it(in_tmp, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the repro would name the threads
    line = (
        "python generate.py --quantization int8wo --checkpoint_path tiny --device cpu "
        "--precision torch.bfloat16 --compile --compile_prefill --num_samples 1 "
        "--max_new_tokens 20 --top_k 200 --temperature 0.8 --num_layers 1"
    )
    result = run(*split(line)[2:])
    assert "Compiling" in result.stderr and "ppended one line" in result.stderr
    assert re.search(r"to the first token: [\d.]+ s; to token 3, compilation", result.stderr)
    record = Record.parse(Path("benchmarks.txt").read_text().splitlines()[0])
    # A step is one op, which is not compiled; the repro keeps the options.
    assert not record.compile and record.compile_prefill and record.repro == line


def test_old_commands_run(in_tmp, monkeypatch):
    """Some of the log's, drawn anew in every run: made small, on the CPU, and not compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp))  # of autoquant
    commands = set()
    for _, record in read_log(str(OLD_LOG)).records:
        words = split(record.repro)[2:]
        for option, value in (("--checkpoint_path", "tiny"), ("--device", "cpu"),
                              ("--num_samples", "1"), ("--max_new_tokens", "3")):  # fmt: skip
            words[words.index(option) + 1] = value
        commands.add(" ".join(word for word in words if not word.startswith("--compile")))
    for words in seeds.sample(sorted(commands), 8):
        run(*words.split())
        _, record = read_log("benchmarks.txt").records[-1]
        for option in ("--kv_cache_quantization", "--linear_causal_mask"):
            assert (option in record.repro) == (option in words)
        assert record.kv_quant == ("--kv_cache_quantization" in words)


def test_autoquant_shows_what_it_chose_from(in_tmp):
    result = run(*SHORT, "--quantization", "autoquant")
    for part in ("768 × 256 (layers.0.attention.wqkv)", "int8wo", "dB", "µs", "chosen"):
        assert part in result.stderr


def test_a_deep_context_is_recorded_and_repeated(in_tmp):
    options = ["--context_depth", "300", "--prefill_chunk", "4", "--kv_cache", "int4"]
    details, result = detailed(*SHORT, *options, "--prefill_size", "9")
    assert "Filling 300 positions" in result.stderr
    assert result.stdout.startswith("scheme")  # what follows a random context is not shown
    record = Record.parse(Path("benchmarks.txt").read_text().splitlines()[0])
    assert record.kv_quant
    config = parse(split(record.repro)[2:])
    assert (config.context_depth, config.prefill_chunk, config.kv_cache) == (300, 4, "int4")
    assert details["cache_size"] == 300 + 9 + 5
    # 5 layers of keys and values, 4 heads of 64: half a byte a number, and 2 bytes for every 32
    assert details["kv_cache_bytes"] == 5 * 2 * 4 * 314 * (32 + 2 * 2)
    assert details["kv_cache"] == "int4" and details["attention_kernel"] in ("cpu", "torch")
    run(*split(record.repro)[2:])
    assert read_log("benchmarks.txt").records[1][1].repro == record.repro


def test_what_does_not_fit_is_not_loaded(in_tmp, monkeypatch):
    """12.72 MB of weights, 2560 bytes · 2 a position: 1000 of them fit."""
    loaded = []
    monkeypatch.setattr(devices, "free_memory", lambda device: 12_716_032 + 1000 * 5120 + 5119)
    monkeypatch.setattr(Loading, "load", lambda *_: loaded.append(1))
    result = run(*SHORT, "--cache_size", "1001", code=1)
    assert not loaded and not Path("benchmarks.txt").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: out of memory: weights of 12.72 MB and a KV cache of 5.13 MB")
    assert "--cache_size 1000 is the largest that fits" in line


def test_without_a_compiler_it_runs_and_says_what_it_runs_on(in_tmp, monkeypatch):
    monkeypatch.setenv("CXX", "nonexistent")
    monkeypatch.setattr(build, "load", build.load.__wrapped__)
    monkeypatch.setattr(build, "refusal", build.refusal.__wrapped__)
    details, result = detailed(*SHORT)
    (line,) = [line for line in result.stderr.splitlines() if "which is slow" in line]
    assert "plain torch" in line
    assert "which is slow: the C++ kernels need a C++ compiler: $CXX is 'nonexistent'" in line
    assert (details["attention_kernel"], details["decoder"]) == ("torch", "modules")


def test_a_dummy_needs_no_tokenizer(in_tmp):
    model = f"dummy:{TINY / 'config.json'}"
    result = run(*SHORT, "--checkpoint_path", model, "--precision", "float16")
    assert read_log("benchmarks.txt").records[0][1].dtype == "torch.float16"
    assert result.stdout.startswith("scheme")  # what random weights write is not shown


@pytest.mark.parametrize(
    "options, decoder, reason",
    [
        ("", "cpu-step", None),
        ("--quantization bnb-nf4 --kernel bitsandbytes", "modules",
         "layers.0.attention.wqkv is a FourBitLinear, which has no C++ kernel"),
        ("--quantization float8dq-row", "modules",
         "layers.0.attention.wqkv rounds activations to float8-row outside of its C++ kernel"),
        ("--kv_cache int4 --batch_size 2", "cpu-step", None),
        ("--batch_size 17", "modules", "there are 17 rows, and the op is for 16 at most"),
    ],
)  # fmt: skip
def test_the_decoder_that_ran_is_recorded(in_tmp, options, decoder, reason):
    short = ["--num_samples", "1", "--max_new_tokens", "3", "--num_layers", "1"]
    details, result = detailed(*short, *options.split())
    assert (details["decoder"], details["decoder_reason"]) == (decoder, reason)
    assert decoder in result.stdout.splitlines()[-1]
    named = ("--decoder", "cpu-step", "--write_result", "none")
    last = run(*short, *options.split(), *named, code=1 if reason else 0).stderr.splitlines()[-1]
    assert not reason or last == f"error: --decoder cpu-step: {reason}; auto takes what can run"


def test_profiles_are_traces(in_tmp):
    result = run(*SHORT, "--profile", "trace.json", "--memory_profile", "memory.json")
    trace, memory = (json.loads(Path(f).read_text()) for f in ("trace.json", "memory.json"))
    assert any("quantbench::" in event.get("name", "") for event in trace["traceEvents"])
    five = result.stderr.split("operation", 1)[1].splitlines()[1:6]
    assert len(five) == 5
    assert all(re.search(r" \d+  +[\d.]+ ms +\d+%$", line) for line in five)
    assert any(event.get("name") == "[memory]" for event in memory["traceEvents"])


def test_a_conversation_shows_its_speed_and_begins_anew(in_tmp):
    """After /reset the same line gets the same answer as at first: nothing of the first is left."""
    result = run("--interactive", "--temperature", "0", "--max_new_tokens", "12",
                 input="def read(path):\n/reset\ndef read(path):\n/what\n/quit\nx")  # fmt: skip
    first, *others = result.stdout.split("> ")[1:]
    assert others[1] == first.rstrip("\n") + "\n" or others[1] == first
    cut = "cut off by --max_new_tokens 12"
    assert len(re.findall(rf"^12 tokens, the first after [\d.]+ s, then [\d.]+ tok/s; {cut}$",
                          result.stderr, re.M)) == 2  # fmt: skip
    assert result.stderr.count("/reset forgets the conversation, /help shows this") == 2
    assert not Path("benchmarks.txt").exists()


def test_a_chat_of_two_turns_is_its_whole_text_at_once(in_tmp):
    """Llama 2's format, written out by hand, without a cache: the answers must be the same."""
    shutil.copytree(TINY, "Llama-2-7b-chat-hf", ignore=lambda *_: ["__pycache__"])
    options = ["--interactive", "--temperature", "0", "--max_new_tokens", "9"]
    chat = run(*options, "--checkpoint_path", "Llama-2-7b-chat-hf", "--precision", "float32",
               input="def read(path):\nclass Reader:\n")  # fmt: skip

    tokenizer = sentencepiece.SentencePieceProcessor(str(TINY / "tokenizer.model"))
    model, ids, answers = load_model("tiny"), [], []
    for message in ("def read(path):", "class Reader:"):
        prompt = f"[INST] {message} [/INST]"
        begin = len(ids)
        ids += [1, *tokenizer.encode(prompt)]
        answer = []
        while len(answer) < 9 and answer[-1:] != [2]:
            answer.append(int(model(torch.tensor([ids + answer]))[0, -1].argmax()))
        answers.append(tokenizer.decode([token for token in answer if token != 2]))
        ids[begin:] = [1, *tokenizer.encode(f"{prompt} {answers[-1].strip()} "), 2]
    assert chat.stdout == f"> {answers[0]}\n> {answers[1]}\n> "


def test_a_conversation_ends_when_the_context_is_full(in_tmp):
    result = run("--interactive", "--cache_size", "24", "--max_new_tokens", "15",
                 input="def read(path):\n" * 5)  # fmt: skip
    assert "The context is full: it has 24 positions; --cache_size" in result.stderr


# ---------------------------------------------------------------------------------- bad input


@pytest.fixture
def broken(in_tmp):
    """Damaged checkpoints, and a log that must stay as it is."""
    Path("benchmarks.txt").write_text(OLD_LOG.read_text())

    def copied(name, *without):
        return shutil.copytree(TINY, name, ignore=lambda *_: ["__pycache__", *without])

    os.truncate(f"{copied('truncated')}/model.safetensors", 100_000)
    copied("without_tokenizer", "tokenizer.model")
    Path("short.txt").write_text("a = 1")
    return in_tmp


# What depends on the machine, or is found while the model loads; messages.txt has all else.
BAD = [  # arguments, exit code, what the line says
    ("--quantization sparse-marlin-wanda --calibration_text short.txt", 2, "tokens are too few"),
    ("--device tpu", 2, "--device 'tpu' is"),
    pytest.param("--device cuda", 2, "torch finds no cuda here; use auto, cpu",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")),
    ("--checkpoint_path truncated", 1, "model.safetensors is damaged"),
    ("--checkpoint_path without_tokenizer", 1, "tokenizer.model"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, code, message", BAD)
def test_bad_input_is_one_line_and_no_log(broken, monkeypatch, arguments, code, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run(*arguments.split(), code=code)
    assert message in one_line(result)
    assert Path("benchmarks.txt").read_text() == OLD_LOG.read_text()


def test_an_interrupt_is_one_line_and_no_log(broken):
    run = started(ROOT / "generate.py", "--num_samples", "100000", cwd=broken)
    while "Sample 1 of 100000" not in (line := run.stderr.readline()):
        assert line, "ended before the first sample"
    run.send_signal(signal.SIGINT)
    _, rest = run.communicate(timeout=300)
    assert run.returncode == 130
    assert rest.splitlines()[-1] == "error: interrupted; nothing was logged"
    assert Path("benchmarks.txt").read_text() == OLD_LOG.read_text()
