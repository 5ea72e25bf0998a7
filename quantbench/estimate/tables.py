"""Estimates as lines for the terminal: every figure with its interval, its bound and its source."""

from collections.abc import Mapping, Sequence

from quantbench.estimate.fits import Fit
from quantbench.estimate.predict import Figure, Machine, Memory, RunEstimate, Unknown
from quantbench.log.record import NO_COUNTER
from quantbench.text import aligned, counted, size


def lines(estimate: RunEstimate) -> list[str]:
    """One estimate: a row a figure, then memory by phase, parts, and warnings."""
    peak, joules = estimate.peak_memory_bytes, estimate.joules_per_token
    rows = [
        ("prompt", *_seconds(estimate.prompt_seconds)),
        ("token", *_seconds(estimate.token_seconds)),
        ("throughput", *_cells(estimate.tokens_per_second, 1.0, "tok/s")),
        ("peak memory", size(peak.value), "", peak.bound),
        ("energy", _joule(joules, " J/token"), "", joules.source),
    ]
    heads = [("", "estimated", estimate.interval, "what sets it")]
    said = [
        f"{estimate.device}: {estimate.scheme}, {estimate.kv_cache} cache",
        aligned([*heads, *rows], left={0, 3}),
        "",
        *(f"memory, {phase}: {_memory(memory)}" for phase, memory in estimate.memory.items()),
        *(f"seconds, {phase}: {_parts(parts)}" for phase, parts in estimate.parts.items()),
        f"source: {estimate.prompt_seconds.source}",
    ]
    return _warned(said, estimate.warnings)


def _warned(lines: Sequence[str], warnings: Sequence[str]) -> list[str]:
    """Every line with what makes its figures doubtful, for lines are quoted alone."""
    mark = f"  ! {'; '.join(warnings)}" if warnings else ""
    return [
        "\n".join(f"{part}{mark}" if part else part for part in line.splitlines()) for line in lines
    ]


def _seconds(figure: Figure) -> tuple[str, str, str]:
    unit, name = (1.0, "s") if figure.value >= 1 else (1e-3, "ms")
    return _cells(figure, unit, name)


def _cells(figure: Figure, unit: float, name: str) -> tuple[str, str, str]:
    ends = ""
    if figure.low is not None and figure.high is not None:
        ends = f"{_short(figure.low / unit)} to {_short(figure.high / unit)} {name}"
    return f"{_short(figure.value / unit)} {name}", ends, figure.bound


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _joule(figure: Figure | Unknown, unit: str = "") -> str:
    if isinstance(figure, Unknown):
        return "-"
    at_most = "≤ " if figure.source == NO_COUNTER else ""
    return f"{at_most}{_short(figure.value)}{unit}"


def _memory(memory: Memory) -> str:
    return (
        f"weights {size(memory.weights)}, KV cache {size(memory.kv_cache)}, activations "
        f"{size(memory.activations)}, runtime {size(memory.workspace)}: {size(memory.total)}"
    )


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_short(1e3 * seconds)} ms" for name, seconds in parts.items())


def table(
    estimates: Mapping[str, RunEstimate | str], machine: Machine, memory: float | None
) -> str:
    """A row a scheme, or why it cannot run. memory: of the device, in bytes."""
    rows: list[tuple[str, ...]] = [
        ("scheme", "prompt", "token", "tok/s", "peak memory", "fits?", "J/token", "set by")
    ]
    for name, one in estimates.items():
        if isinstance(one, str):
            rows.append((name, *["-"] * 6, one))
            continue
        prompt, token = (_seconds(figure)[0] for figure in (one.prompt_seconds, one.token_seconds))
        speed, peak = _short(one.tokens_per_second.value), one.peak_memory_bytes.value
        fits = "-" if memory is None else "yes" if peak <= memory else "no"
        joules, bound = _joule(one.joules_per_token), one.token_seconds.bound
        rows.append((name, prompt, token, speed, size(peak), fits, joules, bound))
    head = f"{machine.name}; source: {machine.source}"
    lines = [head, *aligned(rows, left={0, len(rows[0]) - 1}).splitlines()]
    return "\n".join(_warned(lines, machine.warnings))


def fitting(
    fits: Sequence[Fit], memory: float, batch: int, context: int | None, warnings: Sequence[str]
) -> str:
    """A row for each scheme that fits, the largest first, with the positions that fit for each kind
    of cache; and how many do not fit."""
    caches = list(dict.fromkeys(one.kv_cache for one in fits))
    by_scheme: dict[str, dict[str, Fit]] = {}
    for one in fits:
        by_scheme.setdefault(one.scheme, {})[one.kv_cache] = one
    fitting = {
        scheme: own for scheme, own in by_scheme.items() if any(f.positions for f in own.values())
    }
    rows: list[tuple[str, ...]] = [("scheme", "weights", *caches)]
    for scheme, own in sorted(fitting.items(), key=lambda item: -_weights(item[1])):
        cells = (_positions(own[cache], context) for cache in caches)
        rows.append((scheme, size(_weights(own)), *cells))
    left_out = by_scheme.keys() - fitting.keys()
    refused = [s for s in left_out if all(f.why_not for f in by_scheme[s].values())]
    notes = [f"all: the model's context, {context}"] if context else []
    if too_large := len(left_out) - len(refused):
        notes.append(f"{counted(too_large, 'scheme')} more: too large")
    if refused:
        notes.append(f"{counted(len(refused), 'scheme')} more: not for this model's shapes")
    head = f"Into {size(memory)}, {counted(batch, 'sequence')} at once; positions by KV cache:"
    lines = [head, *aligned(rows, left={0}).splitlines()]
    if not fitting:
        hint = "`generate --dry_run` shows the size of each scheme"
        lines = [f"Nothing fits into {size(memory)}; {hint}"]
    return "\n".join(_warned(lines + ["; ".join(notes)] * bool(notes), warnings))


def _weights(own: Mapping[str, Fit]) -> int:
    return max(fit.weights for fit in own.values())


def _positions(fit: Fit, context: int | None) -> str:
    if not fit.positions:
        return "-"
    return "all" if context is not None and fit.positions >= context else str(fit.positions)
