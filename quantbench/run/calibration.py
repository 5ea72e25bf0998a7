"""Calibration: the inputs that a text gives to a model's linear layers.

autoquant measures each shape of layer on the inputs of the first layer (`samples`). The others go
through the model layer by layer (`Calibration`): Wanda weighs each weight by the norm of its
inputs, GPTQ and AWQ choose codes and scales by the products of inputs with one another.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from quantbench import files
from quantbench.errors import UsageError
from quantbench.models.llama import Transformer
from quantbench.models.loading import load_model
from quantbench.models.registry import build
from quantbench.models.tokenizer import Tokenizer
from quantbench.progress import Say
from quantbench.quantize import autoquant, observe
from quantbench.quantize.autoquant import LayerSample
from quantbench.quantize.gptq import refined
from quantbench.quantize.packed import PackedWeight, dequantized
from quantbench.quantize.per_layer import MixedQuantizer, by_name
from quantbench.quantize.registry import with_weight
from quantbench.quantize.schemes.sparse_marlin import prune
from quantbench.quantize.spec import CALIBRATED, AsIs, Spec
from quantbench.run.awq import scale_inputs

if TYPE_CHECKING:
    from quantbench.run.loading import Loading

TEXT = Path(__file__).with_name("calibration.txt")
ROWS, TOKENS = 8, 256  # of the calibration text: 8 sequences of 256 tokens
HESSIAN_ROWS = 32  # for GPTQ and AWQ: more tokens than most layers have columns
SAMPLED_EXPERTS = 2  # of a layer, for autoquant


def autoquantizer(loading: "Loading", say: Say) -> MixedQuantizer:
    """Choose a scheme for each shape of layer, on the inputs of the first layer and of the output;
    for a saved checkpoint, take the choices that were saved."""
    checkpoint, config = loading.checkpoint, loading.config
    placement = loading.device, loading.precision
    if saved := checkpoint.saved:
        return MixedQuantizer(by_name(saved.layers), *placement)
    say("Timing every candidate for each shape of layer …")
    choices = autoquant.choose(
        samples(load_model(checkpoint, *placement, num_layers=1), _text(loading)),
        loading.spec,
        config.batch_size,
        config.min_sqnr,
        lambda done, total: say(f"Timed {done} of {total} shapes"),
        compile=config.compile,
        kernel=config.kernel,
    )
    say(autoquant.table(choices))
    return MixedQuantizer(autoquant.by_shape(choices), *placement)


def _text(loading: "Loading", rows: int = ROWS) -> Tensor:
    """The token ids of the calibration text."""
    checkpoint = loading.checkpoint
    tokenizer = checkpoint.tokenizer(checkpoint.config().vocab_size)
    return token_ids(loading.config.calibration_text, tokenizer, loading.device, rows)


def token_ids(
    path: str | None, tokenizer: Tokenizer, device: torch.device, rows: int = ROWS
) -> Tensor:
    """The beginning of a text, (rows, tokens) int64: rows · TOKENS tokens, or a shorter text.

    path: --calibration_text; the embedded text if None. Raises UsageError for a text that cannot be
    read, or has fewer than 2 tokens a row.
    """
    source = Path(path or TEXT)
    text = files.read_text("--calibration_text", source)
    ids = tokenizer.encode(text)[: rows * TOKENS]
    length = len(ids) // rows
    if length < 2:
        raise UsageError(
            f"--calibration_text {source}: {len(ids)} tokens are too few; {2 * rows} is the least, "
            f"{rows * TOKENS} are used"
        )
    return torch.tensor(ids[: rows * length], device=device).view(rows, length)


def samples(model: Transformer, ids: Tensor) -> list[LayerSample]:
    """Every linear layer with its inputs (tokens, in_features), for token ids (B, S).

    An expert's inputs are the tokens that are routed to it. Only the SAMPLED_EXPERTS with the most
    are taken: their layers are alike, and measuring all would take minutes. Logits are not
    computed: with a large vocabulary they take most of the time.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    inputs: dict[str, Tensor] = {}
    for name, layer in linears.items():
        layer.register_forward_pre_hook(
            lambda _, x, name=name: inputs.__setitem__(name, x[0].flatten(0, -2))
        )
    inputs["output"] = model.norm(model.hidden(ids)).flatten(0, -2)
    taken = [name for name in linears if name not in _left_out(inputs)]
    return [LayerSample(name, linears[name], inputs[name]) for name in taken if name in inputs]


def _left_out(inputs: Mapping[str, Tensor]) -> set[str]:
    """The layers of experts that are not among those with the most tokens."""
    by_matrix: dict[str, list[str]] = {}
    for name in sorted(inputs, key=lambda name: -len(inputs[name])):
        if ".experts." in name:
            by_matrix.setdefault(name.rpartition(".")[2], []).append(name)
    return {name for names in by_matrix.values() for name in names[SAMPLED_EXPERTS:]}


class Calibration:
    """Gives each part of a model, as soon as it is loaded, the weights that the scheme's way makes
    of what the calibration text feeds it. It must be called for each part in the model's order, as
    `load_model` calls `ready`.

    Inputs are computed in float32. With GPTQ and AWQ a part's inputs come from the quantized parts
    before it; with Wanda from unpruned ones.
    """

    def __init__(self, loading: "Loading", say: Say) -> None:
        """say: gets a line for each layer that could not be calibrated."""
        assert isinstance(loading.spec, Spec)
        self.spec, self.quantizer, self.say = loading.spec, loading.quantizer, say
        self.of_layers = dict(loading.spec.layers) if isinstance(loading.spec, AsIs) else {}
        self.precision, self.architecture = loading.precision, loading.checkpoint.config()
        config = self.architecture
        if config.shared_layers or config.layer_input_dim:
            raise UsageError(
                f"--quantization {loading.spec}: layers of {config.name} read what others "
                "computed, and are not calibrated one by one; give a scheme without -gptq, -awq or "
                "-wanda"
            )
        self.x = _text(loading, ROWS if self.spec.way == "wanda" else HESSIAN_ROWS)
        self.positions = torch.arange(self.x.shape[1])

    def __call__(self, name: str, part: nn.Module) -> None:
        if name == "tok_embeddings":
            with torch.device("meta"):
                model = build(self.architecture)
            model.set_submodule(name, self.quantizer.quantized(name, part))
            tokens, embedded = self.x, model.embed(self.x)
            self.beside = model.beside(tokens, embedded, self.positions)
            self.x = embedded.float()
            return
        if not isinstance(part, nn.Linear):
            wide = copy.deepcopy(part)
        else:  # the output, whose logits are not needed, only its inputs
            wide = with_weight(part, part.weight.data[:1])
        wide.float()
        linears = observe.linears_of(part)
        names = {layer: ".".join(filter(None, (name, layer))) for layer in linears}
        ways = {layer: self.of_layers.get(full, self.spec).way for layer, full in names.items()}
        wanda_alone = self.spec.way == "wanda"
        outputs: list[Tensor] = []
        sums = observe.observed(
            {k: layer for k, layer in observe.linears_of(wide).items() if ways[k] in CALIBRATED},
            lambda: outputs.append(self._run(name, wide)),
            observe.squares if wanda_alone else observe.products,
        )
        if name != "output" and (scaled := {k: sums[k] for k in linears if ways[k] == "awq"}):

            def rounded(layer: str, weight: Tensor) -> Tensor:
                like = with_weight(linears[layer], weight.to(self.precision))
                return dequantized(self._rounded(names[layer], like))

            scale_inputs(wide, scaled, rounded, self.precision)
            for parameter, exact in zip(part.parameters(), wide.parameters(), strict=True):
                parameter.data.copy_(exact)
        for layer, linear in linears.items():
            if wanda_alone:
                prune(linear, sums[layer])
                continue
            weight = self._rounded(names[layer], linear)
            if ways[layer].startswith("gptq"):
                act_order = ways[layer] == "gptq"
                weight = self._refined(names[layer], linear, weight, sums[layer], act_order)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if name != "output":
                wide.get_submodule(layer).weight.data = dequantized(weight)
        self.x = outputs[0] if wanda_alone else self._run(name, wide)

    def _run(self, name: str, part: nn.Module) -> Tensor:
        """What a part makes of the text."""
        rest: tuple[Any, ...] = ()
        if name.startswith("layers."):
            rest = (*self.beside[int(name.split(".")[1])], self.positions)
        return torch.cat([part(rows, *rest) for rows in torch.split(self.x, ROWS)])

    def _refined(
        self, name: str, linear: nn.Linear, rounded: Tensor, hessian: Tensor, act_order: bool
    ) -> Tensor:
        assert isinstance(rounded, PackedWeight)
        calibrated = refined(linear.weight.data, rounded, hessian, act_order)
        if calibrated is None:
            self.say(f"{name} is rounded, not calibrated: {_why(hessian)}")
        return rounded if calibrated is None else calibrated

    def _rounded(self, name: str, linear: nn.Module) -> Tensor:
        """The linear layer's weight as its scheme has it without a text."""
        return cast(Tensor, self.quantizer.quantized(name, linear).weight.data)


def _why(hessian: Tensor) -> str:
    if not hessian.isfinite().all():
        return "the text's inputs to it are not finite"
    return "its Hessian has no inverse" if hessian.any() else "no token of the text reaches it"
