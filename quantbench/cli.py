"""What all commands share: reading options and reporting a failure in one line.

    @click.command(cls=cli.OneLineErrors)
    @click.group(cls=cli.Group)                 # a command with subcommands, these of class Command

Exit codes: 2 if the command line is wrong, 1 if the run failed, 130 after Ctrl-C and 143 after
SIGTERM. A failure is one line on stderr that begins with "error: "; with --debug a traceback
precedes it.
"""

import codecs
import contextlib
import difflib
import errno
import itertools
import locale
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar, cast

import click
from click import shell_completion

from quantbench.errors import QuantbenchError, UsageError
from quantbench.progress import say
from quantbench.text import key, one_line, printed, shown

TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable that torchrun alone sets: not a job scheduler
NO_ROOM = re.compile("failed to map segment|[Cc]annot allocate memory|cannot create.*thread")
RANK_REPORTS = "QUANTBENCH_RANK_REPORT"  # a file for the message of a rank that fails
UTF8_MODE = "PYTHONUTF8"
TERMINATED = "quantbench.terminated"  # in a context's meta: a list, empty until SIGTERM arrives
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


# ---------------------------------------------------------------------------------- options


class OptionOfOptions(click.Option):
    """An option whose value is a text of options: it may start with dashes or be empty."""


class TableOption(click.Option):
    """An option of log.config.RunConfig, which checks its value. group: its section of --help."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


def together(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """A decorator of a click command's function: these options, in the order of --help."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What click refuses, as a UsageError of one line."""
    try:
        yield
    except click.UsageError as error:
        from quantbench.help_text import refusal

        raise UsageError(refusal(error)) from None


def _check_values(given: Mapping[str, Any], options: Mapping[str, click.Option]) -> None:
    """Raise UsageError for a value that is empty."""
    for option in options.values():
        values = given.get(option.name or "")
        for text in values if isinstance(values, list) else [values]:
            blank = isinstance(text, str) and not text.strip()
            if blank and not isinstance(option, OptionOfOptions | TableOption):
                raise UsageError(f"{option.opts[0]} takes a value; given: {shown(text)}")


class Command(click.Command):
    """A click command whose every failure is one line.

    Underscores and dashes are the same. An option is never taken as the value of the one before it,
    and a value is not empty. Help lists the options by group and ends with the examples of the
    command's file. Every command has --debug, whether it declares it or not.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        given = settings.get("context_settings") or {}
        settings["context_settings"] = {
            "max_content_width": 100, "token_normalize_func": key, **given}  # fmt: skip
        super().__init__(*arguments, **settings)
        if not any(param.name == "debug" for param in self.params):
            shows = {"is_flag": True, "expose_value": False, "help": "Show tracebacks"}
            self.params.append(click.Option(["--debug"], **shows))

    def texts(self, ctx: click.Context, args: Sequence[str]) -> dict[str, Any]:
        """Each given option's name with the text of its value, or True for a switch. Raises
        UsageError, one line, for what is no option, or no value of one."""
        with _refusals():
            return self.make_parser(ctx).parse_args(list(args))[0]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _refusals():
            return super().parse_args(ctx, args)

    def make_parser(self, ctx: click.Context) -> Any:
        """click's, which also refuses removed options, values that are missing or empty, and words
        that belong to no option; but not while the shell completes an unfinished line."""
        parser = super().make_parser(ctx)
        if ctx.resilient_parsing:
            return parser
        parse = parser.parse_args
        options = {
            key(name): param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }

        def checked(args: list[str]) -> Any:
            self._check_words(args, options)
            given, words, order = parse(args)
            takes_words = any(isinstance(param, click.Argument) for param in self.params)
            if words and not takes_words and not isinstance(self, click.Group):
                from quantbench.help_text import stray

                raise UsageError(stray(words[0], options))
            _check_values(given, options)
            return given, words, order

        parser.parse_args = checked  # type: ignore[method-assign]
        return parser

    def _check_words(self, args: Sequence[str], options: Mapping[str, click.Option]) -> None:
        """Raise UsageError for a removed option, and for an option in the place of a value."""
        for word in args:
            name = key(word.partition("=")[0])
            if word.startswith("--") and name not in options:
                from quantbench.help_text import REMOVED

                if instead := REMOVED.get(f"{self.name} --{name}"):
                    raise UsageError(f"--{name} was removed; {instead}")
        for word, value in itertools.pairwise(args):
            option = options.get(key(word)) if word.startswith("--") else None
            free = option is None or option.is_flag or isinstance(option, OptionOfOptions)
            if value.startswith("--") and not free:
                raise UsageError(
                    f"--{key(word)} takes a value, and the option {shown(value)} follows it; "
                    f"a value that starts with dashes is given as --{key(word)}=VALUE"
                )
        if "--" in args:
            raise click.NoSuchOption("--")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from quantbench.help_text import write_options

        write_options(formatter, self.get_params(ctx))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from quantbench.help_text import examples, write_examples

        root = ctx.find_root().command
        spelled = root.spelled if isinstance(root, Group) else str
        write_examples(formatter, [*map(spelled, examples(self.callback))])
        super().format_epilog(ctx, formatter)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[shell_completion.CompletionItem]:
        """An option is offered in one spelling: with dashes if what is typed has one."""
        dashes = "-" in incomplete.removeprefix("--")
        items = super().shell_complete(ctx, incomplete)
        return [
            item
            for item in items
            if ("-" if dashes else "_") in item.value[2:] or not set("-_") & set(item.value[2:])
        ]


class OneLineErrors(Command):
    """A command that is run by its own name, and not as a subcommand."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             **extra: Any) -> Any:  # fmt: skip
        """Run the command; end the process with its exit code. click's own hides a closed pipe."""
        given = list(sys.argv[1:] if args is None else args)
        name = prog_name or os.path.basename(sys.argv[0])
        variable = f"_{name.upper()}_COMPLETE"  # set by what the shell calls for completions
        if instruction := os.environ.get(variable):
            sys.exit(shell_completion.shell_complete(self, extra, name, variable, instruction))
        if not extra.pop("standalone_mode", True):  # click's way to ask for exceptions instead
            with self.make_context(name, given, **extra) as context:
                return self.invoke(context)
        if args is None:
            _begin_in_utf8()
        _open_standard_streams()
        debug, cause = "--debug" in given, None  # click empties `given`
        terminated: list[int] = []
        quiet(debug)
        try:
            if os.name != "posix":
                raise QuantbenchError(
                    "quantbench needs Linux or macOS; on Windows it runs inside WSL (wsl --install)"
                )
            with _sigterm_interrupts(terminated):
                if sys.stdout is None:
                    raise QuantbenchError("stdout is closed; redirect it to a file or to /dev/null")
                with self.make_context(name, given, **extra) as context:
                    context.meta[TERMINATED] = terminated
                    self.invoke(context)
                sys.stdout.flush()
            code = 0
        except click.exceptions.Exit as end:
            code = end.exit_code
        except SystemExit as end:
            code, cause = end.code, end.__cause__
        except (Exception, KeyboardInterrupt) as error:
            lost = _lost_stdout(error)
            if debug:
                traceback.print_exception(error)
            if terminated and isinstance(error, KeyboardInterrupt):
                error = Terminated()  # which a command may have caught and raised as Ctrl-C
            message, code = explained(error) if lost is None else lost
            if isinstance(error, KeyboardInterrupt) and sys.stderr and sys.stderr.isatty():
                say("")  # ends the line in which the terminal wrote ^C
            if message:
                _report(f"error: {one_line(message)}", code)
            cause = error
        if terminated:
            code = 128 + signal.SIGTERM  # whatever a command kept and said
        try:
            if sys.stderr:
                sys.stderr.flush()
        except OSError:
            _give_up(sys.stderr)
        raise SystemExit(code) from cause


class Group(OneLineErrors, click.Group):
    """A command with subcommands. With invoke_without_command it does something itself, too."""

    command_class = Command

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"no_args_is_help": False, **settings})

    def spelled(self, example: str) -> str:
        """An example of a command's file as whoever calls this group types it."""
        return example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not (args or self.invoke_without_command or ctx.resilient_parsing):
            names = ", ".join(self.list_commands(ctx))
            raise UsageError(f"Missing command. There are {names}; --help says what each does")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        parts = [self.format_commands, super().format_options]
        for write in reversed(parts) if self.invoke_without_command else parts:
            write(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from quantbench.help_text import REMOVED, given_options, stray

        name, names = key(args[0]), self.list_commands(ctx)
        alone = not given_options(ctx).keys() - {"debug"}
        if name in names and alone:
            return name, self.get_command(ctx, name), args[1:]
        if ctx.resilient_parsing:
            return None, None, []
        if instead := REMOVED.get(name):
            raise UsageError(f"{name} was removed; {instead}")
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        if self.invoke_without_command and (not close or not alone):
            raise UsageError(stray(args[0], [key(param.opts[0]) for param in self.params]))
        hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}"
        raise UsageError(f"No such command {shown(args[0])}. {hint}")


# ---------------------------------------------------------------------------------- failures


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. As a KeyboardInterrupt it is cleaned up after as Ctrl-C is."""


def _report(line: str, code: int) -> None:
    """Print the line of a failure. A rank whose launcher prints one line for all ranks leaves it in
    a file instead (parallel/launch.py); under torchrun, the first says what all ranks find."""
    if path := os.environ.get(RANK_REPORTS):
        with open(path, "x", encoding="utf-8") as file:
            file.write(line.removeprefix("error: "))
    elif TORCHRUN not in os.environ or os.environ.get("RANK", "0") == "0":
        say(line)
    elif code != 2:
        with contextlib.suppress(OSError):
            click.echo(line, file=sys.__stderr__)  # sys.stderr of such a rank is silent


def explained(error: BaseException) -> tuple[str, int]:
    """The message for a failure, and the exit code. An unexpected one asks to be reported."""
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
        case FileNotFoundError() if "temporary directory" in str(error):  # tempfile's
            return "there is no temporary folder to write into; set TMPDIR to one", 1
        case ImportError() if NO_ROOM.search(str(error)):
            return "not enough memory to load torch; raise the limit of `ulimit -v`", 1
        case FileNotFoundError() if error.filename is None:  # from os.getcwd
            return "the current folder was removed; change into one that is there", 1
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE):
            return f"{error.strerror} (--debug shows where)", 1
    if "embedded null" in str(error):
        return "a path contains a NUL character, which no path can", 1
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):  # torch's message on the CPU
        return "out of memory; try a smaller --cache_size, --batch_size or a --quantization", 1
    if "Storage size calculation overflowed" in str(error):  # torch's
        return "this needs more bytes than 64 bits can count; try a smaller --batch_size", 1
    if "InvalidCxxCompiler" in str(error):  # torch's inductor
        return (
            "torch.compile needs a C++ compiler; install g++ or set CXX, or leave out --compile",
            1,
        )
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line} (--debug shows where; please report it)", 1


def _begin_in_utf8() -> None:
    """Begin anew in Python's UTF-8 mode where the locale has another encoding (LC_ALL=C, latin-1):
    a model's name, a prompt or a worker's message may have any character, whatever the locale."""
    encodings = {sys.getfilesystemencoding(), locale.getpreferredencoding(False)}
    is_utf8 = {codecs.lookup(name).name for name in encodings} == {"utf-8"}
    if not is_utf8 and os.environ.get(UTF8_MODE) != "1" and sys.executable:
        os.environ[UTF8_MODE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed; escape what their encoding lacks.

    Otherwise the next file that is opened would get the number of the closed stream, and what
    libraries print would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is not None and not isinstance(sys.stdout, Printed):
        sys.stdout = cast(TextIO, Printed(sys.stdout))


class Printed:
    """stdout, which gets texts as text.printed has them: what a model writes, or others wrote into
    a file that is read, must not move the cursor or write into the clipboard. What stderr gets is
    made so by progress.say: bars of other libraries move the cursor there."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printed(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _lost_stdout(error: BaseException) -> tuple[str, int] | None:
    """The message for a failure to write to stdout, which is then closed, and the exit code; None
    for other failures. Nobody needs to be told that `head` has read enough: that has no message.

    The error names no file, so only the place where it was raised shows that it was stdout.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, OSError) or not frames or sys.stdout is None:
        return None
    module, inner = frames[-1].f_globals.get("__name__"), frames[-1].f_locals
    stream = inner.get("file") or inner.get("self")
    if module not in ("click.utils", __name__) or stream is sys.stderr:
        return None
    _give_up(sys.stdout)
    if error.errno == errno.EPIPE:
        return "", 128 + signal.SIGPIPE
    return f"cannot write to stdout: {error.strerror}", 1


def _give_up(stream: TextIO) -> None:
    """Send to /dev/null what a stream could not write and keeps: Python would try again at its end,
    and end with exit code 120."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _sigterm_interrupts(arrived: list[int]) -> Iterator[None]:
    """Make SIGTERM end the command as Ctrl-C does. A second SIGTERM ends the process at once.
    arrived: the signal is added to it when it arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        arrived.append(number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ended_by() -> str:
    """What ended a command that has caught KeyboardInterrupt."""
    context = click.get_current_context(silent=True)
    return "ended by SIGTERM" if context and context.meta.get(TERMINATED) else "interrupted"


def quiet(debug: bool) -> None:
    """Silence warnings of the compiler and of libraries, unless `debug`."""
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported
        warnings.filterwarnings("ignore")
        for name in ("torch._inductor", "torch._dynamo", "torchao", "bitsandbytes"):
            logging.getLogger(name).setLevel(logging.ERROR)
