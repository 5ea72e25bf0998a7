"""Whether a plan's kernels and decoder can run, told from shapes before weights are read."""

from quantbench.errors import KernelError
from quantbench.run import decoding
from quantbench.run.plan import Plan
from quantbench.run.sizes import shapes_of


def check(plan: Plan) -> None:
    """Raise KernelError for a shape without a kernel, or a kernel or decoder that was named and
    cannot run."""
    config, shape = plan.config, plan.architecture
    if plan.spec.scheme is None:
        return
    settings = plan.precision, config.kernel
    shapes = shapes_of(shape, plan.spec.scheme, plan.device, *settings)
    if shapes.reason:
        raise KernelError(shapes.reason)
    if plan.device.type != "cpu":
        if config.decoder not in ("auto", decoding.MODULES):
            raise KernelError(f"--decoder {config.decoder} is C++ for the CPU, not {plan.device}")
        return
    kernel = decoding.attention_of(plan.cache, shape, plan.precision, plan.device).name
    where = plan.precision, "meta", kernel
    of_one = decoding.caches_of(plan.cache, shape, 1, 1, *where, layers=1)
    decoding.name_of(config.decoder, shapes.model, of_one, config.batch_size)
