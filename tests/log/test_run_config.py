"""RunConfig against the commands of the real log, bash, shlex, and arbitrary values."""

import dataclasses
import os
import re
import shlex

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.log.config import (
    RunConfig,
    argv,
    breaks_off,
    has_glued_option,
    option_table,
    repro,
    split,
)
from quantbench.log.kinds import Number, OneOf, Room, Switch, Text, Whole
from quantbench.log.options import options, parse
from quantbench.run.checks import check_options
from tests import programs
from tests.models.refused import refusal
from tests.programs import OLD_LOG, ran

COMMANDS = [
    line.partition(" repro: ")[2] for line in OLD_LOG.read_text().splitlines() if "tok/s=" in line
]

# No command line can carry a NUL; RunConfig refuses it, tested below.
GLUED = "8192--kv_cache_quantization"
ODD = ["--", "--compile", "-5", "5--compile", GLUED, "a\nb", "'", "\\", "$'", "!"]
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
TEXTS |= st.sampled_from(ODD)


def values(field):
    """What an option takes, by its kind."""
    match field.metadata["option"].kind:
        case Switch():
            taken = st.booleans()
        case Whole() as kind:
            taken = st.integers(kind.minimum, kind.maximum)
        case Number():
            taken = st.floats(0, allow_nan=False, allow_infinity=False)
        case OneOf() as kind:
            names = [*kind.choices, *kind.former]
            taken = st.sampled_from([*names, *(kind.prefix + name for name in names)])
        case Room():
            taken = st.sampled_from(["auto", "12", "8GB", "0.5GB", "500MB"])
        case Text() as kind:
            taken = TEXTS if kind.may_be_empty else TEXTS.filter(bool)
    return st.none() | taken if field.default is None else taken


# Without tp: the repro command of several ranks starts with torchrun.
FIELDS = [field for field in dataclasses.fields(RunConfig) if field.name != "tp"]
CONFIGS = st.builds(RunConfig, **{field.name: values(field) for field in FIELDS})


@pytest.mark.parametrize("command", COMMANDS)
def test_repro_equals_the_command_of_every_reference_line(command):
    spaced = re.sub(r"(\d)--", r"\1 --", command)
    assert repro(parse(split(command)[2:])) == spaced


def test_a_reference_line_worked_by_hand():
    command = next(c for c in COMMANDS if "8192--kv_cache_quantization --linear" in c)
    config = parse(split(command)[2:])
    assert config == RunConfig(
        checkpoint_path="../../../checkpoints/meta-llama/Meta-Llama-3.1-8B/model.pth",
        device="cuda",
        precision="bfloat16",
        num_samples=5,
        max_new_tokens=200,
        top_k=200,
        temperature=0.8,
        cache_size=8192,
        kv_cache_quantization=True,
        linear_causal_mask=True,
    )


@given(CONFIGS)
def test_argv_and_repro_read_back_as_the_same_config(config):
    assert parse(argv(config)) == config
    line = repro(config)
    assert len(line.splitlines()) == 1
    assert line.isprintable() or not re.search(r"[\x00-\x1f\x7f]", line)
    words = split(line)
    assert words == ["python", "generate.py", *argv(config)]
    assert parse(words[2:]) == config
    assert not breaks_off(line)


@given(CONFIGS)
def test_dashes_and_equals_signs_are_the_same_as_underscores_and_spaces(config):
    words = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words.append(f"--{name}={value!r}" if field.type is float else f"--{name}={value}")
        elif value == 0 and value is not False:
            words.append(f"--{name}=0")
    assert parse(words) == dataclasses.replace(config)


NASTY = [
    "",
    "two words",
    "--compile",
    "-",
    'it\'s "quoted" `ls` $HOME ${HOME} $(ls) \\ !! !ls * ? [a] {a,b} ~ # ; & | < >',
    "line one\nline two\ttab\rreturn",
    "$'\\n'",
    "\n'\\!$`\"",
    "\x01\x02\x1b[31m\x7f\x85\u2028\u2029 0a\x0bcafe",
    "naïve 漢字 🦙 \u00a0\u200d",
    "\u00e9\n漢字 🦙",
    "\udcff is not UTF-8",
    "trailing backslash \\",
    "trailing newline\n",
    "8192--kv_cache_quantization",
]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("prompt", NASTY)
def test_bash_reads_the_repro_line_as_the_same_words(prompt, locale):
    config = RunConfig(prompt=prompt, checkpoint_path=prompt or "tiny", compile=True)
    command, environment = f"printf '%s\\0' {repro(config)}", {**os.environ, "LC_ALL": locale}
    printed = ran("bash", "-c", command, env=environment, text=False, check=True).stdout
    words = [os.fsdecode(word) for word in printed.split(b"\0")[:-1]]
    assert words == ["python", "generate.py", *argv(config)]
    assert parse(words[2:]) == config


@pytest.mark.parametrize(
    "command, words",
    [
        (r"$'a\tb\x41\101\u00e9\U0001F999\e\'\\\q'", ["a\tbAAé🦙\x1b'\\\\q"]),
        (r'"$"' + r" $'a'b'c' $x $", ["$", "abc", "$x", "$"]),
        ("one \\\n two", ["one", "two"]),
        (r'"\$5 \n"', [r"$5 \n"]),
    ],
)
def test_splitting_worked_by_hand(command, words):
    assert split(command) == words


@pytest.mark.parametrize(
    "command", ["'open", '"open', "$'open", "a \\", r"$'\U00110000'", "'\ud800'"]
)
def test_what_cannot_be_split_is_an_error(command):
    with pytest.raises(UsageError):
        split(command)


@pytest.mark.parametrize(
    "command, apart",
    [
        ("--cache_size 8192--kv_cache_quantization", "--cache_size 8192 --kv_cache_quantization"),
        (
            "--cache_size 8192--kv_cache_quantization--linear_causal_mask --compile",
            "--cache_size 8192 --kv_cache_quantization --linear_causal_mask --compile",
        ),
        ("--cache-size 8--kv-cache-quantization", "--cache-size 8 --kv-cache-quantization"),
        ("--temperature 0.8--cache_size 8", "--temperature 0.8 --cache_size 8"),
    ],
)
def test_an_option_glued_to_a_number_is_taken_apart(command, apart):
    assert split(command) == apart.split(" ")
    assert has_glued_option(command)


@pytest.mark.parametrize(
    "command",
    [
        r"""a 'b c' "d \" \\ e" f\ g """,
        "  spaced\tout  ''  \"\" x''y",
        "'a'\"b\"c",
        "a\u00a0b '\n'",
        "--prompt '8192--kv_cache_quantization'",
        "--prompt 8192--kv_cache_quantization",
        "--prompt '--cache_size 8192--kv_cache_quantization'",
        "--cache_size '8192--kv_cache_quantization'",
        "--checkpoint_path runs/7--compile",
        "--cache_size 8192--unknown",
        "--cache_size 8192",
    ],
)
def test_all_else_is_split_as_shlex_does(command):
    assert split(command) == shlex.split(command)
    assert not has_glued_option(command)


# tests/messages.txt has what commands say of others. A file cannot hold these words, or `parse`
# alone refuses them.
@pytest.mark.parametrize(
    "words, says",
    [
        ("--seed " + "9" * 6000, "--seed takes"),
        ("--prompt=\0", "--prompt takes text without NUL characters"),
        ("--prompt=\ud800", "--prompt takes text"),
        ("--help", "no such option"),
    ],
)
def test_every_wrong_argument_is_one_line_that_names_it(words, says, capfd):
    line = refusal(UsageError, parse, words.split(" "))
    assert says in line and len(line) < 250 and line.splitlines() == [line]
    assert capfd.readouterr() == ("", "")


KINDS = {name: option.kind for name, option in option_table().items()}


@pytest.mark.parametrize("name", [n for n, k in KINDS.items() if isinstance(k, Whole | Number)])
def test_numbers_out_of_range_are_refused(name):
    kind = KINDS[name]
    whole = isinstance(kind, Whole)
    wrong = (kind.minimum - 1, kind.maximum + 1) if whole else (-0.5, "nan", "inf", 10**400)
    for value in (*wrong, "many", ""):
        with pytest.raises(UsageError, match=f"--{name} takes"):
            RunConfig(**{name: value})
    if whole:
        assert getattr(RunConfig(**{name: kind.maximum}), name) == kind.maximum


@pytest.mark.parametrize(
    "wrong",
    [{"top_k": True}, {"compile": 1}, {"prompt": None}, {"temperature": 10**400}, {"top_k": 2.0}],
)
def test_values_of_the_wrong_type_are_refused(wrong):
    with pytest.raises(UsageError):
        RunConfig(**wrong)


def test_values_are_stored_in_one_form():
    config = RunConfig(top_k="50", temperature=1, precision="torch.float16")
    assert (config.top_k, config.temperature, config.precision) == (50, 1.0, "float16")
    assert repr(RunConfig(temperature=-0.0).temperature) == "0.0"
    assert parse(["--top_k", "5", "--top-k=7"]).top_k == 7


def test_only_what_old_logs_always_wrote_is_written_at_its_default():
    assert repro(RunConfig(device="cpu")) == (
        "python generate.py --checkpoint_path tiny --device cpu --precision torch.bfloat16 "
        "--num_samples 5 --max_new_tokens 200 --top_k 200 --temperature 0.8"
    )


def test_the_help_of_a_command_gives_each_option_one_line():
    @click.command(cls=Command)
    @options()
    def main(**values):
        raise AssertionError("not reached")

    shown = CliRunner().invoke(main, ["--help"], terminal_width=100).output.splitlines()
    for field in dataclasses.fields(RunConfig):
        (row,) = [line for line in shown if re.match(rf"  --{field.name}( |$)", line)]
        assert row.split("  ")[-1]
    assert all(line.startswith("  --") for line in shown[3:] if line.startswith("  "))


def test_a_command_is_seen_to_break_off_until_its_last_options():
    config = RunConfig(device="cpu", prompt="it's here", seed=77, compile=True)
    line = repro(config)
    kept = [cut for cut in range(len(line)) if not breaks_off(line[:cut])]
    ends = [line[line.index("--temperature") + len("--temperature ") : cut] for cut in kept]
    # What is left reads as a command that somebody could have given, and only then.
    assert ends == [
        *("0", "0.", "0.8", "0.8 "),
        *(f"0.8 --prompt {prompt}" for prompt in PROMPT_CUTS),
        "0.8 --prompt 'it'\"'\"'s here' --seed 7",
    ]
    for cut in kept:
        parse(split(line[:cut])[2:])


# shlex writes it's here as three quoted pieces; a cut between them leaves no quote open.
PROMPT_CUTS = ["'it'", "'it'\"'\"", "'it'\"'\"'s here'", "'it'\"'\"'s here' "]


@pytest.mark.parametrize("decoder", ["cpu-stack", "cpu-layer"])
def test_a_decoder_that_is_gone_is_readable_in_old_lines_and_refused_by_a_run(decoder):
    line = repro(parse(["--decoder", decoder]))
    assert f"--decoder {decoder}" in line and repro(parse(shlex.split(line)[2:])) == line
    message = f"--decoder takes one of auto, cpu-step, modules; given: '{decoder}'"
    with pytest.raises(UsageError, match=message):
        check_options(RunConfig(decoder=decoder))
    assert programs.command("generate", "--decoder", decoder).exit_code == 2
