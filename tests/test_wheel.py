"""What a wheel installs: one name, `quantbench`, that works beside everybody else's modules.

The wheel is built from a copy of the tree, without network, and installed into an environment that
has the packages which the wheel declares, and no other.
"""

import json
import os
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from quantbench.ops.cpu import build
from tests.programs import copy_of_tree, python, ran

# Files of the current folder, named as ours are, which must not be imported.
THEIRS = ("cli", "compare", "errors", "files", "generate", "models", "run", "text")


def needed(lines, extras=()):
    """The installed distributions that requirements ask for, and those that these ask for."""
    for requirement in map(Requirement, lines):
        given = [{"extra": extra} for extra in extras or [""]]
        if not requirement.marker or any(map(requirement.marker.evaluate, given)):
            distribution = metadata.distribution(requirement.name)
            yield distribution
            yield from needed(distribution.requires or [], requirement.extras)


def environment(folder, wheel):
    """A new environment with a wheel and what it declares to need, and nothing else; its bin/.

    The packages are links to those of the environment that runs the tests. pip refuses the wheel if
    one that it declares is not among them.
    """
    venv.create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = message_from_bytes(archive.read(about)).get_all("Requires-Dist")
    for distribution in needed(declared):
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(distribution.locate_file(name)).resolve())
    options = ("--quiet", "--no-index", "--disable-pip-version-check")
    command = ("-m", "pip", "--python", folder / "bin" / "python", "install")
    pip = python(*command, *options, wheel)
    assert pip.returncode == 0, pip.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    tree = copy_of_tree(tmp_path_factory.mktemp("copy"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    kernels = {"QUANTBENCH_PREBUILD": "1"} if build.refusal() is None else {}
    words = ("-m", "pip", "wheel", *options, "-w", folder, tree)
    pip = python(*words, env=os.environ | kernels)
    assert pip.returncode == 0, pip.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands."""
    return environment(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with modules of the same names as ours."""
    for name in THEIRS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('their {name}.py was imported')\n")
    return tmp_path


def run(installed, folder, program, *arguments, without_compiler=False):
    unset = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    if without_compiler:
        environment |= {"PATH": str(installed), "XDG_CACHE_HOME": str(folder / "cache")}
        environment |= dict.fromkeys(("CXX", "CXXFLAGS"), "")
    result = ran(installed / program, *arguments, cwd=folder, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


def test_what_is_in_it(wheel):
    """At the top quantbench alone; in it modules, C++ sources, the embedded model, and all other
    files in their folders."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (top_level,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"quantbench"]
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"quantbench"}
    listed = ran("git", "ls-files")
    if listed.returncode:
        pytest.skip("needs git: the tree is no checkout")
    outside = ("tests/", "docs/", "benchmarks/", ".", "setup.py")
    files = {name for name in listed.stdout.splitlines() if not name.startswith(outside)}
    wanted = {name for name in files if "/" in name or name.endswith(".py")}
    links = {"quantbench/" + name for name in ("kv_cache", "models", "quantize")}
    wanted = {name for name in wanted - links if not name.endswith(".md")}
    packed = {f"quantbench/{name.removeprefix('quantbench/')}" for name in wanted}
    assert packed <= names
    built = build.refusal() is None
    assert [name for name in names if name.endswith(".so")] == [
        f"quantbench/ops/cpu/prebuilt/{build.prebuilt().name}"
    ] * built
    assert ("py3-none-any" in wheel.name) is not built
    assert {"quantbench/ops/cpu/src/step/op.cpp", "quantbench/models/tiny/heldout.txt"} <= packed


def test_generate_runs_on_the_embedded_model(installed, elsewhere):
    """Where there is no compiler, with the kernels that the wheel brings."""
    command = ("generate", "--quantization", "int8wo", "--max-new-tokens", 4, "--num_samples", 1)
    command += ("--output_json_path", "runs.jsonl")
    out = run(installed, elsewhere, "quantbench", *command, without_compiler=True)
    assert "int8wo" in out
    (details,) = map(json.loads, (elsewhere / "runs.jsonl").read_text().splitlines())
    assert "quantbench" in json.dumps(details)
    assert build.refusal() or "cpu-step" in out
    assert not [*(elsewhere / "cache").rglob("*.so")]
    log = run(installed, elsewhere, "quantbench", "log", "check", "benchmarks.txt")
    assert log == "1 record, intact\n"


def test_ab_and_recommend_run_on_the_embedded_model(installed, elsewhere):
    """Declared dependencies are all that comparing needs, tables and pictures included."""
    short = ("--max_new_tokens", 8, "--processes", 1, "--tokens", 64, "--max_minutes", 0.2)
    arms = ("--arm", "--quantization none", "--arm", "--quantization int8wo")
    run(installed, elsewhere, "quantbench", "ab", *arms, *short, "--output", "ab")
    assert (elsewhere / "ab" / "report.html").exists()
    out = run(installed, elsewhere, "quantbench", "recommend", "--from", "ab")
    assert "quantbench generate" in out


def test_it_is_imported_beside_others(installed, elsewhere):
    """In a process with modules of theirs that are named as ours are."""
    for name in THEIRS:
        (elsewhere / f"{name}.py").write_text("whose = 'theirs'\n")
    text = (
        "import quantbench, models, errors\n"
        "model = quantbench.load('tiny', quantization='int8wo')\n"
        "generator = quantbench.Generator(model, cache_size=8)\n"
        "import text, files, run, cli\n"
        "print({module.whose for module in (models, errors, text, files, run, cli)})\n"
        "print(quantbench.config('int4wo-64').scheme, quantbench.__version__)\n"
    )
    (elsewhere / "user.py").write_text(text)
    out = run(installed, elsewhere, "python", "user.py").splitlines()
    version = run(installed, elsewhere, "quantbench", "--version").split()[1]
    assert out == ["{'theirs'}", f"int4wo-64 {version}"]
