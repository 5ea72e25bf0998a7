"""What one has to read to read a run: our files that Python has imported when it ends.

python tests/import_closure.py [--list]
"""

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = "--num_samples 1 --max_new_tokens 4 --write_result none".split()
LOADED = """
import atexit, sys
def imported():
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", ""))
        if name.startswith(("quantbench", "torch._dynamo", "torchao")):
            print("imported", getattr(module, "__file__", None))
atexit.register(imported)
from quantbench.commands.generate import generate
generate(sys.argv[1:])
"""


@functools.cache
def imported(*options: str) -> list[Path]:
    """The files, of the project, torchao and torch._dynamo, that a run on the embedded model has
    imported when it ends."""
    words = (sys.executable, "-c", LOADED, *RUN, *options)
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split(" ", 1)[1] for line in run.stdout.splitlines() if "imported " in line]
    return sorted({Path(line).resolve() for line in lines if line.endswith(".py")})


def closure() -> list[Path]:
    """The project's own."""
    files = imported("--quantization", "int8wo")
    return [file for file in files if not {"torch", "torchao"} & {*file.parts}]


if __name__ == "__main__":
    counts = {file: len(file.read_text().splitlines()) for file in closure()}
    if "--list" in sys.argv:
        for file, lines in sorted(counts.items(), key=lambda item: item[1]):
            print(f"{lines:5} {file.relative_to(ROOT)}")
    print(f"generate.py reaches {len(counts)} files, {sum(counts.values()):,} lines")
