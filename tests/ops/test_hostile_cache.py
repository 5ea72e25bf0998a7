"""Code is loaded only from a folder into which nobody else can write."""

import os
import time
from pathlib import Path

import pytest

from quantbench import files
from quantbench.errors import KernelError
from quantbench.ops.cpu import build, compiler
from tests.ops.test_cpu_build import contents, small, wrapper  # noqa: F401

SUFFICES = build.unavailable() is None


@pytest.fixture(autouse=True)
def own_temporary(tmp_path, monkeypatch):
    """A temporary folder of this test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "tmp"))
    files._private_cache.cache_clear()


def planted(folder: Path) -> Path:
    """A library that somebody has put there, with the digest that ours would have."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / build._library().name
    library.write_bytes(b"evil" + build._digest(b"evil"))
    library.chmod(0o755)
    return library


FOLDERS = {
    "others may write": lambda folder: folder.chmod(0o777),
    "the group may write": lambda folder: folder.chmod(0o775),
    "another user's": lambda folder: os.chown(folder, 12345, -1),
    "others may write above": lambda folder: folder.parent.chmod(0o777),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("change", FOLDERS)
def test_a_folder_of_others_is_not_the_cache(tmp_path, monkeypatch, capsys, change):
    folder = tmp_path / "cache" / "quantbench"
    folder.mkdir(parents=True)
    FOLDERS[change](folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = files.cache_folder()
    assert chosen == tmp_path / "tmp" / f"quantbench-{os.getuid()}"
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err.startswith(f"The cache is {chosen}: ")
    assert files.cache_folder() == chosen and capsys.readouterr().err == ""


@pytest.mark.parametrize("given", [{"HOME": "here"}, {"HOME": "", "XDG_CACHE_HOME": "there"}])
def test_without_a_home_the_cache_is_private(tmp_path, monkeypatch, capsys, given):
    """Not the name that everybody knows, nor one that somebody has made."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp" / f"quantbench-{os.getuid()}").mkdir(mode=0o700)
    (tmp_path / "tmp" / f"quantbench-{os.getuid()}").chmod(0o777)
    chosen = files.cache_folder()
    assert chosen.stat().st_mode & 0o777 == 0o700 and chosen.parent == tmp_path / "tmp"
    assert chosen.name != f"quantbench-{os.getuid()}"
    assert "there is no home folder" in capsys.readouterr().err


LIBRARIES = {
    "others may write": lambda library: library.chmod(0o777),
    "another user's": lambda library: os.chown(library, 12345, -1),
    "a link": lambda library: library.symlink_to(library.rename(library.with_name("other"))),
}


@pytest.mark.skipif(not (SUFFICES and os.getuid() == 0), reason="builds, as root")
@pytest.mark.parametrize("change", LIBRARIES)
def test_a_library_of_others_is_built_again(small, tmp_path, change):  # noqa: F811
    library = planted(tmp_path / "cache" / "quantbench")
    LIBRARIES[change](library)
    path = build.built()
    assert b"evil" not in path.read_bytes()[:8] and files.is_private(path)


@pytest.mark.skipif(not SUFFICES, reason="builds")
@pytest.mark.parametrize("name", ["lock", ".failed", ".so"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_file_of_the_cache_is_written_through_a_link(small, tmp_path, name, kind):  # noqa: F811
    library = build._library()
    library.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "mine").write_text("mine")
    path = library.with_name("lock") if name == "lock" else library.with_suffix(name)
    path.symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(path)
    if name == "lock":
        with pytest.raises(KernelError, match="cannot keep the C\\+\\+ kernels in"):
            build.built()
    else:
        assert build.built().is_file()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.skipif(not SUFFICES, reason="builds")
def test_a_compiler_that_was_changed_is_tried_again(small, tmp_path, monkeypatch):  # noqa: F811
    path = Path(wrapper(tmp_path, monkeypatch, "echo 'error: broken' >&2; exit 1"))
    with pytest.raises(KernelError, match="error: broken"):
        build.built()
    why = build.unavailable()
    assert str(path) in why and "to try again" in why
    next((tmp_path / "cache" / "quantbench").glob("*.failed")).chmod(0o666)
    assert build.unavailable() is None  # anybody may have written it
    next((tmp_path / "cache" / "quantbench").glob("*.failed")).chmod(0o644)
    os.utime(path, ns=(1, 1))
    assert build.unavailable() is None


@pytest.mark.skipif(not SUFFICES, reason="asks the compiler")
def test_a_compiler_that_hangs_is_a_reason(small, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(compiler, "ANSWER_SECONDS", 0.3)
    path = tmp_path / "hangs"
    path.write_text("#!/bin/sh\nsleep 1000\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    started = time.monotonic()
    assert "does not answer --version within 0.3 s" in build.unavailable()
    assert time.monotonic() - started < 5
