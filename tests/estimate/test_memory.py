"""Torch's caching allocator, replayed: blocks and segments worked by hand from its rules."""

import pytest
import torch
from torch import nn

from quantbench.estimate.counting import count_module
from quantbench.estimate.memory import CUBLAS_WORKSPACE, MIB, CachingAllocator, replay


def test_sizes_are_rounded_and_small_requests_share_a_segment():
    allocator = CachingAllocator()
    allocator.allocate(1, 1)
    allocator.allocate(2, 513)
    assert allocator.allocated == 512 + 1024
    assert allocator.reserved == 2 * MIB


def test_a_block_is_not_cut_if_a_mebibyte_or_less_would_be_left():
    """15.75 MiB get a segment of 16; the quarter is nobody's. 18 MiB of 20 are cut in two of 9;
    what is left, 2 MiB, is a block of its own."""
    allocator = CachingAllocator()
    allocator.allocate(1, 63 * MIB // 4)
    assert allocator.allocated == allocator.reserved == 16 * MIB
    allocator.allocate(2, 9 * MIB)
    allocator.allocate(3, 9 * MIB)
    assert (allocator.allocated, allocator.reserved) == (34 * MIB, 36 * MIB)
    allocator.allocate(4, 3 * MIB // 2)  # of the 2 MiB, 0.5 would be left
    assert (allocator.allocated, allocator.reserved) == (36 * MIB, 36 * MIB)


def test_freed_blocks_join_and_are_used_again():
    allocator = CachingAllocator()
    for number in range(2):
        allocator.allocate(number, 9 * MIB)
    for number in range(2):
        allocator.free(number)
    allocator.allocate(2, 19 * MIB)  # of 20, so all of it
    assert allocator.allocated == allocator.reserved == 20 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for number, size in enumerate((40, 30, 20)):
        allocator.allocate(number, size * MIB)
    for number in range(3):
        allocator.free(number)
    allocator.allocate(3, 25 * MIB)
    assert allocator.reserved == 90 * MIB
    allocator.allocate(4, 40 * MIB)
    assert allocator.reserved == 90 * MIB


@pytest.mark.gpu
def test_it_is_what_torch_reports():
    sizes = [int(x) for x in torch.randint(1, 40 * MIB, (60,))]
    torch.cuda.empty_cache()
    before, allocator = torch.cuda.memory_allocated(), CachingAllocator()
    kept = []
    for number, size in enumerate(sizes):
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        allocator.allocate(number, size)
        if number % 3 == 2:
            kept[number - 1] = None
            allocator.free(number - 1)
    assert torch.cuda.memory_allocated() - before == allocator.allocated


def test_the_peak_of_a_pass_names_its_parts():
    """Weights 8 · 16 MiB and 16 · 8 MiB in float32; the input is given, and h is the largest."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16, False), nn.ReLU(), nn.Linear(16, 8, False))
        count = count_module(module, torch.empty(MIB, 8))
    peak = replay(count, [32 * MIB])
    assert dict(peak.parts) == {
        "weights": 1024,
        "inputs": 32 * MIB,
        "workspace of cuBLAS": CUBLAS_WORKSPACE,
        "activations": 128 * MIB,  # h and its relu
    }
    assert peak.allocated == sum(size for _, size in peak.parts)
    copied = replay(count, [32 * MIB], copies=4)
    assert copied.allocated == 1024 + CUBLAS_WORKSPACE + (32 + 5 * 32) * MIB
    assert copied.reserved >= copied.allocated
