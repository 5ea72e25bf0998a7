"""quantbench quality: its figures against ones computed another way, and its refusals."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from scipy import stats

from quantbench.compare.commands.quality import quality
from quantbench.errors import KernelError, UsageError
from quantbench.generate import Generator
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.models.formats import EMBEDDED
from quantbench.models.loading import load_model
from quantbench.models.tokenizer import load_tokenizer
from quantbench.ops.cpu import build
from quantbench.quality import decode_check
from quantbench.quality import reference_logits as kept
from quantbench.quality.layer_sqnr import sqnr, sqnr_of_layers
from quantbench.quality.scores import Logits, embedded, quick, score, summary
from quantbench.quality.types import LogitsFile
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse as scheme
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from quantbench.run.scoring import predictions, token_nats
from tests.compare.refusals import one_line

TOKENS = 600
TOKENIZER = load_tokenizer(EMBEDDED, 4096)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The kept logits are the tests' own, and the first test's serve the others; the C++ kernels
    lie in the same folder, and are loaded before it changes, or they would be built again."""
    with contextlib.suppress(KernelError):
        build.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def text():
    return torch.tensor(TOKENIZER.encode((EMBEDDED / "heldout.txt").read_text())[: TOKENS + 1])


def run(*arguments):
    return CliRunner().invoke(quality, list(arguments))


def measured(tmp_path, *arguments):
    path = tmp_path / "quality.json"
    result = run("--tokens", str(TOKENS), "--json", str(path), *arguments)
    assert result.exit_code == 0, result.exception
    return json.loads(path.read_text()), result


def model(name, precision=torch.bfloat16):
    quantizer = Quantizer(scheme(name), torch.device("cpu"), precision)
    return load_model("tiny", precision=precision, transform=quantizer)


@torch.no_grad()
def logits(model, ids):
    """Logits (N, V), float64, that predict ids[1:]: quarter by quarter of the text, each with the
    quarter before it as context. No cache, no batches."""
    quarter = TOKENS // 4
    parts = [model(ids[None, :quarter])[0]]
    for start in range(quarter, TOKENS, quarter):
        parts.append(model(ids[None, start - quarter : start + quarter])[0, quarter:])
    return torch.cat(parts).double()


def sem(values):
    """Standard error of the mean from four blocks of equal length."""
    return stats.sem(values.view(4, -1).mean(1).numpy())


def test_figures_against_ones_computed_another_way(tmp_path):
    found, result = measured(tmp_path, "--quantization", "int4wo-64")
    ids, figures = text(), found["quality"]
    p = logits(model("none"), ids).log_softmax(-1)
    q = logits(model("int4wo-64"), ids).log_softmax(-1)
    nats = F.nll_loss(q, ids[1:], reduction="none")
    # the same products in bfloat16, through a cache or not, in windows or not: they round apart
    assert figures["perplexity"] == pytest.approx(nats.mean().exp().item(), rel=0.01)
    error = sem(nats) * figures["perplexity"]
    assert figures["perplexity_standard_error"] == pytest.approx(error, rel=0.05)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert figures["kl"] == pytest.approx(kl.mean().item(), rel=0.05)
    assert figures["kl_median"] == pytest.approx(kl.median().item(), rel=0.1)
    assert figures["kl_max"] == pytest.approx(kl.max().item(), rel=0.2)
    assert figures["kl_median"] < figures["kl"] < figures["kl_p99"] <= figures["kl_max"]
    agreed = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert figures["top1"] == pytest.approx(agreed, abs=0.02)
    five = [
        set(a) & set(b) for a, b in zip(p.topk(5)[1].tolist(), q.topk(5)[1].tolist(), strict=True)
    ]
    assert figures["top5"] == pytest.approx(sum(map(len, five)) / 5 / TOKENS, abs=0.02)
    seen = len(TOKENIZER.decode(ids.tolist()).encode())
    assert figures["bits_per_byte"] == pytest.approx(
        nats.sum().item() / math.log(2) / seen, rel=0.01
    )
    ratio = (nats - F.nll_loss(p, ids[1:], reduction="none")).mean().exp().item()
    assert figures["perplexity_ratio"] == pytest.approx(ratio, rel=0.01)
    difference = nats - F.nll_loss(p, ids[1:], reduction="none")
    spread = 3.182 * sem(difference)  # t of 95 % at 3 degrees of freedom
    low, high = figures["perplexity_ratio_interval"]
    assert high / ratio == pytest.approx(math.exp(spread), rel=0.01)
    assert low / ratio == pytest.approx(math.exp(-spread), rel=0.01)
    assert figures["kl_standard_error"] == pytest.approx(sem(kl), rel=0.3)
    assert f"({low:.4f} to {high:.4f})" in result.stdout
    full = found["full_precision"]  # the baseline has a column of its own
    own = F.nll_loss(p, ids[1:]).item()
    assert full["perplexity"] == pytest.approx(math.exp(own), rel=0.01)
    assert full["bits_per_byte"] == pytest.approx(own * TOKENS / math.log(2) / seen, rel=0.01)
    row = next(line for line in result.stdout.splitlines() if line.startswith("perplexity "))
    assert row.index(f"{full['perplexity']:.4f}") < row.index(f"{figures['perplexity']:.4f}")
    assert result.stdout.startswith(f"tiny: {TOKENS} tokens of the embedded text in windows of 300")
    assert not figures["decoding"]["differs"] and figures["decoding"]["tokens"] == 64
    assert "Decoding by " in result.stdout
    for value in (figures["perplexity"], figures["kl"], figures["top1"]):
        assert str(value)[:5] in result.stdout  # cut, as rounding may change every digit


def test_the_noise_floor_is_below_any_scheme(tmp_path):
    found, result = measured(tmp_path, "--quantization", "int8wo")
    floor, figures = found["noise_floor"], found["quality"]
    assert found["other_dtype"] == "float32" and 0 < floor["kl"] < figures["kl"] < 0.01
    assert "logits of an earlier run" in result.stderr  # kept by the test before, or this one
    assert "noise floor: float32" in result.stdout


def test_a_quantized_cache_shows(tmp_path):
    dense, _ = measured(tmp_path)
    int4, _ = measured(tmp_path, "--kv_cache", "int4")
    assert dense["scheme"] == "none" and int4["scheme"] == "none, int4 KV cache"
    assert dense["quality"]["kl"] == 0 and dense["quality"]["top1"] == 1
    assert int4["quality"]["kl"] > 10 * int4["noise_floor"]["kl"]
    # exact; a kernel of ours may add the products up in another order, and bfloat16 rounds by 2^-9
    assert all(layer["weights"] is None for layer in dense["layers"])
    assert all(layer["outputs"] is None or layer["outputs"] > 45 for layer in dense["layers"])


def test_layers_against_their_own_weights(tmp_path):
    found, result = measured(tmp_path, "--quantization", "int4wo-32")
    full = load_model("tiny", precision=torch.bfloat16)
    linears = [name for name, m in full.named_modules() if isinstance(m, torch.nn.Linear)]
    assert [layer["name"] for layer in found["layers"]] == linears
    for layer in found["layers"]:
        module = full.get_submodule(layer["name"])
        quantizer = Quantizer(scheme("int4wo-32"), torch.device("cpu"), torch.bfloat16)
        weight = quantizer.quantized(layer["name"], module).weight.dequantize().double()
        error = (weight - module.weight).square().sum() / module.weight.double().square().sum()
        # 256 columns of up to 768, and products rounded to bfloat16
        assert layer["weights"] == pytest.approx(-10 * math.log10(error), abs=0.3)
        assert 10 < layer["outputs"] < 40
    worst = min(found["layers"], key=lambda layer: layer["outputs"])
    lines = result.stdout[result.stdout.index("Worst layers") :].splitlines()
    assert worst["name"] in lines[1] and f"{worst['outputs']:.2f}" in lines[1]


@pytest.mark.parametrize("name", ["int8dq", "bnb-nf4", "embed-int8"])
def test_layers_of_any_kernel(name):
    plan = make_plan(RunConfig(quantization=name, device="cpu"))
    quantized = load(plan, lambda done, total: None, print).model
    layers = sqnr_of_layers(plan, quantized, "tiny", text())
    assert len(layers) == 21 and all(15 < layer.outputs < 60 for layer in layers)
    assert all(layer.weights > (15 if name == "bnb-nf4" else 35) for layer in layers)


def test_layers_of_experts_in_two_tiers_are_left_out(tmp_path):
    """The others are those of a model that lies in one memory."""
    how = {"quantization": "int8wo", "device": "cpu", "checkpoint_path": "tiny_moe"}
    two = {"expert_memory": "9", "expert_policy": "fetch", "expert_folder": str(tmp_path)}
    plans = [make_plan(RunConfig(**how)), make_plan(RunConfig(**how, **two))]
    models = [load(plan, lambda done, total: None, print).model for plan in plans]
    whole, tiered = (
        sqnr_of_layers(plan, model, "tiny_moe", text())
        for plan, model in zip(plans, models, strict=True)
    )
    # In each of five layers two of attention, two of each of 8 experts, two of the shared one.
    assert (len(whole), len(tiered)) == (5 * (2 + 16 + 2) + 1, 5 * (2 + 2) + 1)
    assert tiered == [layer for layer in whole if ".experts." not in layer.name]


def test_a_mixture_of_random_weights_is_measured_by_its_scheme():
    """On the embedded model, which has no experts to be placed."""
    how = {"checkpoint_path": "dummy:Mixtral-8x7B-v0.1", "num_layers": 1}
    two = {"expert_memory": "4", "expert_policy": "fetch", "expert_placement": "first"}
    plan = make_plan(RunConfig(**how, **two, quantization="int8wo", device="cpu"))
    stand_in, _ = embedded(plan)
    assert stand_in.config.checkpoint_path == "tiny" and str(stand_in.spec) == "int8wo"


def test_sqnr_in_decibels():
    right = torch.tensor([3.0, 4.0])
    assert sqnr(right, right) == math.inf
    assert sqnr(right, torch.tensor([3.0, 4.5])) == pytest.approx(20.0)  # 25 / 0.25


def test_logits_are_kept_to_the_bit(tmp_path):
    """Nothing is lost: what is read back is what the model gave, in its own dtype."""
    values = torch.randn(7, 11).bfloat16()
    writing = Logits.create(LogitsFile(str(tmp_path / "logits"), 7, 11, "bfloat16"))
    for part in values.split(3):
        writing.next(len(part)).copy_(part)
    reading = Logits(writing.file)
    assert torch.equal(torch.cat([reading.next(4), reading.next(3)]), values)
    assert (tmp_path / "logits").stat().st_size == 7 * 11 * 2
    ids = text()[:40]
    (found, _), *_ = predictions(load_model("tiny", precision=torch.bfloat16), ids, 64)
    assert found.dtype == torch.bfloat16  # or keeping them in the model's precision would round


def test_scores_of_hand_worked_logits():
    """Two tokens of three: p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4) and the same again."""
    p, q = torch.tensor([[2.0, 1, 1, 0, 0]]), torch.tensor([[1.0, 2, 1, 0, 0]])

    class Kept:
        def next(self, count):
            return p.log()

    logs = [(q.log(), torch.tensor([0])), (p.log(), torch.tensor([0]))]
    found = score(iter(logs), Kept())
    assert found.nats.exp().tolist() == pytest.approx([4, 2])
    assert found.top1.tolist() == [0, 1] and found.top5.tolist() == pytest.approx([1, 1])


def test_hand_worked_divergence():
    p, q = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]), torch.full((1, 5), 0.2)

    class Kept:
        def next(self, count):
            return p.log()

    found = summary(score(iter([(q.log(), torch.tensor([0]))] * 4), Kept()))
    # sum of p log2 p is -1.875, so KL is (log2 5 - 1.875) bits
    assert found.kl == pytest.approx((math.log2(5) - 1.875) * math.log(2), rel=1e-6)
    assert found.perplexity == pytest.approx(5)
    assert found.perplexity_ratio == pytest.approx(2.5)
    assert found.kl_standard_error == pytest.approx(0, abs=1e-9)
    few = summary(score(iter([(q.log(), torch.tensor([0]))] * 3), Kept()))
    assert few.kl == found.kl and few.kl_standard_error is None
    assert few.perplexity_ratio_interval is None and few.perplexity_standard_error is None


def test_windows_through_a_cache_predict_the_same():
    """Each token once, and as without a cache."""
    ids, full = text()[:300], load_model("tiny")
    nats = []
    for found, targets in predictions(Generator(full, 1, 64).forward, ids, 64):
        nats.append(F.cross_entropy(found, targets, reduction="none"))
    assert torch.cat(nats).double() == pytest.approx(token_nats(full, ids, 64), abs=1e-3)


def test_the_hash_is_of_all_that_counts(tmp_path):
    def key(*arguments, ids=None, context=64):
        plan = make_plan(parse([*arguments, "--device", "cpu"]))
        return kept.content_hash(plan, text() if ids is None else ids, context)

    keys = [key(), key("--precision", "float32"), key("--num_layers", "2"), key(context=32)]
    keys.append(key(ids=text()[1:]))
    assert len(set(keys)) == len(keys) and key() == keys[0]
    copy = tmp_path / "tiny"
    copy.mkdir()
    for file in EMBEDDED.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    assert key("--checkpoint_path", str(copy)) == keys[0]  # the same bytes elsewhere
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert key("--checkpoint_path", str(copy)) != keys[0]


def test_kept_logits_do_not_pile_up(tmp_path, monkeypatch):
    """The ones used longest ago go; the newest stay, however large."""
    monkeypatch.setattr(kept, "MOST_BYTES", 250)
    for age, name in enumerate(["newest", "middle", "oldest", "half"]):
        (tmp_path / f"{name}.logits").write_bytes(bytes(100))
        if name != "half":  # a run that was killed between its two files
            (tmp_path / f"{name}.json").write_text("{}")
        os.utime(tmp_path / f"{name}.logits", (10**9 - age, 10**9 - age))
    (tmp_path / f"{kept.SCRATCH}now").mkdir()
    (tmp_path / f"{kept.SCRATCH}then").mkdir()
    os.utime(tmp_path / f"{kept.SCRATCH}then", (10**9, 10**9))
    kept.discard_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("newest.logits", "newest.json", "middle.logits", "middle.json"),
        f"{kept.SCRATCH}now",
    }
    monkeypatch.setattr(kept, "MOST_BYTES", 50)
    kept.discard_old(tmp_path)
    assert {path.name for path in tmp_path.glob("*.*")} == {"newest.logits", "newest.json"}


def test_logits_that_are_used_are_not_old(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, ids = RunConfig(device="cpu", num_layers=1), text()[:65]
    made = kept.reference(config, ids, 64, lambda line: None)
    path = made.logits.path
    os.utime(path, (10**9, 10**9))
    again = kept.reference(config, ids, 64, lambda line: None)
    assert again == made and os.path.getmtime(path) > 10**9


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (("--text", "nowhere.txt"), "--text nowhere.txt: No such file"),
        (("--text", "bytes"), "it is no UTF-8 text"),
        (("--text", "short.txt"), "do not fill a window of 1024"),
        (("--checkpoint_path", "dummy:x"), "without this option the scheme is measured on"),
        (("--quantization", "int3"), "is no scheme"),
        (("--checkpoint_path", "dummy:Llama-3.2-1B"), "random weights have none"),
        (("--lm_eval", "nowhere.yaml"), "--lm_eval"),
        (("--tokens", "x"), "--tokens takes a whole number from 0 to"),
        (("--prompt", "x"), "no such option: '--prompt'"),
        (("--expert_memory", "4"), "no such option: '--expert_memory'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    Path("short.txt").write_text("def f(x): return x")
    assert reason in one_line(CliRunner().invoke(quality, arguments, standalone_mode=False))


# ------------------------------------------------------------------------- decoding, random weights


def plan_and_model(*arguments):
    plan = make_plan(parse([*arguments, "--device", "cpu"]))
    return plan, load(plan, lambda done, total: None, lambda line: None).model


@pytest.mark.parametrize(
    "arguments",
    [(), ("--precision", "float32"), ("--quantization", "int8dq"), ("--kv_cache", "int4"),
     ("--quantization", "fp6", "--decoder", "modules")],
)  # fmt: skip
def test_decoding_predicts_what_a_prompt_does(arguments):
    plan, model = plan_and_model(*arguments)
    found = decode_check.check(plan, model, text()[:49], 16)
    assert not found.differs and 0 <= found.kl <= found.kl_max < 0.1 and found.tokens == 16
    assert found.perplexity_ratio == pytest.approx(1, abs=0.05)
    assert "modules" not in arguments or found.decoder == "modules"
    assert "predicts the same but for rounding" in found.sentence()


def test_decoding_with_a_stale_row_is_seen(monkeypatch):
    """A step that stores its keys one position too early: the last row of the cache is stale."""

    class Stale(Generator):
        def forward(self, tokens, start=0):
            return super().forward(tokens, start - (tokens.shape[1] == 1))

    plan, model = plan_and_model("--quantization", "int8wo")
    right = decode_check.check(plan, model, text()[:49], 16)
    monkeypatch.setattr(decode_check, "Generator", Stale)
    found = decode_check.check(plan, model, text()[:49], 16)
    assert found.differs and found.kl > 100 * right.kl
    assert "differs from reading the text as a prompt by more than rounding" in found.sentence()


def test_not_a_number_is_a_difference(monkeypatch):
    class Broken(Generator):
        def forward(self, tokens, start=0):
            logits = super().forward(tokens, start)
            return logits * math.nan if tokens.shape[1] == 1 else logits

    monkeypatch.setattr(decode_check, "Generator", Broken)
    found = decode_check.check(*plan_and_model(), text()[:33], 8)
    assert found.differs and found.kl is None and "not a number" in found.sentence()


def test_an_arm_that_predicts_no_numbers_has_no_quality():
    plan, model = plan_and_model()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    assert quick(plan, model, 64, None, None, None).quality.why_not.endswith("are not numbers")


def test_random_weights_take_their_quality_from_the_embedded_model(tmp_path):
    """What the worker measures for an arm: the figures of the same scheme on the model tiny."""
    answers = []
    for path in ("dummy:Llama-3.2-1B", "tiny"):
        plan, model = make_plan(parse(["--checkpoint_path", path, "--device", "cpu"])), None
        if path == "tiny":  # random weights are not looked at
            model = load(plan, lambda done, total: None, lambda line: None).model
        logits = quick(plan, model, 64, None, None, str(tmp_path / path[0])).logits
        given = ["--checkpoint_path", path, "--device", "cpu", "--quantization", "uintx-3-64"]
        plan = make_plan(parse(given))
        if path == "tiny":
            model = load(plan, lambda done, total: None, lambda line: None).model
        answers.append(quick(plan, model, 64, None, logits, None).quality)
    random, tiny = answers
    assert random.model == "tiny" and tiny.model is None and random.window == 32
    assert dataclasses.replace(random, model=None) == tiny
    assert tiny.perplexity_ratio > 1 and tiny.kl > 0 and tiny.decoding.decoder == "cpu-step"
    assert [layer.name for layer in tiny.layers][-1] == "output"
    assert all(0 < layer.outputs < 30 for layer in tiny.layers)  # some 6 dB a bit
    arguments = ["--checkpoint_path", "dummy:Llama-3.2-1B", "--quantization", "autoquant"]
    plan = make_plan(parse([*arguments, "--device", "cpu"]))
    assert "by a model's own layers" in quick(plan, None, 64, None, None, None).quality.why_not


# ------------------------------------------------------------------------- lm-evaluation-harness

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
"""
DOCUMENTS = [
    {
        "text": "def read_lines(path):\n",
        "right": "    with open(path) as f:",
        "wrong": "    qx zv 8",
    },
    {"text": "import os\nimport ", "right": "sys", "wrong": "banana"},
]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three tasks made from a local file, one of each kind that the harness has."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n")
    made = {}
    for name, kind, words, target, more in (
        ("choose", "multiple_choice", "{{text}}", "0",
         'doc_to_choice: ["{{right}}", "{{wrong}}"]\ntarget_delimiter: ""\n'
         "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"),
        ("roll", "loglikelihood_rolling", "", "{{text}}{{right}}",
         "metric_list: [{metric: bits_per_byte}]"),
        ("go_on", "generate_until", "{{text}}", "{{right}}",
         "generation_kwargs: {until: [\"\\n\"], max_gen_toks: 8, do_sample: false}\n"
         "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"),
    ):  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            TASK.format(name=name, data=data, kind=kind, text=words, target=target, more=more)
        )
        made[name] = str(path)
    return made


def test_tasks_of_the_harness(tasks, tmp_path):
    found, result = measured(tmp_path, "--lm_eval", ",".join(tasks.values()))
    got = found["tasks"]
    assert got["choose"]["acc,none"] == 1.0
    full = load_model("tiny", precision=torch.bfloat16)
    bits, size = 0.0, 0
    for document in DOCUMENTS:
        whole = document["text"] + document["right"]
        ids = torch.tensor(TOKENIZER.encode(whole))
        bits += token_nats(full, ids, 1024).sum().item() / math.log(2)
        size += len(whole.encode())
    assert got["roll"]["bits_per_byte,none"] == pytest.approx(bits / size, rel=0.01)
    assert 0 <= got["go_on"]["exact_match,none"] <= 1
    assert "choose acc: 1.0000" in result.stdout


@pytest.mark.parametrize(
    "given, why",
    [
        ("no_such_task_at_all", "--lm_eval no_such_task_at_all: lm-evaluation-harness has no such"),
        ("{choose},no_such_task_at_all", "--lm_eval no_such_task_at_all: lm-evaluation-harness"),
        ("helaswag", "--lm_eval helaswag: lm-evaluation-harness has no such task; did you mean "
         "hellaswag?"),
        ("nowhere.yaml", "--lm_eval nowhere.yaml: no such file"),
        ("{choose},,nowhere.yaml", "--lm_eval takes names with commas between them; given: "),
    ],
)  # fmt: skip
def test_a_task_that_is_not_there_is_refused_before_torch_is_read(tasks, monkeypatch, given, why):
    monkeypatch.setitem(sys.modules, "quantbench.quality.measure", None)  # cannot be imported
    result = run("--tokens", "600", "--lm_eval", given.format(**tasks))
    assert one_line(result).startswith(why) and isinstance(result.exception, UsageError)


def test_without_the_harness_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "quantbench.quality.measure", None)  # cannot be imported
    result = run("--lm_eval", "hellaswag")
    assert one_line(result) == "--lm_eval needs lm-evaluation-harness: pip install lm-eval"
