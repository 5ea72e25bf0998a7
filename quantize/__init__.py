"""Quantization schemes: their names (spec), and what carries them out (registry).

torchao.quantize_(model, quantize.config("int4wo-64"))      # any nn.Module
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantbench.quantize.torchao_config import QuantizeConfig

# Without CUDA torchao reports on every import the CUDA extensions that it could not load, and one
# of its enums makes torch's pytree warn. Neither matters to anybody who runs a benchmark.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


def config(scheme: str, kernel: str = "auto") -> "QuantizeConfig":
    """A torchao config: `torchao.quantize_(model, config("int4wo-64"))` quantizes any nn.Module.

    scheme: a name as --quantization takes it, but no scheme that is calibrated on a text. kernel:
    as --kernel; auto takes for each layer the fastest that runs on its weight's device, in its
    weight's dtype.

    Every module that quantize_'s filter_fn lets through is changed in place: it keeps its bias and
    its hooks, and multiplies by the scheme's numbers from then on, without gradients. By default
    these are all nn.Linear. Embeddings stay as they are (embed-int8 needs a filter_fn that lets
    nn.Embedding through, too), also where an output layer is tied to one; layers of other classes,
    such as GPT-2's Conv1D, are not nn.Linear and stay as they are.

    Raises UsageError for a name that is no scheme. quantize_ raises KernelError where no such
    kernel runs on the device, and, naming the layer, for a shape that the scheme or its kernels
    cannot take, for a module that is no plain linear layer, and for one that is quantized already;
    CheckpointError for weights that are NaN or infinite. Layers before that one are quantized by
    then. To leave a layer in full precision, give a filter_fn that returns False for it.
    """
    from quantbench.quantize.torchao_config import QuantizeConfig

    return QuantizeConfig(scheme, kernel)
