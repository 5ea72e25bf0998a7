"""E4M3 by integers, against torch's conversion."""

import torch

from quantbench.ops import e4m3
from tests import seeds


def test_every_number_every_tie_and_what_is_next_to_it():
    known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    known = known[known.isfinite()]
    ordered = known.unique()
    ties = (ordered[1:] + ordered[:-1]) / 2
    beside = [ties.nextafter(torch.tensor(end)) for end in (1e9, -1e9)]
    drawn = [(torch.randn(100_000) * size).clamp(-448, 448) for size in (1e-3, 0.02, 1.0, 100.0)]
    x = torch.cat((known, ties, *beside, *drawn, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    with seeds.naming(len(x)):
        expected = x.to(torch.float8_e4m3fn)
        assert torch.equal(e4m3.to_bits(x), expected.view(torch.uint8))
        assert torch.equal(e4m3.nearest(x), expected.float())
