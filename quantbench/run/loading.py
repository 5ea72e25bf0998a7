"""Loading: it makes a plan into a quantized model on its device.

loaded = load(plan, report, say)
loaded.model, loaded.kernels            # "torchao (88 layers), reference (1 layer)"
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantbench import devices
from quantbench.log.config import RunConfig, Unsaid
from quantbench.models.formats import Checkpoint, open_checkpoint, saver_of
from quantbench.models.formats.base import SavedScheme
from quantbench.models.llama import Transformer
from quantbench.models.loading import Stages, load_model
from quantbench.progress import Report, Say
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import AsIs, Selection, Spec
from quantbench.run.plan import Plan, scheme_of

if TYPE_CHECKING:
    from quantbench.experts.tiers import Tiers
    from quantbench.models.formats.saved import SavedModel
    from quantbench.models.formats.saver import Saver
    from quantbench.models.split import Split
    from quantbench.quantize.per_layer import MixedQuantizer


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    kernels: str  # of the linear layers: "torchao (88 layers), reference (1 layer)"
    peak_memory: dict[str, int]  # while loading: bytes by kind, as devices.peak_memory gives them
    quantize_seconds: float = 0.0  # of loading: for quantizing, and for packing as kernels read


def load(
    plan: Plan,
    report: Report,
    say: Say,
    saved: SavedModel | None = None,
    saver: Saver | None = None,
) -> Loaded:
    """Load and quantize the model.

    report: called as (bytes loaded, total bytes). say: called with lines of progress. saved: the
    same model, quantized already; saver: writes it as --save does (run/saved_model.py). Raises
    CheckpointError for a checkpoint that cannot be read, KernelError for a layer that no kernel
    supports.
    """
    devices.reset_peak_memory(plan.device)
    config = dataclasses.replace(plan.config, num_layers=None) if saved else plan.config
    checkpoint = saved or plan.checkpoint
    loading = Loading(config, plan.spec, plan.device, checkpoint, plan.split)
    loading.saver = saver or loading.saver
    try:
        if config.expert_memory is not None:
            from quantbench.experts.loading import open_tiers, settle
            from quantbench.models.formats.saved import EXPERTS

            quantizer = getattr(loading, "quantizer", None)  # none before autoquant has measured
            known = quantizer if isinstance(quantizer, Quantizer) else None
            loading.tiers = open_tiers(plan, known, say)
            if loading.saver and (file := loading.saver.folder / EXPERTS).exists():
                loading.saver.unfinished.note(EXPERTS, file)
        model = loading.load(report, say)
    except BaseException:  # a disk that is full, Ctrl-C
        if loading.saver:
            loading.saver.clear()
        raise
    if loading.tiers:
        from quantbench.models.formats.tensor_files import drop_pages

        drop_pages(plan.checkpoint.files)  # experts are read from the slow tier from now on
        settle(plan, loading.tiers, model, say)
    peaks = devices.peak_memory(plan.device)
    return Loaded(model, loading.kernels, peaks, loading.quantize_seconds)


def load_quantized(
    checkpoint_path: str,
    device: str | torch.device = "cpu",
    precision: torch.dtype | None = None,
    quantization: str | None = None,
) -> Transformer:
    """The implementation of models.load, which documents it."""
    checkpoint = open_checkpoint(checkpoint_path)
    saved = checkpoint.saved
    stored = (saved.precision if saved else None) or "float32"
    config = RunConfig(
        checkpoint_path=checkpoint_path,
        device=str(device),
        precision=str(precision).removeprefix("torch.") if precision else stored,
        quantization=Unsaid("none") if quantization is None else quantization,
    )
    spec, checkpoint = scheme_of(config, checkpoint)
    loading = Loading(config, spec, devices.resolve(config.device), checkpoint)
    return loading.load(lambda done, total: None, lambda line: None)


def saved_scheme(spec: Spec | Selection, precision: str) -> SavedScheme:
    """What a saved model notes of its scheme: one of a scheme per layer is read back as it is."""
    if isinstance(spec, AsIs):
        return SavedScheme(str(AsIs()), precision, label=spec.name)
    return SavedScheme(str(spec), precision)


class Loading:
    """The loading of one model, as the stages that each of its layers goes through:
    quantize, save, cut to this rank's part, pack for the kernel, place in a tier of memory.

    Afterwards `quantizer` knows which kernels the layers use. Raises KernelError for a scheme whose
    kernel cannot run, before any weights are read.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: Spec | Selection,
        device: torch.device,
        checkpoint: Checkpoint,
        split: Split | None = None,
    ) -> None:
        """Raises NotSaved where --save cannot write."""
        self.config, self.spec, self.device = config, spec, device
        self.checkpoint, self.split = checkpoint, split
        self.precision: torch.dtype = getattr(torch, config.precision)
        self.quantize_seconds = 0.0  # for quantizing and packing all layers
        self.tiers: Tiers | None = None  # where experts go as they arrive
        if spec.scheme:  # autoquant's quantizer is made in `load`
            from quantbench.quantize.registry import quantizer_of

            self.quantizer: Quantizer | MixedQuantizer = quantizer_of(
                spec.scheme, device, self.precision, config.kernel
            )
        self.saver: Saver | None = None
        if config.save and (split is None or split.ranks.rank == 0):
            saved = saved_scheme(spec, config.precision)
            self.saver = saver_of(config.format)(Path(config.save), saved, self.checkpoint)

    @torch.no_grad()
    def load(self, report: Report, say: Say) -> Transformer:
        """The quantized model; arguments and errors as for the function `load`."""
        if self.spec.scheme is None:
            from quantbench.run import calibration  # few schemes are calibrated

            self.quantizer = calibration.autoquantizer(self, say)
        elif isinstance(self.quantizer, Quantizer):
            self.quantizer.say = say
        saver, split = self.saver, self.split
        cut = calibrate = None
        if self.spec.scheme and self.spec.calibrated and not self.checkpoint.saved:
            from quantbench.run import calibration

            calibrate = calibration.Calibration(self, say)
        if split:
            from quantbench.parallel.split_loading import RankStages

            saved = self.checkpoint.saved is not None
            cut = RankStages(self.quantizer, split, whole=saver is not None, saved=saved)
        self.stages: Stages = cut or self.quantizer
        model = load_model(
            self.checkpoint,
            self.device,
            self.precision,
            self.config.num_layers,
            self.tiers.after(self) if self.tiers else self,
            report,
            calibrate,
            split,
            cut.reads_whole if cut else lambda name: False,
            saver,
        )
        if saver:
            layers = {name: list(choice) for name, choice in (self.quantizer.layers or {}).items()}
            experts = self.tiers is not None and self.tiers.keep()
            saver.finish(split.whole if split else model.config, layers, experts)
            if self.config.save:
                say(f"Saved to {saver.folder}: --checkpoint_path {saver.folder} loads it")
        return model

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        with self._timed():
            return self.stages.quantized(name, module)

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        with self._timed():
            return self.stages.built(name, layer)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.quantize_seconds += time.perf_counter() - started

    @property
    def kernels(self) -> str:
        """The kernels in use: "torchao", or "torchao (88 layers), reference (1 layer)"."""
        ran = self.quantizer.ran.most_common()
        if len(ran) <= 1:
            return ran[0][0] if ran else "torch"
        return ", ".join(f"{name} ({n} layer{'s' * (n > 1)})" for name, n in ran)
