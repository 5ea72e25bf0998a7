"""Peak memory on a CUDA card from first principles: torch's caching allocator, replayed.

    peak = replay(count)                    # of a pass: weights, cuBLAS's workspace, activations
    peak.allocated                          # what torch.cuda.max_memory_allocated() reports
    peak.reserved                           # what torch.cuda.max_memory_reserved() reports

Tensors do not take their own bytes, but those of a block of the allocator. It asks the driver for
segments, cuts blocks from them, and hands a block out whole if what would be left is small. So a
model of 32 layers whose matrices are 15.75 MiB takes 0.25 MiB more for each: 24 MiB that are in no
parameter count. The rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp of PyTorch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quantbench.estimate.counting import Count

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 512  # bytes; every size is rounded up to a multiple
SMALL = 1 * MIB  # requests up to this come from small segments
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests below LARGE
LARGE = 10 * MIB  # requests from here on get segments of their own size, rounded up to ROUND_LARGE
ROUND_LARGE = 2 * MIB
LEFT_OVER = 1 * MIB  # a large block is cut only if more than this is left of it
# torch keeps a workspace for cuBLAS from the first product on: two blocks of 4096 KiB and eight of
# 16 KiB, as CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 says it (at::cuda::getChosenWorkspaceSize).
CUBLAS_WORKSPACE = 2 * 4096 * KIB + 8 * 16 * KIB


@dataclass
class _Block:
    start: int
    size: int
    free: bool


@dataclass
class CachingAllocator:
    """Which blocks torch's allocator would hand out. Addresses are made up; sizes are not."""

    allocated: int = 0  # bytes of the blocks that are in use
    reserved: int = 0  # bytes of all segments
    peak_allocated: int = 0
    peak_reserved: int = 0
    _small: list[list[_Block]] = field(default_factory=list)  # a segment: its blocks, in order
    _large: list[list[_Block]] = field(default_factory=list)
    _used: dict[int, tuple[list[_Block], _Block]] = field(default_factory=dict)

    def allocate(self, number: int, size: int) -> None:
        """Take a block for the tensor of that number."""
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        segments = self._small if size <= SMALL else self._large
        fitting = [
            (block.size, at, block.start, blocks, block)
            for at, blocks in enumerate(segments)
            for block in blocks
            if block.free and block.size >= size
        ]
        if fitting:
            *_, blocks, block = min(fitting, key=lambda one: one[:3])
        else:
            block = _Block(0, _segment(size), True)
            blocks = [block]
            segments.append(blocks)
            self.reserved += block.size
        left = block.size - size
        if left >= BLOCK if size <= SMALL else left > LEFT_OVER:
            blocks.insert(blocks.index(block) + 1, _Block(block.start + size, left, True))
            block.size = size
        block.free = False
        self._used[number] = blocks, block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, number: int) -> None:
        """Give a tensor's block back. Its segment stays reserved, as in torch."""
        blocks, block = self._used.pop(number)
        block.free = True
        self.allocated -= block.size
        at = next(i for i, other in enumerate(blocks) if other is block)
        for first in (at, at - 1):
            if 0 <= first < len(blocks) - 1 and blocks[first].free and blocks[first + 1].free:
                blocks[first].size += blocks.pop(first + 1).size


def _segment(size: int) -> int:
    """Bytes that are asked of the driver for a request that no free block fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(frozen=True)
class Peak:
    """Bytes at the moments when they are most. allocated = the sum of `parts`."""

    allocated: int
    reserved: int
    parts: tuple[tuple[str, int], ...]  # what is alive at that moment, largest groups first


def replay(
    count: Count,
    inputs: Iterable[int] = (),
    *,
    workspace: int = CUBLAS_WORKSPACE,
    logits_upcast: int = 0,
    copies: int = 0,
) -> Peak:
    """The peak of a pass on a card that holds nothing else.

    count: of the pass, with its weights and events. inputs: bytes of the tensors that it is given.
    logits_upcast: bytes of a float32 copy that takes the place of the logits at the pass's end,
    while the last hidden state is still alive. copies: how many more tensors of the size of the
    result are made from it when the pass is over, and its hidden states are gone.
    """
    allocator, parts = CachingAllocator(), _Parts()
    for number, size in enumerate(count.weight_tensors):
        allocator.allocate(-1 - number, size)
    weights = sum(count.weight_tensors)
    parts.add("weights", weights)
    parts.add("rounding of the weights' blocks", allocator.allocated - weights)
    given = list(inputs)
    for number, size in enumerate([*given, workspace]):
        allocator.allocate(-1_000_000 - number, size)
    parts.add("inputs", sum(given))
    parts.add("workspace of cuBLAS", workspace)
    highest = parts.at(allocator, "activations")
    sizes: dict[int, int] = {}
    for number, size in count.events:
        if size:
            sizes[number] = size
            allocator.allocate(number, size)
        else:
            sizes.pop(number)
            allocator.free(number)
        highest = max(highest, parts.at(allocator, "activations"), key=lambda peak: peak.allocated)
    result = max(sizes, key=lambda number: sizes[number], default=None)
    if result is None:
        return _with_reserved(highest, allocator)
    bytes_of_result = sizes[result]
    if logits_upcast:
        allocator.allocate(-2_000_000, logits_upcast)
        highest = max(highest, parts.at(allocator, "logits, in both dtypes, and hidden states"),
                      key=lambda peak: peak.allocated)  # fmt: skip
        allocator.free(result)
        result, bytes_of_result = -2_000_000, logits_upcast
    for number in [number for number in sizes if number != result]:
        if number in allocator._used:
            allocator.free(number)
    for number in range(copies):
        allocator.allocate(-3_000_000 - number, bytes_of_result)
        what = f"logits, and {number + 1} more of their size"
        highest = max(highest, parts.at(allocator, what), key=lambda peak: peak.allocated)
    return _with_reserved(highest, allocator)


class _Parts:
    """The parts of the peak by name: what is held all the time, and what the pass made by then."""

    def __init__(self) -> None:
        self.lasting: list[tuple[str, int]] = []

    def add(self, name: str, size: int) -> None:
        if size:
            self.lasting.append((name, size))

    def at(self, allocator: CachingAllocator, name: str) -> Peak:
        left = allocator.allocated - sum(size for _, size in self.lasting)
        parts = (*self.lasting, (name, left)) if left else tuple(self.lasting)
        return Peak(allocator.allocated, allocator.reserved, parts)


def _with_reserved(peak: Peak, allocator: CachingAllocator) -> Peak:
    return Peak(peak.allocated, allocator.peak_reserved, peak.parts)


def blocks_of(sizes: Sequence[int]) -> int:
    """Bytes that tensors of these sizes take, allocated in this order."""
    allocator = CachingAllocator()
    for number, size in enumerate(sizes):
        allocator.allocate(number, size)
    return allocator.allocated
