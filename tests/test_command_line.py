"""The command `quantbench` as a whole: its commands, its help, its errors, completion."""

import os
import re
import shutil
import sys

import click
import pytest

from quantbench.__main__ import commands
from tests import seeds
from tests.programs import command as ended
from tests.programs import python, ran
from tests.refusals import one_line

WANTED = "generate ab recommend quality replay readme peers schemes log".split()


def test_every_command_is_there_and_explained():
    shown = ended("--help").stdout
    for name in WANTED:
        assert re.search(rf"^  {name} +\S+ \S+", shown, re.M), name
    assert "_QUANTBENCH_COMPLETE=bash_source" in shown
    assert re.fullmatch(r"quantbench \S+\n", ended("--version").stdout)


GROUPS = {"experts": ("experts profile", "experts show")}  # commands that do nothing themselves
SINGLE = sorted(
    {*commands.list_commands(None), "log check", "latency tables"} - {"log", *GROUPS}
    | {name for names in GROUPS.values() for name in names}
)


@pytest.mark.parametrize("name", SINGLE)
def test_help_begins_with_the_command_s_own_options_and_ends_with_examples(name):
    words = name.split()
    shown = ended(*words, "--help").stdout
    headings = [line for line in shown.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert headings[-1] == "Examples:" and "Other:" not in headings
    examples = shown.partition("Examples:\n")[2].strip().splitlines()
    assert examples[0].startswith("quantbench ")
    assert not any(line.strip().startswith("python ") for line in examples)
    if name in ("generate", "chat"):  # their own options are in groups
        assert headings[0] == "Model:"
    else:
        assert headings[0] == "Options:" and headings[1].endswith((", as in generate:", "mples:"))
    assert shown.count("  --help ") == shown.count("  --debug ") == 1
    assert "RANGE" not in shown


def test_help_needs_no_torch():
    """Nor do the names of what is compared: each command imports it after its options are read."""
    text = (
        "import sys; from click.testing import CliRunner\n"
        "from quantbench.__main__ import commands\n"
        "for name in commands.list_commands(None):\n"
        "    shown = CliRunner().invoke(commands, [name, '--help'])\n"
        "    print(name, shown.exit_code, 'torch' in sys.modules)\n"
    )
    done = python("-c", text)
    lines = done.stdout.splitlines()
    assert len(lines) >= len(WANTED), done.stderr
    assert all(line.endswith(" 0 False") for line in lines), done.stdout


def test_a_line_is_parsed_once(monkeypatch):
    parsed, make = [], click.Command.make_parser

    def made(self, context):
        parsed.append(self.name)
        return make(self, context)

    monkeypatch.setattr(click.Command, "make_parser", made)
    assert ended("log", "check", "nowhere.txt").exit_code
    assert parsed[1:] == ["log", "check"] and len(parsed) == 3


def test_a_folder_that_was_removed_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = ended("log", "check", "log.txt")
    assert result.exit_code == 1 and "the current folder was removed" in result.stderr


@pytest.mark.parametrize("line", ["--debug {} {}", "{} --debug {}", "{} {} --debug"])
def test_debug_gives_a_traceback_wherever_it_stands(line):
    """The exit code and the last line are those without --debug."""
    for command, code, message in (
        ("log check /nope/log", 1, "there is no folder"),
        ("replay --log /nope/log --all", 1, "there is no folder"),
        ("ab --arms some", 2, "--arms takes all"),
    ):
        result = ended(*line.format(*command.split(" ", 1)).split())
        *before, last = result.stderr.splitlines()
        assert result.exit_code == code and last.startswith("error: ") and message in last
        assert before[0] == "Traceback (most recent call last):" and message in before[-1]


def test_where_windows_lacks_modules_there_is_one_line(tmp_path):
    """No module of the commands needs fcntl or resource to be imported; running them says why."""
    text = (
        "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None\n"
        "import quantbench.__main__, os\n"
        "os.name = 'nt'\n"
        "quantbench.__main__.commands.main(['generate'], prog_name='quantbench')\n"
    )
    done = python("-c", text)
    assert done.returncode == 1
    assert done.stderr.startswith("error: quantbench needs Linux or macOS; on Windows")
    assert done.stderr.count("\n") == 1


OFFERED = [
    ("gen", {"generate"}),
    ("generate --quantization=int8", {"int8wo", "int8dq", "int8dq-int4wo-32"}),
    ("generate --quantization int8w", {"int8wo"}),
    ("generate --compile --kv_cache f", {"fp8"}),
    ("generate --decoder cpu", {"cpu-step"}),
    ("generate --expert_policy c", {"cache", "compute_there"}),
    ("generate --expert_placement pop", {"popularity"}),
    ("generate --expert_memory a", {"auto"}),
    ("generate --max-n", {"--max-new-tokens"}),
    ("generate --max_n", {"--max_new_tokens"}),
    ("generate --checkpoint_path ti", {"tiny", "tiny_moe"}),
    ("generate --checkpoint_path dummy:TinyLlama", {"dummy:TinyLlama-1.1B-Chat-v1.0"}),
    ("peers --schemes int8wo,fp", {"int8wo,fp6"}),
    ("schemes sparse-marlin-", {"sparse-marlin-wanda"}),
    ("log ch", {"check"}),
    ("ab --format cs", {"csv"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_is_offered(tmp_path):
    """What bash shows after some of these words, drawn anew in every run: click's function runs,
    with a `quantbench` of ours."""
    command = tmp_path / "quantbench"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quantbench "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for line, offered in seeds.sample(OFFERED, 6):
        words = ["quantbench", *line.split()]
        script = (
            'eval "$(_QUANTBENCH_COMPLETE=bash_source quantbench)"; compopt() { :; }\n'
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
            '_quantbench_completion quantbench; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = ran("bash", "-c", script, env=environment)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) == offered, line


def test_a_command_that_keeps_what_it_has_ends_with_sigterm_s_code():
    """As `latency` does, which goes on after the interruption to write its tables."""
    text = (
        "import os, signal, click; from quantbench.cli import OneLineErrors\n"
        "@click.command(cls=OneLineErrors)\n"
        "def keep():\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt: click.echo('kept')\n"
        "keep.main([])\n"
    )
    done = python("-c", text)
    assert (done.returncode, done.stdout) == (143, "kept\n"), done.stderr


def test_a_removed_option_is_named_in_every_spelling_and_a_file_of_its_name_is_none():
    for words in (["--history", "a"], ["--history=a"]):
        result = ended("replay", *words)
        assert one_line(result).startswith("--history was removed; ") and result.exit_code == 2
    assert "removed" not in one_line(ended("replay", "history"))
