"""What CONTRIBUTING.md says of adding things, tried in a copy of the tree.

A scheme is a file and its spelling, a KV cache a class and a line, a command a file.
tests/models/test_registry.py adds an architecture.
"""

import json
import os
from pathlib import Path

import pytest

from tests.programs import copy_of_tree, python

# int8wo with 41 levels instead of 256.
SPELLING = """
@dataclass(frozen=True)
class Coarse(Spec):
    file = "coarse"
    pattern = "coarse"
    numerics = "41 levels, symmetric, one scale per output row"
    phrase = "a test's"
    shown = ("coarse",)


# In the order of their definitions.
"""
SCHEME = '''
"""coarse: what int8wo computes, of 41 levels."""

from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import Coarse


def quantize(w, spec):
    scale = w.abs().amax(1, keepdim=True).float() / 20
    codes = (w / scale).round().char()
    return PackedWeight.make(w, [codes], scale, "int", 8)


SCHEMES = {Coarse: Scheme(quantize, our_kernels())}
'''
# A format that no kernel knows.
CACHE = '''
"""Keys and values as float16 numbers, whatever the model's dtype is."""

from quantbench.kv_cache.base import KVCache


class HalfKVCache(KVCache):
    format = "half"

    def encode(self, x):
        return {"codes": x.half()}
'''
LINE = '        "half": "quantbench.kv_cache.half:HalfKVCache",\n'
COMMAND = '''
"""quantbench greet: says hello to somebody.

quantbench greet --name Ada
"""

import click

from quantbench.cli import Command


@click.command(cls=Command)
@click.option("--name", default="World", help="Who is greeted [World]")
def greet(name: str) -> None:
    """Greet somebody."""
    click.echo(f"Hello, {name}")
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree with a scheme, a cache and a command more."""
    folder = copy_of_tree(tmp_path_factory.mktemp("copy"))
    (folder / "quantize/schemes/coarse.py").write_text(SCHEME)
    (folder / "kv_cache/half.py").write_text(CACHE)
    (folder / "quantbench/commands/greet.py").write_text(COMMAND)
    inserted(folder / "quantize/spec.py", "# In the order of their definitions.\n", SPELLING)
    dense = '        "dense": "quantbench.kv_cache.dense:DenseKVCache",\n'
    inserted(folder / "kv_cache/__init__.py", dense, dense + LINE)
    return folder


def inserted(file: Path, place: str, text: str) -> None:
    before, _, after = file.read_text().partition(place)
    assert after
    file.write_text(before + text.lstrip("\n") + after)


def run(folder, *command):
    return python(*command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})


def test_a_scheme_and_a_cache_generate_text(copy):
    options = "--device cpu --precision float32 --num_samples 1 --max_new_tokens 6 --temperature 0"
    words = ("--quantization", "coarse", "--kv_cache", "half", *options.split())
    words += ("--write_result", "log.txt", "--output_json_path", "runs.jsonl")
    ended = run(copy, "generate.py", *words)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((copy / "runs.jsonl").read_text())
    assert (result["scheme"], result["kv_cache"]) == ("coarse", "half")
    # 8 bits a weight and a float32 scale a row, as int8wo has them; caches of 2 bytes a number.
    shape = result["architecture"]
    numbers = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"]
    assert result["kv_cache_bytes"] == 2 * numbers * result["cache_size"]
    # A kernel that does not know the cache's format is not used.
    assert result["attention_kernel"] == "torch"
    assert result["attention_reason"] == "no kernel reads keys and values stored as half"
    assert "--quantization coarse" in (copy / "log.txt").read_text()
    assert "--kv_cache half" in (copy / "log.txt").read_text()


def test_the_new_names_are_listed_where_names_are_listed(copy):
    wrong = run(copy, "generate.py", "--quantization", "coarze")
    assert wrong.returncode == 2 and "nearest: coarse" in wrong.stderr
    wrong = run(copy, "generate.py", "--kv_cache", "hal")
    assert wrong.returncode == 2 and "dense, half, int8" in wrong.stderr
    assert "half" in run(copy, "generate.py", "--help").stdout


def test_a_command_is_a_file(copy):
    assert run(copy, "-m", "quantbench", "greet", "--name", "Ada").stdout == "Hello, Ada\n"
    assert "says hello to somebody" in run(copy, "-m", "quantbench", "--help").stdout
