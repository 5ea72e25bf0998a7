"""Models that compressed-tensors saves as a whole, and what their files say of activations, which
are rounded as the package rounds them."""

import json
import random
import time

import pytest
import torch
from compressed_tensors import quantization as ct
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file
from torch import nn

from quantbench import models
from quantbench.errors import CheckpointError, UsageError
from quantbench.generate import Generator
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from quantbench.quantize.activation import STATIC, rounded
from quantbench.quantize.cpu import PackedLinear
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse, refuse_format
from quantbench.run.cpu_step import why_not_fused
from tests.models import hugging_face
from tests.models.hugging_face import TOKENS, assert_near, edit_config, logits, rewritten
from tests.models.refused import refusal
from tests.run.test_loading import load

INT8 = {"num_bits": 8, "strategy": "channel"}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
E4M3 = {"num_bits": 8, "type": "float"}
FLOAT8 = INT8 | E4M3
BLOCKS = E4M3 | {"strategy": "block", "block_structure": [128, 128]}
TOKEN = {"strategy": "token", "dynamic": True}
ROUNDINGS = {  # input_activations, by our name of the rounding
    "int8": {"num_bits": 8, **TOKEN},
    "int8-static": {"num_bits": 8, "strategy": "tensor"},
    "float8-row": E4M3 | TOKEN,
    "float8-tensor": E4M3 | {"strategy": "tensor", "dynamic": True},
    "float8-static": E4M3 | {"strategy": "tensor"},
    "float8-128": E4M3 | {"strategy": "group", "group_size": 128, "dynamic": True},
}
FILES = {  # by the label in logs
    "w8a8": (INT8, "int8", "int-quantized"),
    "w8a8-static": (INT8, "int8-static", "int-quantized"),
    "w4a8-32": (INT4, "int8", "pack-quantized"),
    "w4afp8-32-row": (INT4, "float8-row", "pack-quantized"),
    "fp8-row": (FLOAT8, "float8-row", "float-quantized"),
    "fp8-tensor": (FLOAT8, "float8-tensor", "float-quantized"),
    "fp8-static": (FLOAT8, "float8-static", "float-quantized"),
    "fp8-128": (BLOCKS, "float8-128", "float-quantized"),
}
STATIC_SCALE = 0.03
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize("how", ROUNDINGS)
def test_numbers_are_those_of_the_package(how):
    """To the bit: both divide float32 numbers by the same scale. One row is zero, and one static
    scale is exceeded."""
    args, x = ct.QuantizationArgs(**ROUNDINGS[how]), torch.randn(2, 7, 256) * 3
    x[1, 2] = 0
    static = torch.tensor(STATIC_SCALE) if how in STATIC else None
    if static is None:
        scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Module())
    else:
        scale, zero = static.view(1), torch.zeros(1)
    numbers, ours = rounded(x, how, static)
    assert torch.equal(numbers * ours, fake_quantize(x, scale, zero, args))


def test_groups_by_hand():
    """Columns from 128 on have another scale, and may be fewer than 128."""
    x = torch.zeros(1, 130, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([448.0, 17.0])
    x[0, 128:] = torch.tensor([4.48, 0.15])
    numbers, scale = rounded(x, "float8-128")
    assert scale == 1 and numbers.dtype == torch.float32
    step = x[0, 128].float() / 448
    assert numbers[0, :2].tolist() == [448, 16]
    torch.testing.assert_close(numbers[0, 128:], torch.tensor([448, 15]) * step)
    numbers, scale = rounded(torch.tensor([[1.0, -9.0, 0.3]]), "int8-static", torch.tensor(0.05))
    assert numbers.tolist() == [[20, -128, 6]]
    numbers, scale = rounded(torch.tensor([[1.0, -90, 0.3]]), "float8-static", torch.tensor(0.05))
    assert numbers.tolist() == [[20, -448, 6]]  # 20 and 6 have E4M3's 4 bits


def scales(weight, weights):
    """What covers the weight's largest values, in the shape of the strategy; of blocks, any."""
    if weights.strategy == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        return torch.empty(rows, columns).uniform_(0.002, 0.004)
    largest = 448.0 if weights.type == "float" else 2 ** (weights.num_bits - 1) - 1
    return weight.unflatten(1, (-1, weights.group_size or weight.shape[1])).abs().amax(2) / largest


def hooked(theirs, **config):
    """The model, whose layers the package's hooks round from now on."""
    ct.apply_quantization_config(theirs, ct.QuantizationConfig(**config), show_progress=False)
    for module in theirs.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = scales(module.weight, module.quantization_scheme.weights)
    return theirs


def compressed(theirs, folder):
    """Write a model that is hooked, which holds codes then; what is returned undoes that."""
    compressor = ModelCompressor.from_pretrained_model(theirs)
    compressor.compress_model(theirs)
    theirs.save_pretrained(folder)
    compressor.update_config(folder)
    return compressor


def test_weights_alone_each_in_a_number_of_bits_of_its_own(tmp_path):
    """Also the embedding and the output."""
    groups = {
        kind: ct.QuantizationScheme(targets=[kind], weights=ct.QuantizationArgs(**weights))
        for kind, weights in {"Linear": INT8, "Embedding": INT4}.items()
    }
    theirs = hooked(hugging_face.model("qwen-2"), config_groups=groups)
    expected = theirs(TOKENS).logits
    compressed(theirs, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight_packed"].dtype == torch.int32
    assert_near(load_model(str(tmp_path))(TOKENS), expected)


def written(folder, label, family="llama-biased", **changes):
    """A folder of the package's, and the model that the package rounds as it computes."""
    weights, how, layout = FILES[label]
    weights, given = ct.QuantizationArgs(**weights), ct.QuantizationArgs(**ROUNDINGS[how] | changes)
    scheme = ct.QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=given, format=layout
    )
    theirs = hugging_face.model(family, **WIDE)
    hooked(theirs, config_groups={"g": scheme}, format=layout, ignore=["lm_head"])
    for module in theirs.modules():
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(STATIC_SCALE)
    compressed(theirs, folder / label).decompress_model(theirs)
    return folder / label, theirs


def loaded(folder, **options):
    return load(checkpoint_path=str(folder), precision="float32", **options)[0]


@pytest.mark.parametrize("label", FILES)
def test_layers_compute_as_those_of_the_package(label, tmp_path):
    """Given the same x: sums of 256 float32 products differ by their order alone. Logits would not
    do: each layer has activations at a tie, their largest for one, which an ulp decides."""
    folder, theirs = written(tmp_path, label)
    assert open_checkpoint(str(folder)).saved.label == label
    for kernel in ("cpu", "reference"):
        model = loaded(folder, kernel=kernel)
        for ours, layer in zip(model.layers, theirs.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for linear, parts in (
                (ours.attention.wqkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (ours.attention.wo, (attention.o_proj,)),
                (ours.feed_forward.w13, (mlp.gate_proj, mlp.up_proj)),
                (ours.feed_forward.w2, (mlp.down_proj,)),
            ):
                x = torch.randn(1, 5, linear.in_features)
                expected = torch.cat([part(x) for part in parts], -1)
                error = (linear(x) - expected).abs().max() / expected.abs().max()
                assert error < 1e-5, (kernel, error)


def test_w8a8_is_packed_as_int8dq(tmp_path):
    """The same bytes, so the same kernels, and the step in one op; other roundings are the
    modules'."""
    folder, _ = written(tmp_path, "w8a8", "llama-3")
    found = loaded(folder, kernel="cpu").layers[0].attention.wo
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.0.self_attn.o_proj.weight"
    codes, scale = tensors[stem], tensors[f"{stem}_scale"]
    weight = PackedWeight.make(codes.float(), [codes], scale, "int", 8)
    weight = weight.replaced(activation="int8")
    layer = nn.Linear(128, 128, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantizer = Quantizer(parse("int8dq"), torch.device("cpu"), torch.float32, "cpu")
    expected = quantizer.built("", layer)
    assert isinstance(expected, PackedLinear) and torch.equal(found.weight, expected.weight)
    assert step_in_one_op(loaded(folder)) is None
    folder, _ = written(tmp_path, "w8a8-static", "llama-3")
    refusal = step_in_one_op(loaded(folder))
    assert "rounds activations to int8-static outside of its C++ kernel" in refusal


def step_in_one_op(model):
    """Why not, or None."""
    return why_not_fused(model, Generator(model, 1, 64).caches, 1)


@pytest.mark.parametrize(
    "label, changes",
    [
        ("w8a8", {"symmetric": False}),
        ("w8a8", {"num_bits": 4}),
        ("w8a8", {"strategy": "tensor"}),
        ("fp8-row", {"strategy": "group", "group_size": 64}),
    ],
)
def test_other_activations_keep_the_precision(label, changes, tmp_path):
    folder, _ = written(tmp_path, label, **changes)
    saved = open_checkpoint(str(folder)).saved
    assert saved.label == {"w8a8": "w8a16", "fp8-row": "fp8"}[label]
    assert_near(logits(loaded(folder)), load_model(str(folder))(TOKENS), 1e-3)


@pytest.mark.parametrize("label", FILES)
def test_a_folder_is_saved_with_its_rounding(label, tmp_path):
    folder, _ = written(tmp_path, label)
    saved = str(tmp_path / "saved")
    model, loading = load(checkpoint_path=str(folder), precision="float32", save=saved)
    assert torch.equal(logits(models.load(saved)), logits(model))
    assert loading.spec.rounds_activations
    with pytest.raises(UsageError, match=f"does not hold the numbers of {label};"):
        refuse_format(loading.spec, "compressed-tensors")


SCALE = "model.layers.1.mlp.up_proj.input_scale"


def damage(value):
    return lambda tensors, config: tensors.update({SCALE: torch.tensor(value)})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, c: t.pop(SCALE), f"has no tensor {SCALE}, the scale of activations that are st"),
        (damage(0.0), f"{SCALE} is torch.float32 of shape (); its values are [0.0]; expe"),
        (damage(-1.0), "its values are [-1.0]; expected is one float above 0"),
        (damage(float("nan")), "its values are [nan]; expected is one float above 0"),
        (damage(float("inf")), "its values are [inf]; expected is one float above 0"),
        (damage([1.0, 2.0]), "its values are [1.0, 2.0]; expected is one float above 0"),
        (damage(1), "input_scale is torch.int64 of shape (); its values are [1]; expected is one"),
        (lambda t, c: c.update(input_activations=[8]), "input_activations is [8]; accepted is an"),
        (lambda t, c: c.update(targets=["re:("]), "targets is ['re:(']; accepted is a list of na"),
        (lambda t, c: c.update(targets=[5]), "targets is [5]; accepted is a list of names of lay"),
    ],
)  # fmt: skip
def test_bad_scales_are_one_clear_line(change, message, tmp_path):
    folder = changed(tmp_path, change)
    for reads in (models.load, load_model):
        assert message in refusal(CheckpointError, reads, str(folder))


def changed(folder, change):
    """A static folder after change(tensors, its group in config_groups)."""
    folder, _ = written(folder, random.choice(["w8a8-static", "fp8-static"]))
    config, group = quantization(folder)
    with rewritten(folder) as tensors:
        change(tensors, group)
    edit_config(folder, quantization_config=config)
    return folder


def quantization(folder):
    """The configuration in config.json, and its only group."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    return config, group


def test_scales_that_differ_in_one_matrix_are_one_clear_line(tmp_path):
    """gate and up are one matrix here. Without the rounding the folder is read."""
    folder = changed(tmp_path, damage(0.04))
    with pytest.raises(CheckpointError, match="gate_proj.weight rounds activations .*-static. in"):
        models.load(str(folder))
    assert load_model(str(folder)) is not None
    assert models.load(str(folder), quantization="int8wo") is not None


def with_groups(folder, *others):
    """A folder whose config has more groups: their targets, and their input_activations."""
    folder, _ = written(folder, "w8a8")
    config, group = quantization(folder)
    groups = [group, *({**group, "targets": [a], "input_activations": b} for a, b in others)]
    named = {f"group_{i}": one for i, one in enumerate(groups)}
    edit_config(folder, quantization_config=config | {"config_groups": named})
    return folder


@pytest.mark.parametrize(
    "pattern, message",
    [
        (r"((.)+|(.)+)+(?<=\d)", "takes more than 0.1 s of comparing with a layer's name; write a"),
        (r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5\6\7\d", "config: target 're:(.*)(.*)(.*)(.*)("),
        ("(?R)", "config: target 're:(?R)' takes more than 0.1 s"),
        ("x" * 1001, "patterns behind re:, of at most 1000 characters"),
        (r"([a-z._0-9]+)+!", None),  # which `re` compares without end
        (r"(.+)+\d$", None),
        ("(a+)+$", None),
    ],
)
def test_a_pattern_of_targets_takes_a_bounded_time(pattern, message, tmp_path):
    folder = with_groups(tmp_path, (f"re:{pattern}", None))
    start = time.process_time()
    if message is None:
        assert open_checkpoint(str(folder)).saved.label == "mixed"
    else:
        assert message in refusal(CheckpointError, lambda: open_checkpoint(str(folder)).saved)
    assert time.process_time() - start < 1


def test_groups_of_layers_round_by_their_targets(tmp_path):
    folder = with_groups(
        tmp_path,
        ("re:.*self_attn.*", ROUNDINGS["float8-row"]),
        ("model.layers.1.self_attn.o_proj", None),
    )
    saved, stored = open_checkpoint(str(folder)).saved, "stored-int-8-0-float32-none"
    assert saved.label == "mixed"
    found = {name: scheme for name, (scheme, _) in saved.layers.items() if "layers.1" in name}
    assert found == {
        "layers.1.attention.wqkv": f"{stored}-float8-row",
        "layers.1.attention.wo": stored,
        "layers.1.feed_forward.w13": f"{stored}-int8",
        "layers.1.feed_forward.w2": f"{stored}-int8",
    }


@pytest.mark.parametrize(
    "label, how",
    [
        ("fp8", {}),
        ("fp8-row", {"activation_scheme": "dynamic"}),
        ("fp8-static", {"activation_scheme": "static"}),
        ("fp8-128", {"activation_scheme": "dynamic", "weight_block_size": [32, 128]}),
        ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [32, 64]}),
        ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [32, 128],
                 "scale_fmt": "ue8m0"}),
    ],
)  # fmt: skip
def test_fp8_folders(label, how, tmp_path):
    """As transformers' FP8Linear has them, whose kernels need a card."""
    folder, block, static = tmp_path, how.get("weight_block_size"), torch.tensor(STATIC_SCALE)
    hugging_face.model("llama-3", **WIDE).save_pretrained(folder)
    with rewritten(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight, stem = tensors[name], name.removesuffix("weight")
            rows, columns = block or weight.shape
            sizes = len(weight) // rows, weight.shape[1] // columns
            scale = torch.rand(sizes) / 100 + 0.002
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{stem}weight_scale_inv" if block else f"{stem}weight_scale"] = scale
            if label == "fp8-static":
                kind = "activation_scale" if "layers.0" in name else "input_scale"
                tensors[f"{stem}{kind}"] = static.bfloat16()
    edit_config(folder, quantization_config={"quant_method": "fp8", **how})
    assert open_checkpoint(str(folder)).saved.label == label
    model, exact = loaded(folder), load_model(str(folder))
    for ours, floats in zip(model.layers, exact.layers, strict=True):
        x = numbers = torch.randn(3, 256) * 4
        if label != "fp8":
            name = label.replace("fp8", "float8")
            numbers, scale = rounded(x, name, static.bfloat16().float() if name in STATIC else None)
            numbers = numbers * scale
        expected = numbers.double() @ floats.feed_forward.w2.weight.double().T
        assert_near(ours.feed_forward.w2(x), expected, 1e-5)
