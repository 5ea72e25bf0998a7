"""Schemes that a text calibrates: GPTQ and AWQ, from checkpoint to logits. (Wanda and autoquant:
test_loading.py; GPTQ's codes: quantize/test_gptq.py.)"""

import random

import pytest
import torch
import torch.nn.functional as F

from quantbench.errors import UsageError
from quantbench.models.formats import EMBEDDED
from quantbench.models.loading import load_config, load_model
from quantbench.models.registry import build
from quantbench.models.tokenizer import load_tokenizer
from quantbench.quality.texts import HELD_OUT, TEXTS
from quantbench.quantize import config
from quantbench.quantize.observe import linears_of, observed, products
from quantbench.quantize.registry import SCHEMES
from quantbench.quantize.spec import parse
from quantbench.run import awq, calibration
from tests.models.hugging_face import FAMILIES, saved
from tests.programs import command, worked
from tests.refusals import one_line
from tests.run.test_loading import load
from tests.seeds import sample

IDS = torch.tensor(load_tokenizer(EMBEDDED, 4096).encode(HELD_OUT.read_text())[:1025])
CALIBRATED = "int4wo-64-gptq int4wo-64-awq uintx-3-64-gptq int8dq-int4wo-64-awq mxfp4-gptq".split()


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibration, "HESSIAN_ROWS", 8)


def log_probabilities(model):
    with torch.no_grad():
        return model(IDS[None, :-1])[0].float().log_softmax(-1)


def kl(scheme, full):
    model, _ = load(quantization=scheme, kernel="reference")
    return F.kl_div(log_probabilities(model), full, log_target=True, reduction="batchmean")


def test_calibration_lowers_the_divergence():
    """By less than on published models: the embedded model has no outlying features."""
    full = log_probabilities(load_model("tiny"))
    for scheme, factor in sample([("int4wo-64-gptq", 0.85), ("uintx-3-64-gptq", 0.7)], 1):
        assert kl(scheme, full) < factor * kl(scheme.replace("gptq", "hqq"), full), scheme
    assert kl("int4wo-64-gptq-inorder", full) < kl("int4wo-64", full)
    for scheme in sample(("int4wo-64-awq", "mxfp4-gptq", "int8dq-int4wo-64-gptq"), 1):
        assert kl(scheme, full) < kl(scheme.rpartition("-")[0], full), scheme


def test_columns_that_meet_large_inputs_err_less():
    """A feature ten times as large as the others, which a norm makes."""
    block = build(load_config("tiny").with_layers(1)).requires_grad_(False).layers[0]
    spec = parse("int4wo-64-awq")
    block.attention_norm.weight.data[::64] = 30.0
    block.attention.wqkv.weight.data.normal_()
    x = torch.randn(512, 256)

    def rounded(name, weight):
        return SCHEMES[type(spec)].quantize(weight, spec).dequantize()

    def output(weight):
        return block.attention_norm(x) @ weight.T

    weight = block.attention.wqkv.weight.data.clone()
    expected, plain = output(weight), output(rounded("", weight))
    hessians = observed(
        linears_of(block), lambda: block.attention.wqkv(block.attention_norm(x)), products
    )
    awq.scale_inputs(block, hessians, rounded, torch.float32)
    scaled = output(rounded("", block.attention.wqkv.weight.data))
    assert (scaled - expected).norm() < 0.7 * (plain - expected).norm()


def test_calibrated_again_or_read_back_the_logits_are_the_same_bits(tmp_path):
    scheme = random.choice(CALIBRATED)
    precision = random.choice(["bfloat16", "float16", "float32"])
    print(scheme, precision)
    how = {"quantization": scheme, "precision": precision, "num_layers": 2}
    first, _ = load(**how, save=str(tmp_path / "saved"))
    again, _ = load(**how)
    back, loading = load(checkpoint_path=str(tmp_path / "saved"), precision=precision)
    expected = log_probabilities(first)
    assert torch.equal(expected, log_probabilities(again)) and str(loading.spec) == scheme
    assert torch.equal(expected, log_probabilities(back))


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_inputs_change_no_logits(family, tmp_path, monkeypatch):
    """Without rounding only what the scales do remains: nothing, in any architecture."""
    monkeypatch.setattr(awq, "EXPONENTS", (0.5,))
    path, scaled = str(saved(family, tmp_path)[0]), []

    def scale(name, part):
        if name.startswith("layers."):
            before = [layer.weight.clone() for layer in linears_of(part).values()]
            layers = linears_of(part)
            hessians = {n: torch.diag(torch.rand(m.in_features) + 0.1) for n, m in layers.items()}
            awq.scale_inputs(part, hessians, lambda name, weight: weight, torch.float32)
            after = (layer.weight for layer in layers.values())
            scaled.extend(not torch.equal(*pair) for pair in zip(before, after, strict=True))

    tokens = torch.randint(160, (2, 30))
    expected, found = load_model(path)(tokens), load_model(path, ready=scale)(tokens)
    assert any(scaled) and (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_layer_that_cannot_be_calibrated_is_rounded_and_named(monkeypatch):
    def broken(x):
        return x.T @ x * (torch.nan if x.shape[1] == 768 else 1)  # of w2, in every layer

    monkeypatch.setattr(calibration.observe, "products", broken)
    said = []
    model, _ = load(said, quantization="int4wo-64-gptq")
    assert len(said) == 5 and log_probabilities(model).isfinite().all()
    assert said[0] == (
        "layers.0.feed_forward.w2 is rounded, not calibrated: the text's inputs to it are not "
        "finite"
    )


def test_a_text_that_judges_is_refused(tmp_path):
    (tmp_path / "copy.txt").write_text("More.\n" * 9 + HELD_OUT.read_text()[100_000:])
    told = "is calibrated on {}, which judges its quality; give another --calibration_text"
    arguments = ("quality", "--quantization", "int4wo-64-gptq", "--tokens", "64")
    for text, more, judge in [
        (tmp_path / "copy.txt", [], HELD_OUT),
        (TEXTS["prose"], ["--text", str(TEXTS["prose"])], TEXTS["prose"]),
        (None, ["--text", str(calibration.TEXT)], calibration.TEXT),
    ]:
        given = ["--calibration_text", str(text)] if text else []
        assert told.format(judge) in one_line(command(*arguments, *given, *more))
    given = (calibration.TEXT.read_text(), *(path.read_text() for path in TEXTS.values()))
    assert len({text[:500] for text in given}) == 3


def test_a_run_tells_what_its_scheme_was_calibrated_on(tmp_path):
    file = tmp_path / "run.json"
    given = "--quantization int4wo-64-gptq --num_samples 1 --max_new_tokens 2 --write_result none"
    worked("generate", *given.split(), "--output_json_path", file)
    assert '"calibration_digest": "' in file.read_text()


def test_torchaos_quantize_has_no_calibrated_scheme():
    with pytest.raises(UsageError, match="int4wo-64-gptq is calibrated on a text as a checkpoint"):
        config("int4wo-64-gptq")
