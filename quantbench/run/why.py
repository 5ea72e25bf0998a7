"""Why a run is as fast as it is: what ran it, and what kept something faster from running."""

import itertools
from collections.abc import Mapping

from quantbench.models.config import compiles
from quantbench.run import energy
from quantbench.run.energy import NotCounted
from quantbench.run.facts import Facts, Measured, speculation_of

STEP = {
    "cpu-step": "a decoding step is one C++ op",
    "modules": "a decoding step runs the model's modules",
}


def of_limit(share: float, step_bytes: float, bytes_per_s: float) -> str:
    """How near a step came to the limit. share: seconds that memory needs ÷ those it took."""
    return (
        f"a step runs at {share:.0%} of what memory allows for these bytes "
        f"({step_bytes / 1e9:.2f} GB at {bytes_per_s / 1e9:.1f} GB/s)"
    )


def reasons(measured: Measured) -> list[str]:
    """Sentences without a full stop: how samples scatter, what else ran, and what ran this."""
    trust, facts = measured.trust, measured.facts
    sentences = [trust.spread.sentence()]
    if trust.machine:
        load = trust.load_average
        average = "" if load is None else f"; load average {load:.1f}"
        sentences.append(f"{trust.machine.sentence()}{average}")
    step = STEP.get(facts.decoder, "a decoding step")
    sentences.append(f"{step} (decoder {facts.decoder}), products run on kernel {facts.kernel}")
    if facts.parallel:
        ranks, through = facts.parallel.ranks, facts.parallel.backend
        sentences.append(f"{ranks} ranks share the model and exchange numbers through {through}")
    if facts.config.compile and facts.decoder == "cpu-step":
        sentences.append("--compile had no effect: decoder cpu-step runs a step as one C++ op")
    sentences += _experts(measured)
    if drafts := speculation_of(measured.samples):
        sentences.append(f"speculation ({facts.config.speculate}): {drafts.sentence()}")
        if facts.config.checkpoint_path.startswith("dummy:") or facts.config.prefill_size:
            sentences.append("weights or prompt are random, so acceptance says nothing here")
    if isinstance(measured.energy, NotCounted):
        sentence = energy.sentence(None, None, measured.energy.why_not)
        sentences += [sentence] if sentence else []
    sentences += held_back(facts, measured.kernels)
    if measured.limit_share and measured.bandwidth:
        read = facts.mean_step_bytes
        sentences.append(of_limit(measured.limit_share, read, measured.bandwidth))
    return sentences


def _experts(measured: Measured) -> list[str]:
    """Experts in two tiers: how many are in fast memory, hits, and milliseconds."""
    where, phases = measured.facts.experts, measured.expert_phases
    if where is None or not phases:
        return []
    policy = where.policy + (f": {where.followed}" if where.policy == "auto" else "")
    return [
        f"{where.fast} of {where.every} experts are in fast memory (placed {where.placement}, "
        f"policy {policy}), all on {where.slow}",
        *(f"{name}: {figures.sentence()}" for name, figures in phases.items() if figures.passes),
    ]


def held_back(facts: Facts, kernels: Mapping[str, str | None]) -> list[str]:
    """What keeps a run from being faster; sentences without a full stop.

    kernels: of the run's scheme, each with why it cannot run here; None where it can.
    """
    sentences = [_kernel(facts, kernels)]
    if facts.given_up:
        anew = "" if facts.scheme == "none" else f", and quantized anew as {facts.scheme}"
        sentences.append(
            f"the file's weights are quantized ({facts.given_up}); they were read as floats{anew}: "
            "--quantization as-is keeps them"
        )
    if facts.decoder_reason:
        sentences.append(f"a step is not one op (decoder {facts.decoder}): {facts.decoder_reason}")
    if facts.attention_reason:
        sentences.append(f"attention runs on plain torch: {facts.attention_reason}")
    if facts.decoder == "cpu-step":
        pass  # one C++ op leaves nothing to compile
    elif not compiles(facts.architecture.mixture, facts.device.type, facts.experts is not None):
        condition = "--compile had no effect" if facts.config.compile else "nothing is compiled"
        reason = "the router's output decides which experts a step computes"
        if facts.experts is not None:
            reason = "a compiled step cannot fetch experts from a second tier of memory"
        sentences.append(f"{condition}: {reason}")
    elif not facts.config.compile:
        sentences.append("nothing is compiled: each step pays for Python (--compile)")
    return [sentence for sentence in sentences if sentence]


def _kernel(run: Facts, kernels: Mapping[str, str | None]) -> str | None:
    if "reference" in run.kernel:
        why = "; ".join(
            f"{name}: {reason}"
            for name, reason in itertools.takewhile(lambda x: x[0] != "reference", kernels.items())
            if reason
        )
        return "plain torch (kernel reference) unpacks the weights at every step" + (
            f", the only kernel that runs here ({why})" if why else ""
        )
    if "," in run.kernel:
        return f"not every layer's shape fits its fastest kernel: {run.kernel}"
    return None
