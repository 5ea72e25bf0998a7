"""From a checkpoint to a quantized model on the device: what calibration, autoquant, saving and
reading back need of each other, in one place.

    loading = Loading(config, spec, device, tokenizer)
    model = loading.load(report, say)
    loading.quantizer.ran           # Counter({"torchao": 89})
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import files
from benchlog.config import RunConfig, Unsaid
from errors import CheckpointError, UsageError
from models.checkpoints.load import load_config, load_model, tokenizer_folder
from models.checkpoints.names import SAVED
from models.checkpoints.saved import How, Saver, how_saved
from models.checkpoints.sources import EMBEDDED, locate
from models.llama import Transformer, rotation
from models.tokenizer import Tokenizer
from quantize import pruning as wanda
from quantize.autoquant import choose as autoquant
from quantize.registry import Quantizer
from quantize.spec import Selection, SparseMarlin, Spec, parse

Report = Callable[[int, int], None]
Say = Callable[[str], None]
CALIBRATION_ROWS, CALIBRATION_TOKENS = 8, 256


def scheme_of(config: RunConfig) -> Spec | Selection:
    """What --quantization names, or what the checkpoint was saved with.

    Raises UsageError where the two contradict each other.
    """
    asked = parse(config.quantization)
    how = how_saved(locate(config.checkpoint_path))
    if how is None:
        return asked
    try:
        saved = parse(how.scheme)
        for scheme, _ in how.layers.values():
            parse(scheme)
    except UsageError as error:
        raise CheckpointError(f"{config.checkpoint_path}/{SAVED}: {error}") from None
    if config.save:
        raise UsageError(
            f"--save: {config.checkpoint_path} is quantized and saved; copy the folder"
        )
    if config.quantization != how.scheme and not isinstance(config.quantization, Unsaid):
        raise UsageError(
            f"--quantization {asked}: {config.checkpoint_path} was saved as {saved}; leave "
            "--quantization out, or load the full-precision checkpoint"
        )
    return saved


class Loading:
    """One model being loaded; `quantizer` says afterwards which kernels its layers got."""

    def __init__(
        self,
        config: RunConfig,
        spec: Spec | Selection,
        device: torch.device,
        tokenizer: Tokenizer,
    ) -> None:
        self.config, self.spec, self.device, self.tokenizer = config, spec, device, tokenizer
        self.precision: torch.dtype = getattr(torch, config.precision)
        self.how = how_saved(locate(config.checkpoint_path))
        self.choices: list[autoquant.Choice] = []
        if spec.scheme:  # a kernel that cannot run is known before any weights
            self.quantizer: Quantizer | autoquant.AutoQuantizer = Quantizer(
                spec.scheme, device, self.precision, config.kernel
            )

    @torch.no_grad()
    def load(self, report: Report, say: Say) -> Transformer:
        """The model, quantized; `report` gets bytes done and in all, `say` a line now and then."""
        if isinstance(self.spec, Selection):
            self.quantizer = self._autoquantizer(self.spec, say)
        else:
            self.quantizer.say = say
        transform: Callable[[str, nn.Module], nn.Module] = self.quantizer
        saver = None
        if self.config.save:
            how = How(str(self.spec), self.config.precision)
            folder = tokenizer_folder(self.config.checkpoint_path)
            saver = Saver(Path(self.config.save), how, folder)
            transform = saver.after(self.quantizer)
        model = self._model(report, self.config.num_layers, transform, self._pruning())
        if saver:
            layers = self.quantizer.layers
            saver.finish(model.config, layers and {n: list(how) for n, how in layers.items()})
            say(f"Saved to {self.config.save}: --checkpoint_path {self.config.save} loads it")
        return model

    @property
    def kernels(self) -> str:
        """What the layers got: "torchao", or "torchao (88 layers), reference (1 layer)"."""
        ran = self.quantizer.ran.most_common()
        if len(ran) <= 1:
            return ran[0][0] if ran else "torch"
        return ", ".join(f"{name} ({n} layer{'s' * (n > 1)})" for name, n in ran)

    def _model(
        self,
        report: Report | None,
        num_layers: int | None,
        transform: Callable[[str, nn.Module], nn.Module] | None = None,
        ready: Callable[[str, nn.Module], None] | None = None,
    ) -> Transformer:
        path = self.config.checkpoint_path
        return load_model(path, self.device, self.precision, num_layers, transform, report, ready)

    def _calibration(self) -> Tensor:
        """Token ids of the calibration text, (rows, tokens), on the device."""
        path = Path(self.config.calibration_text or EMBEDDED / "heldout.txt")
        text = files.read_text("--calibration_text", path)
        ids = self.tokenizer.encode(text)[: CALIBRATION_ROWS * CALIBRATION_TOKENS]
        rows, length = min(CALIBRATION_ROWS, len(ids)), len(ids) // CALIBRATION_ROWS
        if length < 2:
            raise UsageError(
                f"--calibration_text {path}: {len(ids)} tokens are too few; {2 * CALIBRATION_ROWS} "
                f"is the least, {CALIBRATION_ROWS * CALIBRATION_TOKENS} are used"
            )
        return torch.tensor(ids[: rows * length], device=self.device).view(rows, length)

    def _autoquantizer(self, spec: Selection, say: Say) -> autoquant.AutoQuantizer:
        """Choose per layer shape, on the first layer's and the output's own inputs; or read back
        what was chosen when the checkpoint was saved."""
        if self.how:
            return autoquant.AutoQuantizer([], self.device, self.precision, self.how.layers)
        say("Timing every candidate for each shape of layer …")
        spoken = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal spoken
            if time.monotonic() > spoken + 5:
                spoken = time.monotonic()
                say(f"{done} of {total} candidates are ready to be timed")

        self.choices = autoquant.choose(
            self._samples(),
            spec,
            self.config.batch_size,
            self.config.min_sqnr,
            autoquant.default_cache(),
            report,
            compile=self.config.compile,
            kernel=self.config.kernel,
        )
        say(autoquant.table(self.choices))
        return autoquant.AutoQuantizer(self.choices, self.device, self.precision)

    def _samples(self) -> list[autoquant.Sample]:
        """The linear layers of the model cut to one layer, each with what the calibration text
        feeds it."""
        model = self._model(None, 1)
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        inputs: dict[str, Tensor] = {}
        for name, layer in linears.items():
            layer.register_forward_pre_hook(
                lambda _, x, name=name: inputs.__setitem__(name, x[0].flatten(0, -2))
            )
        model(self._calibration())
        return [autoquant.Sample(name, layer, inputs[name]) for name, layer in linears.items()]

    def _pruning(self) -> Callable[[str, nn.Module], None] | None:
        """For sparse-marlin-wanda: each part of the model pruned as it becomes ready."""
        if self.how or not isinstance(self.spec, SparseMarlin) or not self.spec.wanda:
            return None
        run = self._through_the_model()
        next(run)
        return lambda name, part: run.send((name, part))

    def _through_the_model(self) -> Iterator[None]:
        """Carry the calibration text through parts of the model as they are sent, pruning each.

        A layer is run before it is pruned, so that every norm is one of the unpruned model.
        """
        architecture = load_config(self.config.checkpoint_path)
        x = self._calibration()
        positions = torch.arange(x.shape[1], device=self.device)
        cos, sin = rotation(architecture, positions)
        while True:
            name, part = yield
            if isinstance(part, nn.Linear):  # the output: nobody reads the logits
                wanda.prune(part, x.flatten(0, -2).float().norm(dim=0))
                continue
            inputs = (x, cos, sin, None) if name.startswith("layers.") else (x,)
            outputs: list[Tensor] = []
            wanda.prune_linears(part, lambda: outputs.append(part(*inputs)))  # noqa: B023
            x = outputs[0]
