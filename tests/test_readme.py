"""The Makefile's commands, run as a newcomer would; and what the documents say of commands and
options, and of what to install."""

import dataclasses
import os
import re
import shutil
import tomllib
from pathlib import Path

import click
import pytest
from torch import nn

from quantbench.__main__ import commands
from quantbench.bench.arm import read_arms
from quantbench.cli import TableOption
from quantbench.log.config import RunConfig, split
from quantbench.log.log import read as read_log
from quantbench.log.options import parse
from quantbench.quantize.kernel import KernelLinear
from quantbench.run.plan import make_plan
from tests import programs
from tests.programs import ROOT, git, ran

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
OTHERS = [(ROOT / name).read_text() for name in ("CONTRIBUTING.md", "SKILL.md")]
DOCUMENTS = "\n".join(
    [README, *OTHERS, *(text for name, text in PAGES.items() if name != "LOG.md")]
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The working tree without what git ignores, the installed .venv linked into it."""
    if not (ROOT / ".venv" / "installed-dev").exists():
        pytest.skip("needs the Makefile's .venv: `make test` sets it up and runs every test")
    if ran("make", "-q", ".venv/installed-dev", ".venv/installed-docs", cwd=ROOT).returncode:
        # or the clone, which has a link to it, would install itself there
        pytest.skip("needs a .venv that is newer than pyproject.toml")
    folder = tmp_path_factory.mktemp("clone") / "quantbench"
    hidden = (".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis", "*.info")
    ignored = shutil.ignore_patterns(*hidden)
    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def make(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return ran("make", *arguments, cwd=folder, env=environment)


def test_make_demo(clone):
    """On one layer, to be short: it recommends a scheme, and leaves the tree clean."""
    for command in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "a fresh clone"]):
        git(clone, *command)
    short = "--num_layers 1 --max_minutes 4 --processes 1 --half_width 50% --tokens 512"
    done = make(clone, "demo", f"DEMO_ARGS={short}")
    assert done.returncode == 0, done.stderr
    schemes, model = demo_of(done.stderr)
    for scheme in schemes:
        assert re.search(rf"^{scheme} +[\d.]+", done.stdout, re.M)
    assert done.stdout.count("\nUse ") == 1
    # Which verdict depends on the time and on what else runs.
    said = "faster|slower|no difference shown|too few cycles"
    verdicts = re.findall(rf"^(\S+) +[\d.]+ +[\d.]+ \(.*\) .* (?:{said})$", done.stdout, re.M)
    assert verdicts == schemes[1:]
    report = re.search(r"^The report: (demo/report\.(?:html|md))$", done.stdout, re.M)
    assert report and (clone / report[1]).exists()
    records = [record for _, record in read_log(str(clone / "demo" / "log.txt")).records]
    assert [r.quant for r in records] == ["None", *(logged(name) for name in schemes[1:])]
    assert {r.mod for r in records} == {model}
    assert "Warning" not in done.stdout + done.stderr
    assert not re.search(r"Traceback|WARNING|W\d{4} ", done.stdout + done.stderr)
    assert git(clone, "status", "--porcelain") == ""


def demo_of(announced):
    """The demo's schemes, and its model's name in the log: a real one where PyPI was reached."""
    if "Four schemes on SmolLM2-135M-Instruct." in announced:
        return ["none", "as-is", "int8wo", "uintx-6-64"], "SmolLM2-135M-Instruct.Q4_1"
    assert "Four schemes on the shape of TinyLlama 1.1B (its first 4 layers" in announced
    return ["none", "int8wo", "int4wo-64", "uintx-2-64"], "TinyLlama-1.1B-Chat-v1.0"


def logged(scheme):
    return "gguf-Q4_1" if scheme == "as-is" else scheme


@pytest.mark.parametrize("real", [True, False])
def test_the_demo_s_command_and_words_are_right(real, tmp_path, monkeypatch):
    """What `make demo` would run, without running it: options that exist, and what it announces."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "quantbench" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if real:
        file.parent.mkdir(parents=True)
        file.touch()
    done = make(ROOT, "--dry-run", "--old-file=.venv/installed", "demo")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace("\\\n", " ")
    lines = [line.strip() for line in printed.splitlines()]
    assert lines.index("mkdir demo") == lines.index("rm -rf demo") + 1
    (line,) = [line for line in lines if "-m quantbench" in line]
    words = split(line)[3:]
    options = context_of(words).params
    arms = [parse(split(arm)).quantization for arm in options["texts"]]
    assert arms == demo_of(printed)[0]
    path = str(file) if real else "dummy:TinyLlama-1.1B-Chat-v1.0"
    assert options["checkpoint_path"] == path and options["num_layers"] == (None if real else "4")
    assert options["output"] == "demo" and options["write_result"] == "demo/log.txt"
    assert options["tokens"] is None  # quality
    (told,) = re.findall(r"\.venv/bin/quantbench (.*)\"", printed)
    assert context_of(split(told)).params


@pytest.mark.parametrize("target", ["demo", "test", "test-fast", "check"])
def test_a_second_call_installs_nothing(clone, target):
    assert "pip install" not in make(clone, "--dry-run", target).stdout


def test_the_first_pages_are_short():
    words = {"comparing.md": 900, "estimates.md": 900, "experts.md": 900, "findings.md": 2000}
    assert len(README.split()) <= 800
    assert {name: n for name, most in words.items() if (n := len(PAGES[name].split())) > most} == {}
    assert len(PAGES["structure.md"].splitlines()) <= 60


def test_the_site_has_a_place_for_every_page():
    """`make docs` fails for a page without one; this needs no MkDocs."""
    places = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", places, re.M)) == sorted(PAGES)


SNIPPETS = [
    (name, text)
    for name in PAGES
    for text in re.findall(r"^```python\n(.*?)^```", PAGES[name], re.M | re.S)
]


@pytest.mark.parametrize(("page", "text"), SNIPPETS, ids=lambda value: value.splitlines()[0])
def test_python_in_the_documents_runs(page, text):
    names = {}
    exec(compile(text, page, "exec"), names)
    if "quantize_(" in text:
        layers = [m for m in names["model"].modules() if isinstance(m, nn.Linear)]
        assert layers and all(isinstance(layer, KernelLinear) for layer in layers)


def test_links_lead_somewhere():
    texts = [(ROOT, text) for text in (README, *OTHERS)]
    for folder, text in [*texts, *((ROOT / "docs", page) for page in PAGES.values())]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (folder / target).exists(), target


ENTRY = re.compile(
    r"## .+\n\n(\d{4}-\d\d-\d\d), commit [0-9a-f]{7}, .+\. Command: .+\.\n\*\*Result: .+\.\*\*\n"
)


def test_each_entry_of_the_log_says_where_it_comes_from():
    """Day, commit, machine, command, result; the newest first."""
    entries = re.split(r"^(?=## )", PAGES["LOG.md"], flags=re.M)[1:]
    found = {entry.splitlines()[0]: ENTRY.match(entry) for entry in entries}
    assert [title for title, match in found.items() if not match] == []
    days = [match[1] for match in found.values() if match]
    assert days == sorted(days, reverse=True)


# A command alone on a line, with or without a comment behind it, or between backticks.
PROGRAM = r"python (?:generate\.py|-m \w[\w.]*)|quantbench"
LINE = re.compile(rf"^ *((?:{PROGRAM}) .*?)(?:  +#.*)?$|`((?:{PROGRAM}) [^`]+)`", re.M)
COMMANDS = sorted({line or inline for line, inline in LINE.findall(DOCUMENTS.replace("\\\n", " "))})
# Modules that are run by name and read no options of ours.
SCRIPTS = (
    *("tests.trust.simulation", "tests.ops.gpu_instructions"),
    *("benchmarks.kernels", "benchmarks.against"),
)


class Parsed(Exception):
    """Raised in place of what a command does, once its options have been read and converted."""


def context_of(words):
    """The context of the command that these words call, with its options."""

    def stop(context, /, *_, **given):
        if context.invoked_subcommand is None:
            raise Parsed(context)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(click.Context, "invoke", stop)
        commands.main(words, standalone_mode=False)
    return parsed.value.args[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_the_documents_parse(command):
    """Up to the plan of each run, where the model needs no file."""
    words = words_of(command)
    if not words or words[-1] in ("--help", "check"):  # `quantbench log check` by name, no FILE
        return
    context = context_of(words)
    names = [param.name for param in context.command.params if isinstance(param, TableOption)]
    given = {name: context.params[name] for name in names}
    common = RunConfig(**{name: v for name, v in given.items() if v not in (None, "…")})
    if common.quantization.endswith(".json"):
        return
    for arm in read_arms(common, context.params.get("texts") or [""]):
        named = arm.config.checkpoint_path.startswith(("dummy:", "tiny"))
        if named and arm.config.device == RunConfig.device:
            make_plan(dataclasses.replace(arm.config, tp="1"))


def words_of(command):
    """What follows `quantbench`; None for a script, which reads no options of ours."""
    match split(command):
        case ["python", "generate.py", *arguments]:
            return ["generate", *arguments]
        # compare: in captions of what was measured before it was quantbench
        case ["python", "-m", "quantbench" | "compare", *arguments] | ["quantbench", *arguments]:
            return arguments
        case ["python", "-m", program, *_]:
            assert program in SCRIPTS
            assert (ROOT / program.replace(".", "/")).with_suffix(".py").exists()


# Commands of the documents that take seconds, in the order in which they need each other's files.
# The reader's model is the embedded one, and samples and texts are shorter.
FEWER = {"generate": ("--num_samples", 1, "--max_new_tokens", 8), "quality": ("--tokens", 64)}
RUN = """\
quantbench schemes --list
quantbench generate --dry_run --checkpoint_path dummy:Meta-Llama-3-8B --cache_size 4096
python generate.py --dry_run --checkpoint_path dummy:Mixtral-8x7B-v0.1
quantbench generate --quantization int8wo
quantbench generate --num_samples 1
quantbench generate --checkpoint_path DIR --quantization none --speculate self
python generate.py --checkpoint_path tiny_moe --quantization int8wo --expert_memory 20 --save moe
python generate.py --checkpoint_path moe --expert_memory 20
python generate.py --checkpoint_path path/to/Meta-Llama-3-8B --quantization fp6 --save llama-3-8b-fp6
python generate.py --checkpoint_path llama-3-8b-fp6 --compile
quantbench log check benchmarks.txt
quantbench quality --quantization int4wo-64
quantbench estimate --checkpoint_path tiny --device "NVIDIA L4" --all_schemes
quantbench estimate --checkpoint_path dummy:Meta-Llama-3-8B --device L4 --what_fits 24GB
quantbench doctor --json doctor.json
""".splitlines()  # noqa: E501


def test_commands_in_the_documents_run(in_tmp):
    assert set(RUN) <= set(COMMANDS)
    for command in RUN:
        words = words_of(re.sub(r"path/to/\S+|\bDIR\b", "tiny", command))
        done = programs.command(*words, *FEWER.get(words[0], ()))
        assert done.exit_code == 0 and done.stdout, f"{command}\n{done.output}"
    logged = [record.quant for _, record in read_log("benchmarks.txt").records]
    assert logged == ["int8wo", "None", "None", "int8wo", "int8wo", "fp6", "fp6"]


# ------------------------------------------------------------------- what people are to install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(name for names in EXTRAS.values() for name in names)]
DISTRIBUTIONS = {re.split(r"[\[<>=;]", text)[0].strip() for text in REQUIREMENTS}
COMMAND = re.compile(r"pip install\s+((?:-[-\w]+\s+)*)([\"']?)([^\s\"'`)]+)\2")


def to_install():
    hidden = ("build", "demo", "site")  # what git ignores
    folders = [
        p for p in ROOT.iterdir() if p.is_dir() and p.name[0] != "." and p.name not in hidden
    ]
    files = [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    files += [path for folder in folders for path in folder.rglob("*.py")]
    for path in files:
        if path != Path(__file__):
            for match in COMMAND.finditer(path.read_text()):
                yield str(path.relative_to(ROOT)), match[3]


def test_the_project_does_not_depend_on_itself_by_name():
    """It is on no index: whoever took the name there would be installed."""
    assert PROJECT["name"] not in DISTRIBUTIONS


@pytest.mark.parametrize(("file", "target"), sorted(set(to_install())), ids=str)
def test_what_one_is_told_to_install_exists(file, target):
    """Packages of others that pyproject names, or this clone with extras that it has."""
    name, _, extras = target.rstrip(".,;]").partition("[")
    if target.startswith("."):
        assert set(filter(None, extras.split(","))) <= set(EXTRAS), f"{file}: {target}"
    else:
        assert re.split("[<>=]", name)[0] in DISTRIBUTIONS, f"{file}: {target}"
