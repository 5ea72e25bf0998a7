"""`attend` with a scale and a soft cap of scores, wherever keys are, against float64."""

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops import prefill_attention
from quantbench.ops.attend import attend
from quantbench.ops.attention import choose
from quantbench.ops.kv import dequantize
from tests.ops.exact import causal

D, L = 32, 40


def expected(query, key, value, window, scale, softcap):
    """All positions at once, by the definition."""
    key, value = (x.double().repeat_interleave(2, 1) for x in (key, value))
    scores = query.double() @ key.mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    positions = torch.arange(L)
    scores = scores.masked_fill(~causal(positions, positions, window), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (0.5, None), (None, 2.0), (0.3, 5.0)])
@pytest.mark.parametrize("window", [None, 7, 16])
@pytest.mark.parametrize("cache", [None, "dense", "int8"])
def test_scores_are_scaled_and_bounded(cache, window, scale, softcap, monkeypatch):
    """Prompts in chunks that wrap a window several times, and single positions between them."""
    monkeypatch.setattr(prefill_attention, "BLOCK", 8)
    query, key, value = (torch.randn(2, heads, L, D) for heads in (4, 2, 2))
    how = window, scale, softcap
    if cache is None:
        y = attend(query, key, value, torch.arange(L), *how)
    else:
        kept, whole = (CACHES[cache](2, 2, L, D, torch.float32, "cpu", w) for w in (window, None))
        group, device = 2, torch.device("cpu")
        kept.kernel = choose(device, D, group, torch.float32, cache, scale, softcap).name
        pieces = []
        for at in torch.arange(L).split([9, 1, 1, 20, 1, 8]):
            sides = kept.update(at, key[:, :, at], value[:, :, at])
            pieces.append(attend(query[:, :, at], *sides, at, *how))
        y = torch.cat(pieces, 2)
        whole.store(torch.arange(L), key, value)
        key, value = (dequantize(whole.stored(name, 2)) for name in ("key", "value"))
    # float32 sums; int8 kernels round probabilities' products to bytes of a block's largest
    bound = 1e-5 if cache != "int8" else 0.02
    wanted = expected(query, key, value, *how)
    assert (y - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize(
    ("scale", "softcap", "reason"),
    [(0.1, None, "scales scores by 0.1"), (None, 30.0, "softcap 30")],
)
def test_a_kernel_that_cannot_do_it_is_refused(scale, softcap, reason):
    choice = choose(torch.device("cpu"), 64, 2, torch.float32, "dense", scale, softcap)
    assert choice.name == "torch" and reason in choice.reason
