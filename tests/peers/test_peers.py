"""quantbench peers: llama.cpp's file, Hugging Face's double, the figures, refusals."""

import dataclasses
import importlib.util
import json
import math
import random
import re
import signal
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quantbench.bench.answers import Reading, TurnTime
from quantbench.bench.store import ArmResult, Bandwidth, Results, Settings, Turn
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.models.formats import open_checkpoint
from quantbench.models.formats.gguf_blocks import q6_k
from quantbench.models.loading import load_config, load_model
from quantbench.peers import plan
from quantbench.peers.answer import peer_rows
from quantbench.peers.arms import make_arms, of_runtimes, seconds_before
from quantbench.peers.commands import peers
from quantbench.peers.gguf_file import check, weight_bytes, write
from quantbench.peers.runtimes import (
    LlamaServer,
    PeerWork,
    Stepwise,
    TransformersRuntime,
    hugging_face,
)
from quantbench.peers.tables import PEERS, peer_remarks
from quantbench.peers.worker import PeerWorker
from quantbench.report.columns import aligned
from tests.bench.facts import arm_facts, peer_facts
from tests.models.refused import refusal
from tests.models.small import small_checkpoint
from tests.programs import command, json_of
from tests.refusals import one_line

ROTATIONS = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
ROTATIONS |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
QWEN |= {"moe_intermediate_size": 256, "intermediate_size": 256}
QWEN |= {"norm_topk_prob": True, "rope_scaling": None}
TIED = {"tie_word_embeddings": True}
PUBLISHED = ROTATIONS | {"original_max_position_embeddings": 8192}


def checkpoint(folder, **changes):
    own = {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    return small_checkpoint(folder, **own | {"rope_scaling": ROTATIONS} | changes)


# ------------------------------------------------------------------------------------ the file


def test_q6_k_is_what_the_package_reads():
    """Half a step of each group's own scale is what rounding may cost: a thirty-second of its
    largest weight is a step; an eighth more for scales that were rounded to eight bits themselves,
    and for the largest weight of the other sign, which stops at 31 steps."""
    numbers = np.random.default_rng(3).standard_normal((6, 512)).astype(np.float32)
    numbers[0] = 0
    numbers[1] *= 1e-2
    numbers[2, ::7] *= 30  # outliers
    numbers[3, :16] = 0  # a group of nothing among others
    bytes_ = q6_k(numbers)
    assert bytes_.shape == (6, 2 * 210) and bytes_.dtype == np.uint8
    found = gguf.quants.dequantize(bytes_, gguf.GGMLQuantizationType.Q6_K)
    groups, error = numbers.reshape(-1, 16), np.abs(found - numbers).reshape(-1, 16)
    step = np.abs(groups).max(1, keepdims=True) / 32
    in_block = np.abs(numbers.reshape(-1, 256)).max(1).repeat(16)[:, None] / 32
    # A group much weaker than its block's strongest has a scale of few of 127 steps.
    allowed = np.maximum(step * 1.125, 0) + in_block / 127 / 2 * 32
    assert (error <= allowed).all()
    assert (found[0] == 0).all() and (found[3, :16] == 0).all()


def test_q6_k_of_numbers_it_can_hold():
    """Whole numbers from -32 to 31 with a -32 in every group: nothing is lost. Those between two
    of them go to the nearer one."""
    numbers = np.random.default_rng(0).integers(-32, 32, (3, 256)).astype(np.float32)
    numbers[:, ::16] = -32
    between = np.where((numbers > -32) & (numbers < 31), numbers + np.float32(0.4), numbers)
    for given in (numbers, between):
        found = gguf.quants.dequantize(q6_k(given * 127), gguf.GGMLQuantizationType.Q6_K)
        assert (found == numbers * 127).all()


# Largest error of a weight, over the largest weight of its row: half a step of 127, and what the
# scale, a float16, is off by (2^-11 of it, times 127); of bfloat16 nothing, dummy weights being
# that, of float16 those of numbers below its normal ones; Q6_K as above; Q4_0's largest weight of
# the other sign stops at 7 of 8 steps: a whole one.
ERRORS = {
    "BF16": 0,
    "F16": 2**-16,
    "Q8_0": 0.5 / 127 + 2**-11,
    "Q6_K": 1.125 / 32 + 2**-11,
    "Q4_0": 1 / 8 + 2**-9,
}


@pytest.mark.parametrize(
    "changes", [{}, EXPERTS, QWEN, TIED], ids=lambda changes: str(len(changes))
)
def test_a_file_read_back_is_the_model(changes, tmp_path):
    """Read by models/formats/gguf.py, whose tests compare it with files of llama.cpp's own."""
    form = random.choice([form for form in ERRORS if changes is not QWEN or form != "Q6_K"])
    name, path = checkpoint(tmp_path, **{"rope_scaling": PUBLISHED} | changes), tmp_path / "m.gguf"
    write(path, name, form)
    ours, config = load_config(name), load_config(str(path))
    assert dataclasses.replace(config, name=ours.name, norm_eps=ours.norm_eps) == ours
    model, found = load_model(name, precision=torch.bfloat16), load_model(str(path))
    weights = dict(found.named_parameters())
    for part, weight in model.named_parameters():
        exact, read = weight.float(), weights[part]
        is_matrix = weight.dim() == 2 and "router" not in part
        limit = exact.abs().amax(-1, keepdim=True) * (ERRORS[form] if is_matrix else 0)
        assert ((read - exact).abs() <= limit).all(), part
    tensors = gguf.GGUFReader(path).tensors
    types = {t.tensor_type.name for t in tensors if t.data.ndim > 1 and "inp" not in t.name}
    assert types == {form}
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in tensors}
    assert ("output.weight" in sizes) == (changes is not TIED)
    table = 0 if changes is TIED else sizes["token_embd.weight"]
    experts = sum(size for tensor, size in sizes.items() if "_exps" in tensor)  # two of four
    assert weight_bytes(path) == sum(sizes.values()) - table - experts // 2


@pytest.mark.parametrize(
    ("changes", "form", "said"),
    [
        ({"intermediate_size": 500}, "Q8_0", "Q8_0 takes rows of a multiple of 32; .* has 500"),
        ({"intermediate_size": 544}, "Q6_K", "Q6_K takes rows of a multiple of 256; .* has 544"),
        ({"attention_bias": True}, "BF16", "has qkv_bias"),
        ({"model_type": "qwen3", "head_dim": 32, "rope_scaling": None}, "BF16", "has qk_norm"),
    ],
)
def test_what_cannot_be_written(changes, form, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        check(load_config(checkpoint(tmp_path, **changes)), form)


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("quantbench.peers.gguf_file.load_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PeerWorker().write_file(str(tmp_path / "m.gguf"), checkpoint(tmp_path), "BF16", None)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# -------------------------------------------------------------------------------- the runtimes


def test_hugging_face_has_our_weights(tmp_path):
    """bfloat16 keeps 8 bits of every sum: 2 % of the largest logit for two layers of them."""
    name = checkpoint(tmp_path)
    tokens = torch.randint(320, (1, 90))  # beyond the original context of 64
    theirs = hugging_face(name, None)(tokens).logits.float()
    ours = load_model(name, precision=torch.bfloat16)(tokens).float()
    assert (theirs - ours).abs().max() <= 0.02 * ours.abs().max()


@pytest.mark.parametrize("rows", [1, 3])
def test_hugging_face_decodes_as_it_reads(tmp_path, rows):
    work = PeerWork("transformers", 8, 4, 1, checkpoint(tmp_path), rows=rows)
    runtime = TransformersRuntime(work, headroom=0)
    tokens = [5, 300, 17, 42, 42, 8]
    runtime.begin()
    runtime.next(tokens[:3])
    for token in tokens[3:]:
        runtime.next([token])
    stepwise = runtime.logits
    runtime.begin()
    runtime.next(tokens)
    assert (stepwise - runtime.logits).abs().max() <= 0.02 * stepwise.abs().max()


# -------------------------------------------------------------------------------- the figures


def compared(step=1.0, prompt=1.0, cycles=12):
    """Ours, at 1 s a step and a prompt of 1 s, and a peer."""
    arms = [ArmResult("none", "", []), ArmResult("llama.cpp Q8_0", "", [])]
    results = Results(Settings(), arms)
    arms[0].facts = arm_facts(prompt_tokens=128, kv_cache_bytes=0)
    arms[1].facts = peer_facts(weight_bytes=5_000_000)
    for cycle in range(cycles):
        results.apply(Bandwidth("cpu", Reading(1e9, cycle, "fake")))
        for arm, seconds in enumerate((1.0, step)):
            results.apply(Turn(arm, 0, cycle, "decode", 4, 4 * seconds))
        for arm, seconds in enumerate((1.0, prompt)):
            results.apply(Turn(arm, 0, cycle, "prompt", 128, seconds))
    return results


def test_ratios_by_hand():
    """Ours: 1 s a step and a prompt of 1 s. Theirs: 1.5 s a step, 0.5 s for a prompt of 128.
    Weights of 10 and 5 MB at 1 GB/s: 1 % and 0.33 % of the limit."""
    (row,) = peer_rows("int8wo", compared(step=1.5, prompt=0.5))
    assert row.decode_ours_tok_s == pytest.approx(1) and row.cycles == 12
    assert row.decode_theirs_tok_s == pytest.approx(1 / 1.5)
    assert row.prompt_theirs_tok_s == pytest.approx(256)
    for found, ratio in ((row.decode_ratio, 1.5), (row.prompt_ratio, 0.5)):
        assert found.value == pytest.approx(ratio) and found.low < ratio < found.high
    assert row.ours_limit_share == pytest.approx(0.01)
    assert row.theirs_limit_share == pytest.approx(0.005 / 1.5)
    shown = aligned(PEERS, [row])
    (_, ours, *_) = peer_remarks([row], [compared()], 2)
    assert ours.startswith("none: activations and cache in bfloat16; kernel ")
    assert "1.500 (1." in shown and " 256.00 " in shown


def test_a_peer_that_fails_is_told():
    results = compared(cycles=0)
    results.arms[1].failed = "out of memory"
    (row,) = peer_rows("int8wo", results)
    assert row.failed == "out of memory" and row.decode_ratio is None
    assert "llama.cpp Q8_0: failed: out of memory" in peer_remarks([row], [], 2)
    assert "-" in aligned(PEERS, [row])
    (well,) = peer_rows("fp6", compared())
    peers.check([well])
    assert refusal(QuantbenchError, peers.check, [well, row]) == (
        "1 of 2 comparisons failed (int8wo against llama.cpp Q8_0): out of memory; leave out what "
        "failed with --schemes or --runtimes"
    )


# ---------------------------------------------------------------------------------- the worker


@pytest.fixture
def worker(monkeypatch):
    """A worker of a runtime without a model: reading 5 tokens takes 5 s, and a step 1 s."""
    worker, clock = PeerWorker(), [0.0]
    monkeypatch.setattr("quantbench.peers.runtimes.time.perf_counter", lambda: clock[0])

    class Runtime(Stepwise):
        begun, read, tokens = 0, [], [1, 2, 3, 4, 5]

        def begin(self):
            self.begun, self.read = self.begun + 1, []

        def next(self, tokens):
            clock[0] += len(tokens)
            self.read += tokens
            assert len(self.read) <= 5 + worker.work.new  # that there is room for
            return 100 + len(self.read)

    worker.work, worker.runtime = PeerWork("llama.cpp", 5, 10, 1, "tiny"), Runtime()
    worker.runtime.work = worker.work
    return worker


def test_turns_of_a_peer_go_on_and_begin_again_behind_the_prompt(worker):
    runtime = worker.runtime
    assert worker.turn("prompt", 0) == TurnTime(5, 5.0)
    for turn in range(2):  # of five tokens each, of which the first does not count
        assert worker.turn("decode", 4) == TurnTime(4, 4.0)
        assert len(runtime.read) == 5 + 5 * (turn + 1)
    assert runtime.read[5:] == [105 + n for n in range(10)]  # each token follows the last one
    assert worker.turn("decode", 4) == TurnTime(4, 4.0)
    assert runtime.begun == 2 and len(runtime.read) == 10
    steps = random.randint(1, 9)
    for _ in range(20):  # never beyond the room
        assert worker.turn("decode", steps).seconds == steps


def test_a_sample_of_a_peer(worker):
    """A prompt of 5 s and nine steps; the first step's seconds are left out."""
    sample = worker.sample(0)
    assert (sample.prefill_seconds, sample.decode_seconds) == (5.0, 9.0)
    assert sample.token_seconds == [1.0] * 8 and sample.tok_s == 10 / 14


# ------------------------------------------------------------------- programs that a user names


def program(tmp_path, text):
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return str(path)


SERVER = """
    import http.server, json, sys, threading, time
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())
        def do_GET(self):
            self.answer({})
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert "--log-disable" in sys.argv  # or it leaves a file
            assert ("-rtr" in sys.argv) == (asked["prompt"][0] < 5)  # ik_llama.cpp's alone
            rows.wait()  # for a request of every row
            time.sleep(0.05 * len(asked["prompt"]))
            made = asked["n_predict"] - (len(asked["prompt"]) == 1)
            late = asked["id_slot"] == rows.parties - 1
            times = {"prompt_n": 3, "predicted_n": made}
            times["predicted_ms"] = (500.0 if late else 700.0) * (made - 1)
            self.answer({"timings": times})
        def log_message(self, *_): pass
    rows, at = threading.Barrier(int(given["-np"])), (given["--host"], int(given["--port"]))
    http.server.ThreadingHTTPServer(at, Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("server", "count", "made"),
    [("llama.cpp", 1, "made 1 tokens of 2"), ("ik_llama.cpp", 3, "made 7 tokens of 8")],
)
def test_a_server_of_rows(tmp_path, server, count, made):
    """It takes 50 ms for a token of the prompt, and reports 500 ms a step of the last row, 700 ms
    of the others."""
    name, file = checkpoint(tmp_path), tmp_path / "model.gguf"
    write(file, name, "BF16")
    given = {"file": str(file), "program": program(tmp_path, SERVER)}
    runtime = LlamaServer(PeerWork(server, 3, 8, 4, name, rows=count, **given), headroom=0)
    try:
        first = 4 if server == "ik_llama.cpp" else 5
        runtime.tokens = [first, 6, 7]
        assert runtime.vocab == 320 and runtime.weight_bytes == weight_bytes(file)
        assert runtime.prompt() >= 0.15
        assert runtime.decode(3) == pytest.approx([0.5] * 3)
        runtime.tokens = [first]
        with pytest.raises(QuantbenchError, match=made):
            runtime.decode(1)
        runtime.tokens = [first, 6, 7, 8]
        with pytest.raises(QuantbenchError, match="had kept the prompt: it read 3 of it"):
            runtime.prompt()
    finally:
        runtime.server.kill()
        runtime.server.wait()
    given["program"] = program(tmp_path, "raise SystemExit(7)")
    with pytest.raises(QuantbenchError, match="ended with exit code 7 for .*model.gguf"):
        LlamaServer(PeerWork(server, 3, 8, 4, name, **given), headroom=0)


def test_every_token_of_a_written_file_is_text(tmp_path):
    """A server answers text, and refuses what is no UTF-8."""
    write(tmp_path / "model.gguf", checkpoint(tmp_path), "BF16")
    tokenizer = open_checkpoint(str(tmp_path / "model.gguf")).tokenizer(320)
    texts = [tokenizer.decode([token]) for token in range(1, 320)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts) and len(set(texts)) == 319


# -------------------------------------------------------------------------------- the command


run = partial(command, "peers")


def test_without_the_packages(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run()
    assert result.exit_code == 2 and "pip install '.[peers]'" in one_line(result)


def test_what_the_time_did_not_suffice_for_is_named(tmp_path, monkeypatch):
    partly = compared()
    partly.arms[1].name, partly.ended = "transformers", "max_minutes"
    partly.arms.append(ArmResult("transformers, compiled", "", []))
    monkeypatch.setattr(plan.peered, "measure", lambda *_: partly)
    given = ["--schemes", "none", "--runtimes", "transformers", "--threads", "1"]
    done = run("--checkpoint_path", checkpoint(tmp_path), *given)
    assert done.exit_code == 0
    left_out = "not compared: none against transformers, compiled"
    assert f"--max_minutes was reached\n{left_out}\n" in done.stdout
    (row,) = re.findall(r"^none .*", done.stdout, re.M)  # of two
    assert re.search(r" [\d.]+%? / ", row)


def test_peers_on_a_small_model(tmp_path):
    """The whole command, with its workers, against transformers."""
    given = ["--checkpoint_path", checkpoint(tmp_path, num_hidden_layers=1), "--schemes", "none"]
    given += ["--threads", "1"]
    given += ["--runtimes", "transformers", "--prefill_size", "16", "--max_new_tokens", "4"]
    given += ["--cycles", "2", "--processes", "1"]
    found, _ = json_of(tmp_path / "peers.json", "peers", *given)
    assert [row["beside"] for row in found["rows"]] == ["transformers", "transformers, compiled"]
    for row in found["rows"]:
        ratio = row["decode_ours_tok_s"] / row["decode_theirs_tok_s"]
        assert math.isfinite(ratio) and row["cycles"] == 2 and row["failed"] is None


@pytest.mark.parametrize("fast", [True, False])
def test_the_clock_stops_what_does_not_end_by_itself(fast, tmp_path, monkeypatch):
    """A file that takes longer than --max_minutes and the grace: nothing was measured."""
    monkeypatch.setattr(plan, "GRACE", 0.05)
    monkeypatch.setattr(peers.programs, "chosen_runtimes", lambda *_: ["llama.cpp"])
    monkeypatch.setattr(peers.programs, "make_arms", lambda *_: time.sleep(0 if fast else 60))

    def interrupted(*_):
        raise KeyboardInterrupt  # Ctrl-C: the time is not over

    monkeypatch.setattr(plan.peered, "measure", interrupted)
    minutes = "1" if fast else "0"
    result = run("--checkpoint_path", checkpoint(tmp_path), "--max_minutes", minutes)
    if fast:
        assert result.exit_code == 130
    else:
        assert "--max_minutes 0 ended before the first comparison" in one_line(result)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_one_file_for_all(tmp_path):
    """gguf-TYPE writes a file, ours reads it as it is, and the others read the same."""
    config = RunConfig(checkpoint_path=checkpoint(tmp_path), quantization="gguf-Q8_0")
    readers = ["llama.cpp", "ik_llama.cpp"]
    named = {"llama.cpp": "/there", "ik_llama.cpp": "/llama-server"}
    ours, *others = make_arms(config, of_runtimes("gguf-Q8_0", readers), tmp_path, 1, named)
    assert [arm.name for arm in (ours, *others)] == ["gguf-Q8_0", *(f"{n} Q8_0" for n in readers)]
    (file,) = {json.loads(arm.argv[0])["file"] for arm in others}
    assert json.loads(others[1].argv[0])["program"] == "/llama-server"
    assert ours.argv[ours.argv.index("--checkpoint_path") + 1] == file
    assert ours.argv[ours.argv.index("--quantization") + 1] == "as-is"
    given = dataclasses.replace(config, checkpoint_path=file, quantization="as-is")
    _, theirs = make_arms(given, of_runtimes("as-is", readers[:1]), tmp_path, threads=1)
    assert json.loads(theirs.argv[0])["file"] == file
    assert open_checkpoint(file).tokenizer(320).encode("a")


def test_a_written_file_is_left_to_the_worker_that_reads_it(tmp_path):
    config = RunConfig(checkpoint_path=checkpoint(tmp_path), quantization="int8wo")
    peers_of = of_runtimes("int8wo", ["llama.cpp", "ik_llama.cpp"])
    works = [json.loads(arm.argv[0]) for arm in make_arms(config, peers_of, tmp_path, 1)[1:]]
    ((file, form),) = {(work["file"], work["form"]) for work in works}
    assert form == "Q8_0" and not Path(file).exists()
    before = seconds_before("int8wo", peers_of, config, tmp_path, 10**9)
    write(Path(file), config.checkpoint_path, form)
    assert seconds_before("int8wo", peers_of, config, tmp_path, 10**9) < before
