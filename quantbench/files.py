"""Reading and writing the files that a person names: only regular files, and only as a whole.

An input may be a FIFO, a device or a broken link. An output may be on a full disk, or be a file
that must not be replaced. In each case the error is one line with the path.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.text import shown, size
from quantbench.typed_json import parsed

FilePath = str | os.PathLike[str]
MAX_BYTES = 1 << 30  # size of the largest file that is read as a whole
HEAD = 1 << 12  # bytes read from a file's beginning to recognize its kind


def require_regular(path: FilePath) -> None:
    """Raise OSError unless `path` is a regular file, or a link to one."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")


def reason(path: FilePath, error: Exception) -> str:
    """Why `path` could not be opened, read or written."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8 text"
    if isinstance(error, UnicodeEncodeError):
        return "no file system can hold such a name"
    if isinstance(error, ValueError):
        return "a path cannot hold a NUL character"
    if not isinstance(error, OSError):
        return str(error)
    with contextlib.suppress(OSError, ValueError):
        if error.errno == errno.ENOENT and os.path.islink(path):
            return f"it is a link to {shown(os.readlink(path))}, which does not exist"
    if error.errno == errno.ELOOP:
        return "it is a link that leads back to itself"
    if error.errno == errno.EMLINK:
        return "it is a link, which could lead to somebody's file"
    return error.strerror or str(error)


def lock(file: int | IO[Any], shared: bool = False) -> None:
    """Wait until nobody else holds a lock on this open file, or none but a shared one; then hold
    one. It is released when the file is closed, or when the process ends, even if killed."""
    import fcntl  # here, because Windows has none: importing our modules must not fail there

    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def take(file: int | IO[Any]) -> bool:
    """Hold a lock on this open file from now on; False where another process holds one."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def opened(path: FilePath, flags: int, mode: int = 0o666) -> int:
    """os.open for a file that we keep in a folder, where somebody may have put a link or a FIFO of
    that name. Raises OSError for these, and for a file to be written that has another name."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.EMLINK, "it is a link") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads
            raise OSError(errno.EINVAL, "not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if flags & os.O_ACCMODE != os.O_RDONLY and status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it is a hard link")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_ours(path: FilePath) -> bytes:
    """The content of a file that we keep. Raises OSError as `opened`, and never waits."""
    with os.fdopen(opened(path, os.O_RDONLY), "rb") as file:
        return file.read()


def problem(path: FilePath) -> str | None:
    """Why `path` cannot be read as a file; None where it can."""
    return _failure(path, require_regular) or _failure(path, lambda path: open(path, "rb").close())


def missing(path: FilePath) -> str | None:
    """Why `path` does not exist or cannot be examined; None if it exists."""
    return _failure(path, os.stat)


def _failure(path: FilePath, examine: Callable[[FilePath], object]) -> str | None:
    try:
        examine(path)
    except (OSError, ValueError) as error:
        return reason(path, error)
    return None


@contextlib.contextmanager
def named(what: str, path: FilePath, raised: type[QuantbenchError]) -> Iterator[None]:
    """Turn a failure to open, read or write `path` into `raised`: "`what` `path`: the reason"."""
    try:
        yield
    except (OSError, ValueError) as error:
        is_nul = "null byte" in str(error) or "null character" in str(error)
        if not (is_nul or isinstance(error, OSError | UnicodeError)):
            raise
        raise raised(f"{what} {_name(path)}: {reason(path, error)}".strip()) from None


def read_bytes(what: str, path: FilePath, raised: type[QuantbenchError] = UsageError) -> bytes:
    """The content of a regular file of at most MAX_BYTES. Raises `raised`, one line, otherwise."""
    with named(what, path, raised):
        require_regular(path)
        length = os.stat(path).st_size
        if length > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{size(length)} are more than the {size(MAX_BYTES)} read")
        with open(path, "rb") as file:
            return file.read(max(length, 1 << 20))  # read() reserves as much as its argument


def read_text(what: str, path: FilePath, raised: type[QuantbenchError] = UsageError) -> str:
    """The text of a UTF-8 file. what: the option that names it. Raises `raised`, one line."""
    data = read_bytes(what, path, raised)
    with named(what, path, raised):
        return data.decode("utf-8")


def read_json(
    what: str, path: FilePath, raised: type[QuantbenchError] = UsageError, hint: str = ""
) -> Any:
    """The value in a JSON file. what: the option that names it. hint: what to do where the file
    holds none. Raises `raised`, one line."""
    data = read_bytes(what, path, raised)
    try:
        return parsed(data)
    except ValueError as error:
        raise raised(refusal(what, path, error, hint)) from None


def refusal(what: str, path: FilePath, why: object, hint: str = "") -> str:
    """One line for a file whose content is not what was expected."""
    return f"{what} {_name(path)}: {why}".strip() + (f"; {hint}" if hint else "")


# ---------------------------------------------------------------------------------- outputs


# Whether a file with these first bytes may be of this kind.
is_json = re.compile(rb"\s*[{[]").match


def json_with(first_key: str) -> Callable[[bytes], re.Match[bytes] | None]:
    """Whether a file that begins like this may be JSON that a command wrote: an object whose first
    key is this one."""
    return re.compile(rb'\s*\{\s*("%s"|\}\s*$)' % first_key.encode()).match


@dataclass(frozen=True)
class Output:
    """A file that a command will write."""

    option: str  # that names it
    path: FilePath | None
    holds: Callable[[bytes], object]  # whether a file with these first bytes may be replaced
    kind: str  # of file, in words

    def check(self) -> None:
        """Check, before a long run, that the file can be written. Raises LogError if it cannot,
        UsageError if a file of another kind is there."""
        if self.path is None:
            return
        head = b""
        with named(self.option, self.path, LogError):
            require_writable(self.path)
            if os.path.isfile(self.path):
                with open(self.path, "rb") as file:
                    head = file.read(HEAD)
        if head and not self.holds(head):
            given = f"{self.option} {_name(self.path)}"
            raise UsageError(f"{given} holds something that is no {self.kind}; give another")


def check_outputs(
    outputs: Sequence[Output], inputs: Mapping[str, FilePath | None] = MappingProxyType({})
) -> None:
    """Check, before a long run, that the outputs can be written, and overwrite nothing else.

    inputs: by option. Raises UsageError for an output that coincides with an input or with another
    output, and what Output.check raises.
    """
    refuse_coinciding({output.option: output.path for output in outputs}, inputs)
    for output in outputs:
        output.check()


def refuse_coinciding(
    outputs: Mapping[str, FilePath | None], inputs: Mapping[str, FilePath | None]
) -> None:
    """Raise UsageError where an output is the file of another option, by another spelling or a
    link, too. Both are by option."""
    seen: dict[object, str] = {}
    for option, path in (*outputs.items(), *inputs.items()):
        if path is None:
            continue
        first = seen.setdefault(_identity(path), option)
        if first != option and (first in outputs or option in outputs):
            raise UsageError(f"{first} and {option} name the same file, {_name(path)}".strip())


def refuse_folder(option: str, path: FilePath, folder_option: str, folder: FilePath) -> None:
    """Raise UsageError where the file `path` would be `folder`, or a folder above it."""
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
        raise UsageError(
            f"{option} {_name(path)}: {folder_option} {_name(folder)} makes that a folder, and "
            f"{option} takes a file; give another"
        )


def _identity(path: FilePath) -> object:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return os.path.abspath(path) if "\0" in os.fspath(path) else os.path.realpath(path)
    return status.st_dev, status.st_ino


def check_folder(option: str, path: FilePath) -> None:
    """Raise LogError unless `path` is a folder that can be written, or can be made one. Nothing is
    changed."""
    with named(option, path, LogError):
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # raises for a name that no folder can have
        place = Path(os.path.abspath(path))
        while not os.path.lexists(place):
            place = place.parent
        if not stat.S_ISDIR(os.stat(place).st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        require_new_file(place)


def cache_folder() -> Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME/quantbench, or ~/.cache/quantbench; as
    the standard says, a relative $XDG_CACHE_HOME is ignored.

    Its code is run, so nobody else may write there: otherwise, and without a home, it is a folder
    in $TMPDIR, and a line says why.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME")
    home = os.path.expanduser("~") if home is None else home  # as the system's list of users says
    place = Path(given) if os.path.isabs(given) else Path(home, ".cache")
    return _private_cache(place / "quantbench", Path(tempfile.gettempdir()))


@functools.cache
def _private_cache(folder: Path, temporary: Path) -> Path:
    why = "there is no home folder" if not folder.is_absolute() else not_private(folder)
    if why is None:
        return folder
    # The same for every process of this user, so that the kernels are built once.
    stand_in = temporary / f"quantbench-{os.getuid()}"
    if not_private(stand_in) is not None:
        stand_in = Path(tempfile.mkdtemp(prefix="quantbench-", dir=temporary))
        atexit.register(shutil.rmtree, stand_in, ignore_errors=True)
    with contextlib.suppress(OSError):
        stand_in.mkdir(mode=0o700, exist_ok=True)
    print(f"The cache is {stand_in}: {why}", file=sys.stderr)
    return stand_in


def not_private(folder: Path) -> str | None:
    """Why somebody else could write into this folder, or into the one that it will be made in; None
    if nobody can. A folder that cannot be examined is no reason."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            folder = next(parent for parent in folder.parents if os.path.lexists(parent))
            return _others_write(Path(os.path.realpath(folder)))
        real = Path(os.path.realpath(folder))
        status = os.stat(real)
        if status.st_uid != os.getuid():
            return f"{folder} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write into {folder}; chmod go-w {folder} lets it be used"
        return _others_write(real.parent)
    return None


def _others_write(folder: Path) -> str | None:
    """Why anybody can put another folder in the place of one that lies in this folder, or above; a
    sticky bit, as of /tmp, prevents that."""
    for each in (folder, *folder.parents):
        mode = os.stat(each).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others may write into {each}"
    return None


def is_private(path: Path) -> bool:
    """Whether this is a regular file, and no link, that only this user can have written."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and stat.S_ISREG(status.st_mode)


@functools.cache
def digest_of_code(*paths: Path) -> str:
    """A SHA-256 of our own source files in these folders, and of these files: what other code has
    kept is not read."""
    kinds = ("*.py", "*.cpp", "*.h")
    files = {file for path in paths for kind in kinds for file in path.rglob(kind)}
    digest = hashlib.sha256()
    for file in sorted(files | {path for path in paths if path.is_file()}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def require_new_file(folder: FilePath) -> None:
    """Raise OSError unless a file can be made in this folder. Nothing is changed.

    os.access does not tell: root may write to /proc, and no file can be made there.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno == errno.ENOENT and os.path.isdir(folder):
            raise OSError(errno.EPERM, f"no file can be made in {_name(folder)}") from None
        raise


def require_writable(path: FilePath) -> None:
    """Raise OSError if a file cannot be created or replaced at `path`. Nothing is changed."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))
        if os.fspath(path).endswith(os.sep):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
        if not os.fspath(path):
            raise
        if not os.path.isdir(folder):
            raise OSError(errno.ENOENT, f"No such file or directory: {folder}") from None
        require_new_file(folder)
        return
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def write_text(what: str, path: FilePath, text: str, follow: bool = True) -> None:
    """Write this text to the file. On failure the file is unchanged, and LogError is raised.
    follow: as for `replace`."""

    def write(file: Path) -> None:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            with contextlib.suppress(OSError):  # a pipe cannot be synchronized
                os.fsync(opened.fileno())

    replace(what, path, write, follow)


def replace(
    what: str, path: FilePath, write: Callable[[Path], object], follow: bool = True
) -> None:
    """Call `write` with a temporary file in the folder of `path`, which then replaces `path`.

    follow: where a person named the path. It may be a link, and the file is the one that it leads
    to; what is not a regular file, such as /dev/stdout, is written directly. A file that we keep in
    a folder replaces whatever has its name there. Raises LogError.
    """
    with named(what, path, LogError):
        if follow and os.path.exists(path) and not os.path.isfile(path):
            write(Path(path))
            return
        goal = Path(os.path.realpath(path) if follow else path)
        # A name has at most 255 bytes, a character up to 4. The suffix stays: traces are compressed
        # where it is .gz.
        name = f".{secrets.token_hex(8)}.{goal.name[:40]}{goal.suffix[-20:]}"
        scratch = goal.with_name(name)
        os.close(opened(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            write(scratch)
            if follow and goal.exists():
                shutil.copymode(goal, scratch)
            os.replace(scratch, goal)
        finally:
            scratch.unlink(missing_ok=True)


def _name(path: FilePath) -> str:
    text = os.fspath(path)
    return text if len(text) <= 300 else f"{text[:100]}… ({len(text)} characters)"
