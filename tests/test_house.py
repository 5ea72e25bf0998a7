"""What import-linter (pyproject.toml) and ruff cannot see about the tree.

`lint-imports`, part of `make check`, holds the layers: a module imports only from those below it.
"""

import ast
import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from quantbench.ops.cpu import build
from tests import programs
from tests.import_closure import closure, imported
from tests.programs import ROOT, copy_of_tree, python, ran

KERNELS = ROOT / "quantbench" / "ops" / "cpu" / "src"


def test_the_package_links_to_the_folders_at_the_top():
    links = [path for path in (ROOT / "quantbench").iterdir() if path.is_symlink()]
    assert {path.stem for path in links} == {"generate", "kv_cache", "models", "quantize"}
    assert all(os.readlink(path) == f"../{path.name}" for path in links)


def test_a_checkout_without_links_runs(tmp_path):
    """As Git makes it on Windows: a link is a file with the path that it should lead to."""
    clone = tmp_path / "clone"
    made = ran("git", "clone", "-q", "-c", "core.symlinks=false", str(ROOT), str(clone))
    if made.returncode:
        pytest.skip("needs git: the tree is no checkout")
    assert (clone / "quantbench" / "generate.py").read_text() == "../generate.py"
    short = ("--max_new_tokens", "4", "--write_result", "none")
    arms = ("--arm", "--quantization none", "--arm", "--kv_cache int8", "--processes", "1")
    for command in (
        ("generate.py", "--num_samples", "1", *short),
        ("-m", "quantbench", "ab", *arms, "--max_minutes", "0.05", "--tokens", "0", *short),
    ):
        done = python(*command, cwd=clone)
        assert done.returncode == 0, done.stdout + done.stderr


ROOMS = "documents estimate experts latency peers recipe replay speculate.py".split()


@pytest.fixture(scope="module")
def lodger(tmp_path_factory):
    """A copy of the tree, whose rooms are closed one at a time."""
    return copy_of_tree(tmp_path_factory.mktemp("rooms"))


@pytest.mark.parametrize("closed", [*((room,) for room in ROOMS), ROOMS], ids="+".join)
def test_without_a_room_the_others_work(lodger, closed):
    """A feature is a folder: without it --help has a command less, every other command is there,
    and a run without any of them is as before."""
    package = lodger / "quantbench"
    gone = {file.stem for room in closed for file in (package / room).glob("commands/*.py")}
    text = (
        "from quantbench.command_files import *\nprint(*[command(n).name for n in command_files()])"
    )
    run = "--num_samples 1 --max_new_tokens 2 --quantization int8wo --write_result none".split()
    environment = {**os.environ, "PYTHONPATH": str(lodger)}
    for room in closed:
        (package / room).rename(lodger.parent / room)
    try:
        left = python("-c", text, cwd=lodger, env=environment)
        listed = python("-m", "quantbench", "--help", cwd=lodger, env=environment)
        done = python("generate.py", *run, cwd=lodger, env=environment) if closed == ROOMS else left
    finally:
        for room in closed:
            (lodger.parent / room).rename(package / room)
    for ended in (left, listed, done):
        assert ended.returncode == 0, ended.stderr
    names = set(
        re.findall(
            r"^  (\w+) ", listed.stdout.partition("Commands:")[2].partition("Options:")[0], re.M
        )
    )
    assert names == set(left.stdout.split()) and {"generate", "ab", "recommend"} <= names
    assert not names & (gone - {"__init__"})


def test_a_plain_run_imports_few_of_our_files():
    """Raise neither number: import what few runs need where it is used."""
    counts = [len(file.read_text().splitlines()) for file in closure()]
    assert len(counts) <= 83 and sum(counts) <= 13_860


def test_a_run_imports_neither_torchao_nor_the_compiler():
    """Both take as long as importing torch: the first token would come that much later, in every
    process of a comparison."""
    files = imported("--quantization", "int8wo", "--kv_cache", "int8")
    assert any("torch" not in file.parts for file in files)
    assert not [file for file in files if {"torch", "torchao"} & {*file.parts}]


def test_a_constant_is_marked_as_torch_marks_it():
    """build.constant_when_traced replaces torch's own, whose import takes long."""
    ours, torchs = (lambda: 1), (lambda: 1)
    build.constant_when_traced(ours)
    torch.compiler.assume_constant_result(torchs)
    assert vars(ours) == vars(torchs) != {}


def test_a_class_name_has_one_class():
    tops = [ROOT / name for name in ("generate.py", "kv_cache", "models", "quantize", "quantbench")]
    files = {
        file.resolve() for top in tops for file in ([top] if top.is_file() else top.rglob("*.py"))
    }
    trees = [ast.parse(file.read_text()) for file in files]
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    twice = {name for name, count in names.items() if count > 1}
    assert twice <= {"Estimate", "Interval", "Planned", "Scored"}  # these are yet to be renamed


def test_no_file_names_a_folder_of_somebodys_machine():
    listed = ran("git", "ls-files")
    if listed.returncode:
        pytest.skip("needs git: the tree is no checkout")
    read = (".py", ".cpp", ".h", ".md", ".toml", ".txt", ".json", "Makefile", "run")
    texts = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(read)]
    texts = [path for path in texts if not path.is_relative_to(ROOT / "tests")]
    folder = re.compile(r"(?<![\w.~/])/(home|root|Users|work|mnt|srv)/\w")
    assert len(texts) > 100
    assert not [path for path in texts if path.is_file() and folder.search(path.read_text())]


def spelled_out(name: str) -> set[str]:
    """Names with their braces expanded: {a,b}.h is a.h and b.h."""
    if not (braces := re.search(r"{([^{}]*)}", name)):
        return {name}
    return {name.replace(braces[0], part, 1) for part in braces[1].split(",")}


def test_the_picture_of_the_kernels_names_every_file():
    """Each in its folder's part, by its path or its name alone; and no file that is not there."""
    text = (KERNELS / "README.md").read_text().split("## Which file calls which\n")[1]
    words = re.split(r"^(?:ops/cpu/)?(\w+)(?:\.py|/) ", text.split("```")[1], flags=re.M)[1:]
    parts = dict(zip(words[::2], words[1::2], strict=True))
    sources = {path.relative_to(KERNELS) for path in KERNELS.rglob("*.*") if path.suffix != ".md"}
    assert len(sources) > 60 and {path.parts[0] for path in sources} == set(parts)
    for folder, part in parts.items():
        listed = re.findall(r"[\w/{},]+\.(?:h|cpp)\b", part)
        names = set().union(*map(spelled_out, listed))
        inside = {path for path in sources if path.parts[0] == folder}
        assert [path for path in inside if not {str(path), path.name} & names] == []
        assert names <= {str(path) for path in sources} | {path.name for path in inside}


def test_the_fast_tests_are_files_that_exist():
    """`make test-fast` names them; pytest refuses to run any if a file is missing."""
    print_them = "show: ; @echo $(FAST_TESTS)"
    command = ["make", "-s", "--eval", print_them, "show"]
    shown = ran(*command, check=True).stdout
    assert len(shown.split()) > 5
    assert [name for name in shown.split() if not (ROOT / name).exists()] == []


def test_each_command_of_the_gpu_report_ends_in_time_is_right_and_is_not_repeated(tmp_path):
    """`make cpu-report` carries the same commands out."""
    command = ["make", "-n", "gpu-report", "CARD=card", f"GPU_FOLDER={tmp_path}"]

    def planned() -> str:
        return ran(*command, check=True).stdout.replace("\\\n", "")

    layers = [line for line in planned().splitlines() if " -m benchmarks.kernels " in line]
    assert len(layers) == 10
    assert all(line.startswith("timeout --signal INT 8m ") for line in layers)
    lines = [line for line in planned().splitlines() if " -m quantbench " in line]
    assert len(lines) > 5
    for line in lines:
        limit, _, words = line.partition(" -m quantbench ")
        assert re.fullmatch(r"timeout --signal INT 8m \S+", limit)
        arguments = shlex.split(words.partition("||")[0])
        assert programs.command(*arguments, "--help").exit_code == 0, line
    for name in {*re.findall(rf"{tmp_path}/\S+?\.(?:json|xml)\b", planned())}:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert "Nothing to be done" in planned()
