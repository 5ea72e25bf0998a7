"""Instructions for each weight of the Triton kernel of linear layers, counted in a GPU's machine
code; no GPU is needed.

    python -m tests.ops.gpu_instructions 90              compute capability 9.0: formats × rows
    python -m tests.ops.gpu_instructions 90 int-4-64 1   the loop's instructions by name

What is counted is the innermost loop, whose instructions a thread carries out for so many weights.
"""

import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.ops.packed_weights import name

ROWS = (1, 8, 16)
# The most that a weight takes at one row, for CAPABILITIES, under Triton 3.6 and 3.9; integers with
# zero points. A ratchet: lower it where instructions go.
MOST = {
    **{"int-8-row": 4.1, "int-4-64": 5.3, "int-2-64": 5.9, "int-3-64": 6.5, "fp8-8-row": 4.1},
    **{"fp6-6-row": 6.2, "fp4-4-32": 6.6, "fp4-4-16": 7.3, "nf4-4-64": 6.3, "2:4-4-64": 6.7},
}
CAPABILITIES = (80, 89, 90)


def counted(made) -> collections.Counter[str]:
    """Instructions of a compiled kernel's loop by name, for one weight."""
    names = made.src.fn.arg_names
    size = {names[place[0]]: value for place, value in made.src.constants.items()}
    each = size["BLOCK_N"] * size["BLOCK_J"] * size["UNIT"] / (made.metadata.num_warps * 32)
    loop = collections.Counter(_loop_of(_disassembled(made.asm["cubin"])))
    return collections.Counter({op: count / each for op, count in loop.items()})


def check(made, form: tuple, capability: int) -> None:
    """Raises AssertionError for a kernel of one row with more instructions than are known."""
    most = MOST.get(name(form))
    if most is None or capability not in CAPABILITIES:
        return
    total = sum(counted(made).values())
    assert total <= most, f"{name(form)}: {total:.2f} instructions a weight, of {most}"


def _disassembled(cubin: bytes) -> list[str]:
    """Lines of SASS: instructions, and labels between them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        made = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return made.stdout.splitlines()


def _loop_of(lines: list[str]) -> list[str]:
    """The instructions of the innermost loop that has the most of them."""
    places: dict[str, int] = {}
    code: list[str] = []
    jumps = []
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+?)(?:;|\s)(.*)", line):
            if found[1].startswith("BRA") and (to := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((len(code), to[0]))
            code.append(found[1])
    loops = {(places[to], end) for end, to in jumps if places.get(to, len(code)) < end}
    inner = [
        (start, end)
        for start, end in loops
        if not any(start <= a and b <= end for a, b in loops - {(start, end)})
    ]
    start, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return [op for op in code[start : end + 1] if op != "NOP"]


if __name__ == "__main__":
    from quantbench.ops.triton.linear import linear
    from tests.ops.gpu_compiler import FORMS, compile_instead, weight_of

    capability, *chosen = sys.argv[1:]
    compiled = compile_instead(int(capability))
    for form in FORMS:
        if chosen and name(form) != chosen[0]:
            continue
        compiled.clear()
        for rows in map(int, chosen[1:] or ROWS):
            linear(torch.zeros(rows, 4096, dtype=torch.bfloat16), weight_of(form, 4096))
        sums = [f"{sum(counted(made).values()):6.2f}" for made in compiled]
        print(f"{name(form):12}", *sums, flush=True)
        for op, count in counted(compiled[0]).most_common() if chosen else ():
            print(f"{op:24} {count:.2f}")
