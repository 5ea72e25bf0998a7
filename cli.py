"""What every command has in common: how options are read, one line for every failure, progress.

    @click.command(cls=cli.OneLineErrors)       # a command on its own
    @click.group(cls=cli.Group)                 # or one with subcommands, these of class Command

Exit codes: 2 where the command line asks for what cannot be, 1 where the run failed, 130 and 143
where Ctrl-C or SIGTERM ended it. A failure is one line on stderr that begins with "error: "; with
--debug it is a traceback.
"""

import contextlib
import difflib
import errno
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import click

from errors import QuantbenchError, UsageError
from text import one_line, shown

Report = Callable[[int, int], None]
GROUPS = ("Model", "Speed", "Sample", "Cache", "Output")  # of generate.py's options, as help has it


# ---------------------------------------------------------------------------------- options


def pairs(
    argv: Sequence[str],
    takes_value: Mapping[str, bool],
    dashed: Collection[str] = (),
    words_allowed: bool = False,
) -> Iterator[tuple[str, str | bool]]:
    """Each option's underscore name with the text of its value, or True for a switch.

    `takes_value` holds every option there is; a value of those in `dashed` may begin with dashes.
    Where `words_allowed`, a word that belongs to no option comes as ("", word).
    Raises UsageError, one line, for anything else.
    """
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "-":
            if words_allowed:
                yield "", word
                continue
            raise UsageError(
                f"there is no option before {shown(word)}; text for the model is given as "
                "--prompt TEXT, in quotes where it has spaces"
                if "prompt" in takes_value
                else f"there is no option before {shown(word)}; --help lists the options"
            )
        spelling, equals, value = word.partition("=")
        name = key(spelling)
        if not spelling.startswith("--") or name not in takes_value:
            raise UsageError(f"no such option: {shown(spelling)}; {_nearest(name, takes_value)}")
        if not takes_value[name]:
            if equals:
                raise UsageError(f"--{name} takes no value; given: {shown(value)}")
            yield name, True
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise UsageError(f"--{name} takes a value, and none is given")
            if following.startswith("--") and name not in dashed:
                raise UsageError(
                    f"--{name} takes a value, and the option {shown(following)} follows it; "
                    f"a value that begins with dashes is given as --{name}=VALUE"
                )
            value = following
        yield name, value


def key(spelling: str) -> str:
    """An option's name however it is spelled: --top-k and --top_k are top_k."""
    return spelling.removeprefix("--").replace("-", "_")


def _nearest(name: str, names: Mapping[str, bool]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean --{close[0]}?" if close else "--help lists them all"


class OptionOfOptions(click.Option):
    """An option whose value is options itself: it may begin with dashes, and be empty."""


class TableOption(click.Option):
    """An option of generate.py's table, which checks its value; help shows one spelling."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        spelling = f"--{self.name} {self.metavar or ''}".rstrip()
        default = "" if self.is_flag or self.default is None else f" [{self.default}]"
        return spelling, f"{self.help}{default}"


class Command(click.Command):
    """A click command whose options are read as those of generate.py.

    Underscores and dashes are the same, a forgotten value is not filled with the next option, an
    empty value is refused, and what cannot be read is a UsageError of one line. Help lists the
    options by group. Positional arguments are taken where the command declares some.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings["context_settings"] = {
            "max_content_width": 100,
            **(settings.get("context_settings") or {}),
        }
        super().__init__(*arguments, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spelled, takes_value, may_be_empty = self._spellings(ctx)
        dashed = [name for name in may_be_empty if may_be_empty[name] is OptionOfOptions]
        words_allowed = any(isinstance(one, click.Argument) for one in self.params)
        arguments, words = [], []
        for name, value in pairs(args, takes_value, dashed, words_allowed):
            if not name:
                words.append(str(value))
            elif not takes_value[name]:
                arguments.append(spelled[name])
            elif not str(value).strip() and name not in may_be_empty:
                raise UsageError(f"--{name} takes a value; given: {shown(value)}")
            else:
                arguments.append(f"{spelled[name]}={value}")
        return super().parse_args(ctx, [*arguments, *(["--", *words] if words else [])])

    def asks_for_debug(self, ctx: click.Context, args: Sequence[str]) -> bool:
        """Whether --debug is among these arguments as an option, and not as another's value."""
        _, takes_value, _ = self._spellings(ctx)
        words = iter(args)
        for word in words:
            name = key(word)
            if word.startswith("--") and name == "debug":
                return True
            if word.startswith("--") and takes_value.get(name):
                next(words, None)
        return False

    def _spellings(
        self, ctx: click.Context
    ) -> tuple[dict[str, str], dict[str, bool], dict[str, type]]:
        """By underscore name: how click knows each option, whether it takes a value, and its class
        where that value may be empty."""
        spelled, takes_value, may_be_empty = {}, {}, {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue
            for name in (*parameter.opts, *parameter.secondary_opts):
                spelled[key(name)] = name
                takes_value[key(name)] = not getattr(parameter, "is_flag", False)
                if isinstance(parameter, OptionOfOptions | TableOption):
                    may_be_empty[key(name)] = type(parameter)
        return spelled, takes_value, may_be_empty

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(row)
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


# ---------------------------------------------------------------------------------- failures


class OneLineErrors(Command):
    """A command on its own, whose every failure is one line."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             **extra: Any) -> Any:  # fmt: skip
        return _carried_out(self, args, prog_name, extra)


class Group(click.Group):
    """A command with subcommands, whose every failure is one line."""

    command_class = Command

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"no_args_is_help": False, **settings})

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             **extra: Any) -> Any:  # fmt: skip
        return _carried_out(self, args, prog_name, extra)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = key(args[0]), self.list_commands(ctx)
        if args[0].startswith("-"):
            raise UsageError(f"no such option: {shown(args[0])}; --help lists the commands")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}"
            raise UsageError(f"No such command {shown(args[0])}. {hint}")
        return name, self.get_command(ctx, name), args[1:]

    def asks_for_debug(self, ctx: click.Context, args: Sequence[str]) -> bool:
        command = self.get_command(ctx, key(args[0])) if args else None
        return isinstance(command, Command) and command.asks_for_debug(ctx, args[1:])


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; what ends well at Ctrl-C ends well at this."""


def _carried_out(
    command: "OneLineErrors | Group",
    args: Sequence[str] | None,
    prog_name: str | None,
    extra: dict[str, Any],
) -> Any:
    """Run the command and leave the process with its exit code: instead of click's own main, which
    keeps silent about a closed pipe."""
    given = list(sys.argv[1:] if args is None else args)
    name = prog_name or os.path.basename(sys.argv[0])
    if not extra.pop("standalone_mode", True):  # whoever calls it so wants the exception
        with command.make_context(name, given, **extra) as context:
            return command.invoke(context)
    _open_standard_streams()
    try:
        with _sigterm_interrupts():
            if sys.stdout is None:
                raise QuantbenchError("stdout is closed; redirect it to a file or to /dev/null")
            with command.make_context(name, given, **extra) as context:
                command.invoke(context)
            sys.stdout.flush()
        code = 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except (Exception, KeyboardInterrupt) as error:
        lost = _lost_stdout(error)
        if lost is None and _debugging(command, name, given):
            raise
        message, code = explained(error) if lost is None else (lost, 1)
        if isinstance(error, KeyboardInterrupt) and sys.stderr and sys.stderr.isatty():
            say("")  # the line that the terminal's ^C stands in
        say(f"error: {one_line(message)}")
    sys.exit(code)


def _debugging(command: "OneLineErrors | Group", name: str, given: list[str]) -> bool:
    try:
        return command.asks_for_debug(click.Context(command, info_name=name), given)
    except Exception:  # a subcommand that cannot even be imported: that is the failure
        return "--debug" in given


def explained(error: BaseException) -> tuple[str, int]:
    """What to say about a failure, and the exit code; the last line of defence says so."""
    match error:
        case QuantbenchError():
            return str(error), error.exit_code
        case Terminated():
            return "ended by SIGTERM; nothing was logged", 128 + signal.SIGTERM
        case KeyboardInterrupt() | click.Abort():
            return "interrupted; nothing was logged", 128 + signal.SIGINT
        case click.ClickException():
            return error.format_message(), error.exit_code
        case RecursionError():
            return "the input is nested too deeply (--debug shows where)", 1
        case OSError() if error.strerror and error.filename is not None:
            return f"{os.fsdecode(error.filename)}: {error.strerror}", 1
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE):
            return f"{error.strerror} (--debug shows where)", 1
    if "embedded null" in str(error):
        return "a path holds a NUL character, which none can", 1
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):  # torch's words for it on the CPU
        return "out of memory; try a smaller --cache_size, --batch_size or a --quantization", 1
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line} (--debug shows where; please report it)", 1


def _open_standard_streams() -> None:
    """Give /dev/null to whichever of the three was closed, or the next file opened would take its
    number, and what libraries print would go into it; write every character somehow."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _lost_stdout(error: BaseException) -> str | None:
    """What to say if the failure is that stdout took no more; it then gets no more.

    Whether it was stdout only the place tells that failed: the error names no file.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, OSError) or not frames or sys.stdout is None:
        return None
    module, stream = frames[-1].f_globals.get("__name__"), frames[-1].f_locals.get("file")
    echoed = module == "click.utils" and stream is not sys.stderr
    if not echoed and module != __name__:
        return None
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"cannot write to stdout: {error.strerror}"


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------- progress


def quiet(debug: bool) -> None:
    """Keep the compiler's and the libraries' remarks out of the way of ours."""
    if not debug:
        warnings.filterwarnings("ignore")
        for name in ("torch._inductor", "torch._dynamo", "torchao", "bitsandbytes"):
            logging.getLogger(name).setLevel(logging.ERROR)


def say(line: str) -> None:
    """What the person should know while waiting: on stderr, so that stdout is the result.

    A stderr that takes nothing ends no run.
    """
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


@contextlib.contextmanager
def progress(what: str, lasting: bool = True) -> Iterator[Report]:
    """Show that something is going on, and for how long; yields report(bytes_done, bytes_total).

    A terminal shows it while it lasts. Where it is done, a `lasting` phase leaves one line.
    """
    started = time.perf_counter()
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(
                task, description=f"{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"
            )
    else:
        yield lambda done, total: None
    if lasting:
        say(f"{what}: {time.perf_counter() - started:.1f} s")
