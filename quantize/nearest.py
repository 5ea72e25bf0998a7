"""The scheme that somebody means who types another name."""

import difflib
import re

from quantbench.quantize.spec import (
    MEASURED,
    SHOWN,
    START_WITH,
    Spec,
    every_spec,
    parse_scheme,
)

# What other programs call it, without dashes and underscores, and the scheme that is most like it.
ELSEWHERE = {
    **dict.fromkeys(("int8", "8bit", "w8a16", "q8"), "int8wo"),
    **dict.fromkeys(("int4", "4bit", "w4a16", "q4", "iq4xs"), "int4wo-64"),
    **dict.fromkeys(("fp8", "float8", "e4m3"), "float8wo"),
    **dict.fromkeys(("f32", "fp32", "f16", "fp16", "bf16", "float16", "bfloat16"), "none"),
    "awq": "int4wo-64-awq", "gptq": "int4wo-64-gptq", "hqq": "int4wo-64-hqq",
    "w8a8": "int8dq", "w4a8": "int8dq-int4wo-32", "nf4": "bnb-nf4", "fp4": "mxfp4",
    "iq3": "uintx-3-64", "iq2": "uintx-2-64", "q51": "uintx-5-64", "q50": "uintx-5-64",
}  # fmt: skip


def nearest(name: str) -> str | None:
    """A scheme for a name of other programs', or the one spelled most like it."""
    plain = re.sub("[^a-z0-9]", "", name.lower()).removeprefix("ud")
    if scheme := ELSEWHERE.get(plain):
        return scheme
    types = {re.sub("[^a-z0-9]", "", spec.gguf.lower()): str(spec) for spec in _by_preference()}
    if not plain:
        return None
    if scheme := types.get(plain) or types.get(re.sub("(xxs|xs|nl|s|m|l|xl)$", "", plain)):
        return scheme
    begun = [str(spec) for spec in _by_preference() if name and str(spec).startswith(name.lower())]
    near = difflib.get_close_matches(name.lower(), [*map(str, every_spec()), *MEASURED], n=1)
    return begun[-1] if begun else next(iter(near), None)


def _by_preference() -> list[Spec]:
    """Schemes of tables, those to start with last, so that a dict keeps them."""
    specs = [parse_scheme(name) for name in reversed(SHOWN)]
    return sorted(specs, key=lambda spec: str(spec) in START_WITH)
