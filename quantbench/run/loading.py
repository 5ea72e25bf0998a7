"""Loading: it makes a plan into a quantized model on its device.

loaded = load(plan, report, say)
loaded.model, loaded.kernels            # "torchao (88 layers), reference (1 layer)"
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quantbench import devices
from quantbench.experts.slow import TierError
from quantbench.experts.tiers import Tiers
from quantbench.log.config import RunConfig, Unsaid
from quantbench.models.checkpoints.load import load_config, load_model, tokenizer_folder
from quantbench.models.checkpoints.saved import How, Saver, Stages, files_of, how_saved
from quantbench.models.checkpoints.sources import locate
from quantbench.models.checkpoints.tensor_files import drop_pages
from quantbench.models.llama import Transformer
from quantbench.models.split import Split
from quantbench.models.tokenizer import Tokenizer
from quantbench.quantize.autoquant import choose as autoquant
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Selection, Spec, parse
from quantbench.run import calibration, compiling
from quantbench.run.cutting import RankStages
from quantbench.run.decoding import compiles_anyway, may_be_fused
from quantbench.run.plan import Plan, scheme_of, tokenizer_of
from quantbench.run.tiers import open_tiers, settle

Report = Callable[[int, int], None]
Say = Callable[[str], None]
SECONDS_BETWEEN_LINES = 5  # of progress, while autoquant prepares its candidates


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded and quantized."""

    model: Transformer
    kernels: str  # of the linear layers: "torchao (88 layers), reference (1 layer)"
    peak_memory: dict[str, int]  # while loading: bytes by kind, as devices.peak_memory gives them
    quantize_seconds: float = 0.0  # of loading: for quantizing, and for packing as kernels read


def load(
    plan: Plan, report: Report, say: Say, saved: Path | None = None, saver: Saver | None = None
) -> Loaded:
    """Load and quantize the model. Meanwhile the compiler is prepared, if the run will compile.

    report: called as (bytes loaded, total bytes). say: called with lines of progress. saved: the
    folder from which to read this very model, quantized; saver: writes it as --save does
    (run/saved_model.py). Raises CheckpointError for a checkpoint that cannot be read, KernelError
    for a layer that no kernel supports.
    """
    devices.reset_peak_memory(plan.device)
    config = plan.config
    if saved:
        config = dataclasses.replace(config, checkpoint_path=str(saved), num_layers=None)
    loading = Loading(config, plan.spec, plan.device, plan.tokenizer, plan.split)
    loading.saver = saver or loading.own_saver()
    try:
        loading.tiers = open_tiers(plan, loading.known_quantizer, say)
    except TierError:
        if loading.saver:
            loading.saver.give_up()
        raise
    preparation = compiling.Preparation(plan.device)
    if plan.spec.scheme is not None:  # autoquant times kernels: nothing else may run meanwhile
        if compiles_anyway(plan.config, plan.architecture, plan.device):
            preparation.begin()
        elif plan.config.compile and plan.architecture.mixture is None:
            loading.on_layer = lambda layer: None if may_be_fused(layer) else preparation.begin()
    model = loading.load(report, say)
    if loading.tiers:
        # What was read of experts lies in the slow tier now.
        drop_pages(files_of(locate(config.checkpoint_path, weights=True)))
        settle(plan, loading.tiers, model, say)
    preparation.wait()
    peaks = devices.peak_memory(plan.device)
    return Loaded(model, loading.kernels, peaks, loading.quantize_seconds)


def load_quantized(
    checkpoint_path: str,
    device: str | torch.device = "cpu",
    precision: torch.dtype | None = None,
    quantization: str = "none",
) -> Transformer:
    """The implementation of models.load, which documents it."""
    dtype = precision or torch.float32
    how = how_saved(locate(checkpoint_path))
    if how and precision is None:
        dtype = getattr(torch, how.precision)
    config = RunConfig(
        checkpoint_path=checkpoint_path,
        device=str(device),
        precision=str(dtype).removeprefix("torch."),
        quantization=Unsaid("none") if quantization == "none" else quantization,
    )
    spec = scheme_of(config, parse(quantization))
    loading = Loading(config, spec, devices.resolve(config.device))
    return loading.load(lambda done, total: None, lambda line: None)


class _Watched:
    """A quantizer (models.checkpoints.saved.Stages) whose layers are shown to `see` when built."""

    def __init__(self, stages: Stages, see: Callable[[nn.Module], None]) -> None:
        self.stages, self.see = stages, see
        self.seconds = 0.0  # for both stages of all layers

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        started = time.perf_counter()
        layer = self.stages.quantized(name, module)
        self.seconds += time.perf_counter() - started
        return layer

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        started = time.perf_counter()
        built = self.stages.built(name, layer)
        self.seconds += time.perf_counter() - started
        self.see(built)
        return built


class Loading:
    """The loading of one model. Afterwards `quantizer` knows which kernels the layers use.

    Raises KernelError for a scheme whose kernel cannot run, before any weights are read.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Spec | Selection,
        device: torch.device,
        tokenizer: Tokenizer | None = None,
        split: Split | None = None,
    ) -> None:
        """tokenizer: for calibration; the checkpoint's own if not given."""
        self.config, self.spec, self.device, self.tokenizer = config, spec, device, tokenizer
        self.split = split
        self.precision: torch.dtype = getattr(torch, config.precision)
        self.how = how_saved(locate(config.checkpoint_path))
        self.choices: list[autoquant.Choice] = []
        # Called with every embedding, norm and linear layer as soon as it has its kernel.
        self.on_layer: Callable[[nn.Module], None] = lambda layer: None
        self.quantize_seconds = 0.0
        self.saver: Saver | None = None  # of --save, if not given
        self.tiers: Tiers | None = None  # where experts go as they arrive
        if spec.scheme:  # autoquant's quantizer is made in `load`
            self.quantizer: Quantizer | autoquant.AutoQuantizer = Quantizer(
                spec.scheme, device, self.precision, config.kernel
            )

    @torch.no_grad()
    def load(self, report: Report, say: Say) -> Transformer:
        """The quantized model; arguments and errors as for the function `load`."""
        if self.spec.scheme is None:
            self.quantizer = self._autoquantizer(say)
        elif isinstance(self.quantizer, Quantizer):
            self.quantizer.say = say
        saver, split = self.saver or self.own_saver(), self.split
        part = RankStages(self.quantizer, split, whole=saver is not None) if split else None
        stages = _Watched(part or self.quantizer, self.on_layer)
        kept: Stages = self.tiers.after(stages) if self.tiers else stages
        transform = saver.after(kept) if saver else kept
        try:
            model = self._model(report, self.config.num_layers, transform, self._pruning(), part)
            experts = self.tiers.keep() if self.tiers else None
        except TierError:  # a disk that is full, for example
            if saver:
                saver.give_up()
            raise
        self.quantize_seconds = stages.seconds
        if saver:
            chosen = (self.quantizer.layers or {}).items()
            whole = model.split.whole if model.split else model.config
            saver.finish(whole, {name: list(how) for name, how in chosen} or None, experts)
            if self.config.save:
                say(f"Saved to {saver.folder}: --checkpoint_path {saver.folder} loads it")
        return model

    def own_saver(self) -> Saver | None:
        """Writes the model as --save asks for; None without it. Raises NotSaved."""
        first = self.split is None or self.split.ranks.rank == 0
        if not self.config.save or not first:
            return None
        how = How(str(self.spec), self.config.precision)
        folder = tokenizer_folder(self.config.checkpoint_path)
        return Saver(Path(self.config.save), how, folder)

    @property
    def known_quantizer(self) -> Quantizer | None:
        """The quantizer, where it is known before weights are read."""
        known = self.spec.scheme is not None and isinstance(self.quantizer, Quantizer)
        return self.quantizer if known else None  # type: ignore[return-value]

    @property
    def kernels(self) -> str:
        """The kernels in use: "torchao", or "torchao (88 layers), reference (1 layer)"."""
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
        part: RankStages | None = None,
    ) -> Transformer:
        path = self.config.checkpoint_path
        how = self.device, self.precision, num_layers, transform, report, ready
        if part is None:
            return load_model(path, *how)
        return load_model(path, *how, part.split, part.reads_whole)

    def _calibration(self) -> torch.Tensor:
        path = self.config.checkpoint_path
        tokenizer = self.tokenizer or tokenizer_of(path, load_config(path).vocab_size)
        return calibration.token_ids(self.config.calibration_text, tokenizer, self.device)

    def _autoquantizer(self, say: Say) -> autoquant.AutoQuantizer:
        """Choose a scheme for each shape of layer, on the inputs of the first layer and of the
        output; for a saved checkpoint, take the choices that were saved."""
        if self.how:
            return autoquant.AutoQuantizer([], self.device, self.precision, self.how.layers)
        say("Timing every candidate for each shape of layer …")
        last_line = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last_line
            if time.monotonic() > last_line + SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                say(f"Timed {done} of {total} shapes")

        self.choices = autoquant.choose(
            calibration.samples(self._model(None, 1), self._calibration()),
            self.spec,
            self.config.batch_size,
            self.config.min_sqnr,
            autoquant.default_cache(),
            report,
            compile=self.config.compile,
            kernel=self.config.kernel,
        )
        say(autoquant.table(self.choices))
        return autoquant.AutoQuantizer(self.choices, self.device, self.precision)

    def _pruning(self) -> Callable[[str, nn.Module], None] | None:
        """For sparse-marlin-wanda: the function that prunes each part as soon as it is loaded."""
        if self.how or not self.spec.prunes:
            return None
        return calibration.pruning(load_config(self.config.checkpoint_path), self._calibration())
