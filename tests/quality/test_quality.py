"""quantbench quality: its figures against ones computed another way, and its refusals."""

import dataclasses
import json
import math
import random
import shutil
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from scipy import stats

from quantbench.bench.worker import Worker
from quantbench.generate import Generator
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.models.formats import EMBEDDED
from quantbench.models.llama import Transformer
from quantbench.models.loading import load_model
from quantbench.models.tokenizer import load_tokenizer
from quantbench.quality import decode_check, texts
from quantbench.quality import judge as judging
from quantbench.quality.judge import Held, Judge, quietly, standing_in
from quantbench.quality.layers import sqnr_of_layers
from quantbench.quality.scores import Reader, Scores, compared, summary
from quantbench.quality.tasks import Result, _adapter, find, flips
from quantbench.quality.texts import Passage, Texts
from quantbench.quality.thresholds import CLASSES, class_of, of_rounding
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse as scheme
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests.programs import command, json_of
from tests.refusals import one_line

TOKENS = 700
TOKENIZER = load_tokenizer(EMBEDDED, 4096)
IDS = TOKENIZER.encode((EMBEDDED / "heldout.txt").read_text())[: TOKENS + 1]
BOS = [TOKENIZER.bos_id]
run = partial(command, "quality")


def measured(tmp_path, *arguments):
    return json_of(tmp_path / "quality.json", "quality", "--tokens", TOKENS, *arguments)


def plan_of(*arguments):
    return make_plan(parse([*arguments, "--device", "cpu"]))


def held(*arguments):
    return Held(plan_of(*arguments), quietly)


def plan_and_model(*arguments):
    plan = make_plan(parse([*arguments, "--device", "cpu"]))
    return plan, load(plan, lambda done, total: None, lambda line: None).model


@torch.no_grad()
def log_probabilities(name):
    """Those of a scheme (N, V), float64, of the first 640 tokens of the text, and of the other 60
    after them: of sequences from position 0 on. No cache, no chunks."""
    _, model = plan_and_model("--quantization", name)
    parts = (IDS[:640], [*BOS, *IDS[641:-1]])
    logits = torch.cat([model(torch.tensor([part]))[0] for part in parts])
    return logits.double().log_softmax(-1)


def sem(values):
    """Standard error of the mean from blocks of 32 tokens, and a last one of 28 (Cochran 6.3)."""
    blocks = values[:640].split(32) + values[640:].split(32)
    residuals = torch.tensor([(block - values.mean()).sum() for block in blocks])
    many = len(blocks)
    return (residuals.square().sum() * many / (many - 1)).sqrt().item() / len(values)


def test_figures_against_ones_computed_another_way(tmp_path):
    found, result = measured(tmp_path, "--quantization", "int4wo-64")
    figures = found["quality"]
    p, q = map(log_probabilities, ("none", "int4wo-64"))
    targets = torch.tensor(IDS[1:])
    nats, full_nats = (F.nll_loss(rows, targets, reduction="none") for rows in (q, p))
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    right, full_right = q.argmax(-1) == targets, p.argmax(-1) == targets
    both = zip(p.topk(5)[1].tolist(), q.topk(5)[1].tolist(), strict=True)
    seen = len(TOKENIZER.decode(targets.tolist()).encode())
    # the same products in bfloat16, through a cache or not, in chunks or not: they round apart
    expected = {
        "perplexity": (nats.mean().exp(), {"rel": 0.01}),
        "perplexity_ratio": ((nats - full_nats).mean().exp(), {"rel": 0.01}),
        "bits_per_byte": (nats.sum() / math.log(2) / seen, {"rel": 0.01}),
        "kl": (kl.mean(), {"rel": 0.05}),
        "kl_median": (kl.median(), {"rel": 0.1}),
        "kl_max": (kl.max(), {"rel": 0.2}),
        "top1": ((p.argmax(-1) == q.argmax(-1)).double().mean(), {"abs": 0.02}),
        "top5": (sum(len({*a} & {*b}) for a, b in both) / 5 / len(targets), {"abs": 0.02}),
        "lost": ((full_right & ~right).double().mean(), {"abs": 0.01}),
        "gained": ((right & ~full_right).double().mean(), {"abs": 0.01}),
    }
    for name, (value, tolerance) in expected.items():
        assert figures[name] == pytest.approx(float(value), **tolerance), name
    assert (figures["tokens"], figures["window"]) == (TOKENS, 640)
    assert figures["kl_median"] < figures["kl"] < figures["kl_p99"] <= figures["kl_max"]
    # neighbouring blocks that are alike are merged, which the oracle does not; the error then grows
    assert figures["kl_standard_error"] >= 0.9 * sem(kl)
    low, high = figures["kl_interval"]
    reach = stats.t.ppf(0.975, figures["kl_freedom"]) * figures["kl_standard_error"]
    assert (low, high) == pytest.approx((figures["kl"] - reach, figures["kl"] + reach))
    full = found["full_precision"]  # the baseline has a column of its own
    assert full["perplexity"] == pytest.approx(full_nats.mean().exp().item(), rel=0.01)
    row = next(line for line in result.stdout.splitlines() if line.startswith("perplexity "))
    assert row.index(f"{full['perplexity']:.4f}") < row.index(f"{figures['perplexity']:.4f}")
    assert result.stdout.startswith(f"tiny: {TOKENS} tokens of the embedded texts, at most")
    assert f"KL {figures['kl']:.4g}, {class_of(figures['kl'])}: above" in result.stdout
    assert not figures["decoding"]["differs"] and figures["decoding"]["tokens"] == 64
    assert figures["noise"] == found["noise_floor"]["kl"]
    for value in (figures["perplexity"], figures["kl"], figures["top1"], low, high):
        assert str(value)[:5] in result.stdout  # cut, as rounding may change every digit


def test_the_noise_floor_is_below_any_scheme(tmp_path):
    found, result = measured(tmp_path, "--quantization", "int8wo")
    floor, figures = found["noise_floor"], found["quality"]
    assert floor["tokens"] == 64 and 0 < floor["kl"] < figures["kl"] < 0.01
    assert "noise floor: 64 decoding steps" in result.stdout
    assert ": within --max_kl 0.03" in result.stdout


def test_a_quantized_cache_shows(tmp_path):
    dense, _ = measured(tmp_path)
    int4, _ = measured(tmp_path, "--kv_cache", "int4")
    assert dense["scheme"] == "none" and int4["scheme"] == "none, int4 KV cache"
    assert dense["quality"]["kl"] == 0 and dense["quality"]["top1"] == 1
    assert int4["quality"]["kl"] > 10 * int4["noise_floor"]["kl"]
    # `quality --kv_cache int4 --tokens 0` reads 78,541 tokens: KL 0.0136, and a ratio of 1.0114
    # with standard error 0.0008.
    assert 0.010 < int4["quality"]["kl"] < 0.017
    error = int4["quality"]["perplexity_ratio_standard_error"]
    assert abs(int4["quality"]["perplexity_ratio"] - 1.0114) < 3 * error < 0.03
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
        # 128 columns of up to 768, and products rounded to bfloat16
        assert layer["weights"] == pytest.approx(-10 * math.log10(error), abs=0.3)
        assert 10 < layer["outputs"] < 40
    worst = min(found["layers"], key=lambda layer: layer["outputs"])
    lines = result.stdout[result.stdout.index("Worst layers") :].splitlines()
    assert worst["name"] in lines[1] and f"{worst['outputs']:.2f}" in lines[1]


@pytest.mark.parametrize("name", ["int8dq", "bnb-nf4", "embed-int8"])
def test_layers_of_any_kernel(name):
    plan, quantized = plan_and_model("--quantization", name)
    layers = sqnr_of_layers(plan, quantized, IDS)
    assert len(layers) == 21 and all(15 < layer.outputs < 60 for layer in layers)
    assert all(layer.weights > (15 if name == "bnb-nf4" else 35) for layer in layers)


def test_layers_of_experts_in_two_tiers_are_left_out(tmp_path):
    """The others are those of a model in one memory."""
    how = "--quantization int8wo --checkpoint_path tiny_moe".split()
    two = ["--expert_memory", "9", "--expert_policy", "fetch", "--expert_folder", str(tmp_path)]
    whole, tiered = (sqnr_of_layers(*plan_and_model(*how, *more), IDS) for more in ([], two))
    # In each of five layers two of attention, two of each of 8 experts, two of the shared one.
    assert (len(whole), len(tiered)) == (5 * (2 + 16 + 2) + 1, 5 * (2 + 2) + 1)
    assert tiered == [layer for layer in whole if ".experts." not in layer.name]


def test_a_mixture_of_random_weights_is_measured_by_its_scheme():
    """On the embedded model, which has no experts to be placed."""
    how = {"checkpoint_path": "dummy:Mixtral-8x7B-v0.1", "num_layers": 1}
    two = {"expert_memory": "4", "expert_policy": "fetch", "expert_placement": "first"}
    plan = make_plan(RunConfig(**how, **two, quantization="int8wo", device="cpu"))
    stand_in, stands_in = standing_in(plan)
    assert stands_in and stand_in.config.checkpoint_path == "tiny"
    assert str(stand_in.spec) == "int8wo"


# -------------------------------------------------------------------------------- hidden states


def summary_of(q, p, targets):
    """Figures of one passage with these logits."""
    passage = Passage("text", 0, [0, *targets], 1, 10)
    return summary(Scores([passage], compared(q, p, torch.tensor(targets))))


def test_scores_of_hand_worked_logits():
    """Two tokens: p = (1/2, 1/4, 1/4, 0, 0), q = (1/4, 1/2, 1/4, 0, 0), and the same again."""
    p, q = torch.tensor([2.0, 1, 1, 1e-30, 1e-30]), torch.tensor([1.0, 2, 1, 1e-30, 1e-30])
    given = torch.stack([q, p]).log(), torch.stack([p, p]).log()
    found = compared(*given, torch.tensor([0, 0]))
    assert found["nats"].exp().tolist() == pytest.approx([4, 2])
    assert found["kl"].tolist() == pytest.approx([math.log(2) / 4, 0])  # 1/2 log 2 - 1/4 log 2
    expected = {"top1": [0, 1], "top5": [1, 1], "right": [0, 1], "reference_right": [1, 1]}
    assert {name: found[name].tolist() for name in expected} == expected
    assert (summary_of(*given, [0, 0]).lost, summary_of(*given, [0, 0]).gained) == (0.5, 0)


def test_hand_worked_divergence():
    p, q = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]), torch.full((1, 5), 0.2)
    found = summary_of(q.log().expand(4, 5), p.log().expand(4, 5), [0] * 4)
    # sum of p log2 p is -1.875, so KL is (log2 5 - 1.875) bits
    assert found.kl == pytest.approx((math.log2(5) - 1.875) * math.log(2), rel=1e-6)
    assert found.perplexity == pytest.approx(5) and found.perplexity_ratio == pytest.approx(2.5)
    assert found.kl_standard_error == pytest.approx(0, abs=1e-9) and found.settled(0.03)
    few = summary_of(q.log().expand(3, 5), p.log().expand(3, 5), [0] * 3)
    assert few.kl == pytest.approx(found.kl) and few.kl_standard_error is None
    assert few.with_interval().kl_interval is None and not few.settled(0.03)


def test_against_transformers(tmp_path):
    """A tiny random Llama against one whose weights moved by 3 %, on all texts."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=300,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ours, theirs = [], []
    for name in ("full", "moved"):
        theirs.append(transformers.LlamaForCausalLM(config).eval())
        if name == "moved":
            for moved, weight in zip(theirs[1].parameters(), theirs[0].parameters(), strict=True):
                moved.data = weight.data * (1 + 0.03 * torch.randn(weight.shape))
        theirs[-1].save_pretrained(tmp_path / name)
        tokenizer = (EMBEDDED / "tokenizer.model").read_bytes()
        (tmp_path / name / "tokenizer.model").write_bytes(tokenizer)
        given = ("--checkpoint_path", str(tmp_path / name), "--precision", "float32")
        ours.append(held(*given))
    judge = Judge(ours[0], None, 800)
    found = summary(judge.scores(ours[1]))
    kl, total = {}, 0
    parts = judge.full.passages
    assert {part.text for part in parts} == {"prose", "code", "greedy", "sampled"}
    with torch.no_grad():
        for part in parts:
            ids = torch.tensor([part.ids[:-1]])
            p, q = (m(ids).logits[0, part.first - 1 :].double() for m in theirs)
            rows = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none")
            kl.setdefault(part.text, []).append(rows.sum(-1))
            total += part.predicted
            assert len(rows) == part.predicted
            if part.text == "greedy":
                assert p.argmax(-1).tolist() == part.ids[part.first :]
    means = [torch.cat(rows).mean().item() for rows in kl.values()]
    assert found.tokens == total and {part.name for part in found.texts} == set(kl)
    assert found.kl == pytest.approx(sum(means) / 4, rel=1e-3)  # float32 rounds apart
    assert [part.kl for part in found.texts] == pytest.approx(means, rel=1e-3)


@pytest.mark.parametrize("name", ["none", "int8wo"])
def test_hidden_states_are_kept_to_the_bit(name):
    """The reference against itself: nothing is lost, and its head is its own."""
    judge = Judge(held("--quantization", name), None, 100)
    assert judge.own().quality.kl is None
    again = judge.judged(judge.exact.plan, 0.03)
    assert again.quality.kl == 0 and again.quality.top1 == 1
    assert again.quality.perplexity_ratio == 1 and again.kernel == judge.exact.loaded.kernels
    full, width = judge.full, judge.exact.plan.architecture.dim
    for states, part in zip(full.hidden, full.passages, strict=True):
        assert states.shape == (part.predicted, width) and states.dtype == torch.bfloat16


@pytest.mark.parametrize("room", [False, True])
def test_two_models_are_in_memory_where_they_fit(monkeypatch, room):
    """An arm that is undecided is freed before full precision reads on, where they do not."""
    alive, most, loads = set(), [0], []

    def counting(plan):
        loads.append(str(plan.spec))
        model = quietly(plan)
        alive.add(loads[-1])
        most[0] = max(most[0], len(alive))
        weakref.finalize(model.model, alive.discard, loads[-1])
        return model

    monkeypatch.setattr(
        judging.devices, "free_memory", lambda device: 10**12 if room else judging.ROOM
    )
    plans = [plan_of("--quantization", name) for name in ("none", "uintx-3-64", "int4wo-64")]
    judge = Judge(Held(plans[0], counting), None, 4096)
    assert judge.own().quality.kl is None
    assert judge.judged(plans[1], 0.03).quality.kl > 0.1
    assert judge.judged(plans[2], 0.058).quality.tokens > 1000
    assert most[0] == 1 + room
    assert loads[:3] == ["none", "uintx-3-64", "int4wo-64"] and (len(loads) == 3) == room


def test_loaded_again_it_is_the_same_model_and_another_is_told_apart():
    judge = Judge(held(), None, 200)
    found = judge.judged(plan_of("--quantization", "int8wo"), 0.03)
    assert (len(found.likeliest.ids), {*map(len, found.likeliest.tokens)}) == (64, {8})
    same, other = (
        decode_check.divergence(*plan_and_model("--quantization", name), found.likeliest)
        for name in ("int8wo", "int4wo-64")
    )
    assert abs(same) < 1e-4 and other > of_rounding(found.quality.noise) > 0.0009


def test_a_passage_through_a_cache_predicts_the_same():
    """In chunks, and in a cache that held another passage before."""
    plan, full = plan_and_model("--precision", "float32")
    reader = Reader(plan, full)
    with torch.no_grad():
        reader.hidden(Passage("text", 0, IDS[:100], 1))
        for part in (Passage("text", 0, IDS, 1), Passage("text", 0, IDS[:50], 20)):
            found = full.logits(reader.hidden(part))
            expected = full(torch.tensor([part.ids[:-1]]))[0, part.first - 1 :]
            assert torch.allclose(found, expected, atol=1e-3)


# ---------------------------------------------------------------------------------------- texts


def copy_of_tiny(folder):
    """The embedded model elsewhere: for quality one like any other."""
    return shutil.copytree(EMBEDDED, folder / "copy")


def recorded(monkeypatch, kind, method, what):
    """A list that grows by what(first argument) at each call of a method."""
    found, usual = [], getattr(kind, method)

    def recording(self, given, *more):
        found.append(what(given))
        return usual(self, given, *more)

    monkeypatch.setattr(kind, method, recording)
    return found


def looks(texts, model, count):
    return [part for look in range(count) for part in texts.look(look, model)]


def test_passages_cover_each_text_once(tmp_path):
    plan, full = plan_and_model("--checkpoint_path", str(copy_of_tiny(tmp_path)))
    found = looks(Texts(plan, None, 2560), full, 3)
    assert Texts(plan, None, 2560).last(2) and not Texts(plan, None, 2560).last(1)
    assert all(len(part.ids) <= 1025 for part in found)  # the model's context, and one to predict
    for name in ("prose", "code"):
        own = [part for part in found if part.text == name]
        expected = plan.tokenizer.encode(texts.TEXTS[name].read_text(), bos=False)[:768]
        assert sum((part.ids[1:] for part in own), []) == expected
        assert [part.predicted for part in own] == [192, 192, 384]
        assert [part.look for part in own] == [0, 1, 2]
        whole = plan.tokenizer.decode(expected).encode()
        assert abs(sum(part.bytes for part in own) - len(whole)) <= 30  # spaces at the seams
    for look, most in enumerate((640, 640, 1280)):  # texts of the model's own end where it does
        count = sum(part.predicted for part in found if part.look == look)
        assert 0.6 * most - 2 <= count <= most
        assert [part.text for part in found if part.look == look].count("greedy") == 1
    assert looks(Texts(plan, None, 2560), full, 3) == found  # what is sampled, too
    assert looks(Texts(plan, None, 640), full, 1) == [part for part in found if part.look == 0]
    assert texts.digest(found[:1]) != texts.digest(found[1:2])


def test_a_model_writes_its_text_in_few_steps_of_its_decoder(tmp_path, monkeypatch):
    """Of 640 tokens 256 are its own: 64 steps of four rows, the first of them the prompt's."""
    steps = recorded(monkeypatch, Generator, "forward", lambda tokens: tuple(tokens.shape))
    plan, full = plan_and_model("--checkpoint_path", str(copy_of_tiny(tmp_path)))
    parts = Texts(plan, None, 4096).look(0, full)
    own = sum(part.predicted for part in parts if part.text in ("greedy", "sampled"))
    assert own <= 256 and len(steps) <= 64 and set(steps[1:]) == {(4, 1)}
    chosen = Generator(full, 25, 128).decoder  # rows of the last look that has a prompt
    assert chosen.name == "cpu-step" or chosen.reason


def test_an_embedded_model_takes_its_held_out_text_alone():
    plan = make_plan(parse(["--device", "cpu"]))
    given = Texts(plan, None, 0)
    found = looks(given, None, 20)
    ids = plan.tokenizer.encode((EMBEDDED / "heldout.txt").read_text(), bos=False)
    assert {part.text for part in found} == {"held out"} and given.last(20)
    assert sum((part.ids[1:] for part in found), []) == ids
    assert max(len(part.ids) - 1 for part in found) <= plan.architecture.max_position


def test_both_models_read_as_much_as_the_arm_needs(monkeypatch):
    """640 tokens where the KL is far from the limit; each token once where it is not."""
    prompts = recorded(monkeypatch, Reader, "hidden", lambda passage: passage.predicted)
    judge, plan = Judge(held(), None, 4096), plan_of("--quantization", "int4wo-64")  # KL 0.06
    found = judge.judged(plan, 0.5).quality
    likeliest = prompts.pop()  # 64 tokens once more
    assert prompts == [640, 640] and found.tokens == 640 and likeliest == 64
    assert len(found.layers) == 21 and found.decoding.tokens == 32
    del prompts[:]
    more = judge.judged(plan, 0.058).quality
    assert 1280 <= more.tokens <= 4096 and sum(prompts[:-1]) == 2 * more.tokens - 640
    whole = judge.judged(plan, 0.058).quality  # what full precision has read by now
    assert dataclasses.replace(whole, layers=None) == dataclasses.replace(more, layers=None)
    few = Judge(held(), None, 4096).judged(plan, 0.058, seconds=0.0).quality
    assert few.tokens == 640


def test_of_a_hopeless_scheme_the_first_text_is_enough(tmp_path):
    judge = Judge(held("--checkpoint_path", str(copy_of_tiny(tmp_path))), None, 4096)
    plan = dataclasses.replace(judge.exact.plan, spec=scheme("uintx-2-64"))
    found = judge.judged(plan, 0.03, details=False).quality
    assert found.tokens == 192 and found.kl > 1 and found.decoding is None
    assert judge.judged(plan, 0.03).quality.tokens > 500


def test_the_scatter_between_texts_counts():
    """Two texts with KL 0.01 and 0.03 in every token: their mean is known to 0.01, 1 degree."""
    passages = [Passage(name, 0, list(range(385)), 1) for name in "ab"]
    kl = torch.cat([torch.full((384,), 0.01), torch.full((384,), 0.03)]).double()
    scores = Scores(passages, {"kl": kl})
    found = scores.mean_kl()
    assert (found.mean, found.standard_error) == pytest.approx((0.02, 0.01))
    assert found.freedom == 1 and scores.mean_kl(between=False).standard_error < 1e-9
    assert scores.enough(0.03)  # more of the same texts would not tell


def test_parts_by_depth_and_text_add_up():
    parts = [Passage("a", 0, list(range(1501)), 1), Passage("b", 0, list(range(200)), 100)]
    kl = torch.rand(1600).double()
    names = "nats reference_nats kl top1 top5 right reference_right".split()
    rows = Scores(parts, dict.fromkeys(names, kl) | {"top1": (kl > 0.1).double()})
    found = summary(rows)
    by_text = {part.name: part for part in found.texts}
    assert by_text["a"].kl == pytest.approx(kl[:1500].mean().item())
    assert by_text["b"].tokens == 100 and by_text["b"].kl == pytest.approx(kl[1500:].mean().item())
    assert found.kl == pytest.approx((by_text["a"].kl + by_text["b"].kl) / 2)  # texts count alike
    shallow, deep = found.depths
    assert (shallow.name, deep.name) == ("0-1k", "1-8k")
    assert (shallow.tokens, deep.tokens) == (1023 + 100, 1500 - 1023)
    assert deep.kl == pytest.approx(kl[1023:1500].mean().item())


def test_the_classes():
    ends = {0: "not noticeable", 0.01: "not noticeable", 0.0101: "good", 0.1: "usable",
            0.5: "damaged", 3.0: "broken", math.nan: "broken"}  # fmt: skip
    assert {kl: class_of(kl) for kl in ends} == ends
    assert [most for most, *_ in CLASSES] == [0.01, 0.03, 0.1, 0.5]


# ------------------------------------------------------------------------- decoding, random weights


@pytest.mark.parametrize(
    "arguments",
    [(), ("--precision", "float32"), ("--quantization", "int8dq"), ("--kv_cache", "int4"),
     ("--quantization", "fp6", "--decoder", "modules")],
)  # fmt: skip
def test_decoding_predicts_what_a_prompt_does(arguments):
    precision = arguments[:2] if "--precision" in arguments else ()
    judge = Judge(held(*precision), None, 200)
    judge.read(1)
    found = decode_check.check(*plan_and_model(*arguments), judge.full, judge.noise.kl, 16)
    assert not found.differs and abs(found.kl) < 0.02 and found.tokens == 16
    assert found.kl_of_rounding == max(0.001, 3 * judge.noise.kl) < 0.01
    assert "modules" not in arguments or found.decoder == "modules"
    assert "predicts the same but for rounding" in found.sentence()


@pytest.mark.parametrize("broken", ["stale", "not a number"])
def test_decoding_that_predicts_something_else_is_seen(monkeypatch, broken):
    """stale: a step stores its keys one position too early, so the last row of the cache is."""
    judge = Judge(held(), None, 200)
    judge.read(1)
    plan, model = plan_and_model("--quantization", "int8wo")
    usual = Generator.forward

    def forward(self, tokens, start=0):
        step = tokens.shape[1] == 1
        logits = usual(self, tokens, start - (step and broken == "stale"))
        return logits * math.nan if step and broken != "stale" else logits

    monkeypatch.setattr(Generator, "forward", forward)
    found = decode_check.check(plan, model, judge.full, judge.noise.kl)
    assert found.differs and (found.kl is None or found.kl > 0.01)
    assert "differs from reading the text as a prompt by more than rounding" in found.sentence()
    assert ("not a number" in found.sentence()) == (broken != "stale") == (found.kl is None)


def test_an_arm_that_predicts_no_numbers_has_no_quality():
    arm = held()
    with torch.no_grad():
        arm.model.norm.weight.fill_(math.nan)
    assert Judge(arm, None, 64).own().quality.why_not.endswith("are not numbers")


def test_a_scheme_that_predicts_no_numbers_is_refused(monkeypatch):
    """Not shown as one without divergence: max(0.0, nan) is 0."""
    monkeypatch.setattr(
        Transformer, "logits", lambda self, x: x.new_full((*x.shape[:2], 4096), math.nan)
    )
    result = run("--quantization", "int8wo")
    assert one_line(result) == "--quantization int8wo: its predictions are not numbers"


def test_random_weights_take_their_quality_from_the_embedded_model():
    """What the judge measures for an arm: the figures of the same scheme on the model tiny."""
    answers = []
    for path in ("dummy:Llama-3.2-1B", "tiny"):
        worker = Worker()
        given = ["--checkpoint_path", path, "--device", "cpu", "--quantization"]
        worker.read([*given, "none"], 64, None)
        answers.append(worker.judge([*given, "uintx-3-64"], 0.03, 0.0, True))
    random, tiny = (answer.quality for answer in answers)
    assert answers[0].likeliest is None and answers[1].likeliest is not None
    assert random.model == "tiny" and tiny.model is None and random.window in (63, 64)
    assert dataclasses.replace(random, model=None) == tiny
    assert tiny.perplexity_ratio > 1 and tiny.kl > 0 and tiny.decoding.decoder == "cpu-step"
    assert [layer.name for layer in tiny.layers][-1] == "output"
    assert all(0 < layer.outputs < 30 for layer in tiny.layers)  # some 6 dB a bit
    random = ["--checkpoint_path", "dummy:Llama-3.2-1B", "--quantization", "autoquant"]
    plan = make_plan(parse([*random, "--device", "cpu"]))
    found = Judge(held(), None, 64).judged(plan, 0.03).quality
    assert "by a model's own layers" in found.why_not


# ------------------------------------------------------------------------- lm-evaluation-harness

DOCUMENTS = [
    {"text": "def read(path):\n", "right": "    with open(path) as f:", "wrong": "    qx zv 8"},
    {"text": "import os\nimport ", "right": "sys", "wrong": "banana"},
]
BETTER = {"aggregation": "mean", "higher_is_better": True}
TASKS = {  # one of each kind that the harness has
    "choose": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": 0,
               "doc_to_choice": ["{{right}}", "{{wrong}}"], "target_delimiter": "",
               "metric_list": [{"metric": "acc", **BETTER}]},
    "roll": {"output_type": "loglikelihood_rolling", "doc_to_text": "",
             "doc_to_target": "{{text}}{{right}}", "metric_list": [{"metric": "bits_per_byte"}]},
    "go_on": {"output_type": "generate_until", "doc_to_text": "{{text}}",
              "doc_to_target": "{{right}}", "metric_list": [{"metric": "exact_match", **BETTER}],
              "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}},
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The tasks' files, which are JSON: YAML contains it."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    for name, task in TASKS.items():
        made = {"task": name, "test_split": "test", **source, **task}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(made))
    return {name: str(tmp_path / f"{name}.yaml") for name in TASKS}


def test_tasks_of_the_harness(tasks, tmp_path, monkeypatch):
    harness = pytest.importorskip("lm_eval.tasks")
    given, manager = [], harness.TaskManager
    made = lambda **how: given.append(how) or manager(**how)  # noqa: E731
    monkeypatch.setattr(harness, "TaskManager", made)
    found, result = measured(tmp_path, "--lm_eval", ",".join(tasks.values()))
    got = found["tasks"]
    assert got["choose"]["acc,none"] == 1.0
    full = load_model("tiny", precision=torch.bfloat16)
    nats, size = 0.0, 0
    for document in DOCUMENTS:
        whole = document["text"] + document["right"]
        ids = torch.tensor(TOKENIZER.encode(whole))
        nats += F.cross_entropy(full(ids[None, :-1])[0].float(), ids[1:], reduction="sum").item()
        size += len(whole.encode())
    assert got["roll"]["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=0.01)
    assert 0 <= got["go_on"]["exact_match,none"] <= 1
    assert "choose acc: 1.0000 ± 0.0000; full precision 1.0000 ± 0.0000; 0 lost" in result.stdout
    assert given == [{"include_defaults": False}] * 2  # all of the harness's take 20 s to read


def test_an_empty_text_of_a_task_has_no_tokens():
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    adapter = _adapter(*plan_and_model())
    assert adapter.loglikelihood_rolling([SimpleNamespace(args=("",))]) == [0.0]


def test_flips_by_hand():
    """One document lost of one that differs proves nothing; ten of ten do: 2 / 2^10."""

    def result(*right):
        return Result({}, {("task", "acc"): list(right), ("task", "f1"): [0.3]})

    (few,) = flips(result(True, False, True), result(True, True, True))
    assert (few.task, few.metric, few.lost, few.gained, few.p) == ("task", "acc", 1, 0, 1.0)
    (many,) = flips(result(*[False] * 10, True), result(*[True] * 10, True))
    assert (many.lost, many.gained) == (10, 0) and many.p == pytest.approx(2 / 2**10)


def test_a_task_that_is_not_there_is_refused_before_torch_is_read(tasks, monkeypatch):
    harness = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setitem(sys.modules, "quantbench.quality.measure", None)  # cannot be imported
    folder = Path(harness.__file__).parent / "hellaswag"  # of thousands that it would read
    manager = harness.TaskManager(include_path=folder, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", lambda: manager)
    none = "--lm_eval no_such_task_at_all: lm-evaluation-harness has no such task; `lm-eval ls"
    for given, why in (
        ("{choose},no_such_task_at_all", none),
        ("helaswag", "--lm_eval helaswag: lm-evaluation-harness has no such task; did you mean "
         "hellaswag?"),
        ("{choose},,nowhere.yaml", "--lm_eval takes names with commas between them; given: "),
    ):  # fmt: skip
        result = run("--tokens", "600", "--lm_eval", given.format(**tasks))
        assert one_line(result).startswith(why) and result.exit_code == 2
    group = Path(tasks["choose"]).with_name("group.yaml")
    group.write_text("group: two\ntask: [hellaswag, arc_easy]\n")
    assert find(str(group)).manager is manager  # it needs the harness's tasks
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = run("--lm_eval", "hellaswag")
    assert one_line(result) == "--lm_eval needs lm-evaluation-harness: pip install lm-eval"


def test_a_scheme_made_of_weights_in_memory_is_that_of_the_file():
    """The judge quantizes what full precision holds; a run reads the file."""
    exact = make_plan(RunConfig(checkpoint_path="tiny", device="cpu"))
    judge = Judge(Held(exact, quietly), None, 64)
    judge.read(1)
    name = random.choice(["int8wo", "int4wo-64-hqq", "fp6", "uintx-3-64", "sparse-marlin"])
    config = dataclasses.replace(exact.config, quantization=name)
    plan = make_plan(config, exact)
    assert plan.tokenizer is exact.tokenizer
    read, other = quietly(plan).model, judge.beside(plan)
    assert other.checkpoint.in_memory is not None
    ids = torch.tensor([judge.full.passages[0].ids[:40]])
    assert torch.equal(read(ids), quietly(other).model(ids)), name
