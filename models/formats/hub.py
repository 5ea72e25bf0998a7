"""Entries of the Hugging Face hub, by id. Only the files that a run reads are downloaded.

    org/name                    a folder as transformers writes it
    org/name@revision           that folder at a branch, a tag or a commit
    org/name-GGUF:Q4_K_M        one quantization of a repository of GGUF files, with all its parts

The hub's client keeps what it downloads in its own cache, which also serves without a network.
"""

import errno
import fnmatch
import functools
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache

from quantbench.errors import CheckpointError
from quantbench.models.formats import HUB_ID
from quantbench.models.formats.base import Checkpoint
from quantbench.models.formats.gguf import PART, Gguf, is_model
from quantbench.models.formats.hugging_face import HuggingFace
from quantbench.models.tokenizer import FILES
from quantbench.models.tokenizer_hints import MERGES
from quantbench.text import size

SMALL = ("*.json", "chat_template.jinja", MERGES, *(f for f in FILES if f[-5:] != ".json"))
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first with a match
# Any error of the client's HTTP library, which is another one from release to release.
UNREACHABLE = (errors.HTTPError, OSError)
# How a file's name ends that says its quantization, as Unsloth's dynamic ones: UD-Q4_K_XL.
QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)


@dataclass(frozen=True)
class Entry:
    repo: str  # org/name
    revision: str | None = None
    quantization: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.quantization}" if self.quantization else "")

    @property
    def name(self) -> str:
        """The model's name in the log: the id without the organization."""
        return str(self).partition("/")[2]

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file, by its path in the repository; without a network, of each file that
        was downloaded before."""
        with self._explained():
            try:
                about = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                raise
            except UNREACHABLE:
                folder = Path(snapshot_download(self.repo, revision=self.revision,
                                                allow_patterns=[], local_files_only=True)
                              )  # fmt: skip
                return {
                    file.relative_to(folder).as_posix(): file.stat().st_size
                    for file in sorted(folder.rglob("*"))
                    if file.is_file()
                }
        return {file.rfilename: file.size or 0 for file in about.siblings or ()}

    def matching(self, patterns: Sequence[str]) -> list[str]:
        return [name for name in self.sizes if any(fnmatch.fnmatch(name, p) for p in patterns)]

    @functools.cached_property
    def quantizations(self) -> Mapping[str, list[str]]:
        """The GGUF files of each quantization, its parts in order; a file whose name does not say
        it is known by its name."""
        files: dict[str, list[str]] = {}
        for name in sorted(self.matching(["*.gguf"])):
            path = PurePosixPath(name)
            if is_model(path.name):
                stem = PART.sub("", path.stem)
                files.setdefault(str(path.with_name(stem)), []).append(name)
        labels: dict[str, list[str]] = {}
        for place, parts in files.items():
            stem = PurePosixPath(place).name
            found = QUANTIZATION.search(stem)
            label = found[1] if found else stem
            if label in labels:  # two models in one repository
                label = stem
            labels[label] = parts
        return labels

    def download(self, names: Sequence[str]) -> Path:
        """The folder that holds these files. Raises CheckpointError where the disk has no room."""
        with self._explained():
            needed = sum(self.sizes[name] for name in names if not self._is_cached(name))
            cache = Path(constants.HF_HUB_CACHE)
            there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
            if needed > (free := shutil.disk_usage(there).free):
                raise CheckpointError(
                    f"{self}: {size(needed)} to download, and {there} has {size(free)} free; make "
                    "room, or name another disk with HF_HOME"
                )
            return Path(
                snapshot_download(self.repo, revision=self.revision, allow_patterns=list(names))
            )

    def _is_cached(self, name: str) -> bool:
        return isinstance(try_to_load_from_cache(self.repo, name, revision=self.revision), str)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the client's errors as CheckpointError, one line."""
        try:
            yield
            return
        except errors.GatedRepoError:
            why = "its licence has to be accepted on the hub first; then run `hf auth login`"
        except errors.RevisionNotFoundError:
            why = f"the hub's {self.repo} has no revision {self.revision}"
        except errors.RepositoryNotFoundError:
            why = "the hub has no such model, or it is private (`hf auth login`)"
        except errors.HFValidationError:
            why = "it cannot be a hub id either; give a folder, a model.pth, dummy:NAME, or tiny"
        except UNREACHABLE as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                why = f"no room to download it to {constants.HF_HUB_CACHE}; HF_HOME names another"
            else:
                why = "the Hugging Face hub cannot be reached; give a local folder or dummy:NAME"
        raise CheckpointError(f"{self} is no local path: {why}")


class HubModel(HuggingFace):
    """A folder of the hub. `files` downloads its weights."""

    def __init__(self, entry: Entry) -> None:
        """Raises CheckpointError where the hub has none, does not allow it, or is not reached."""
        self.entry, self.name = entry, entry.name
        self.folder = entry.download(entry.matching(SMALL))

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        found = next(filter(None, (self.entry.matching([pattern]) for pattern in WEIGHTS)), None)
        if not found:
            raise CheckpointError(f"{self.entry} holds no weights; looked for {', '.join(WEIGHTS)}")
        self.entry.download(found)
        return super().files


def opened(repo: str, revision: str | None, quantization: str | None) -> Checkpoint:
    """The model of this entry. Raises CheckpointError, one line, where there is none, or where it
    has to be said which."""
    entry = _entry(repo, revision, quantization)
    if quantization is None and (entry.matching(WEIGHTS) or not entry.quantizations):
        return HubModel(entry)
    label = _chosen(entry)
    parts = entry.quantizations[label]
    checkpoint = Gguf(entry.download(parts) / parts[0])
    checkpoint.name = entry.name
    return checkpoint


def published(repository: str) -> Mapping[str, int]:
    """The bytes of each quantization that a repository of GGUF files has, by its own id; nothing is
    downloaded. Raises CheckpointError, one line, where there is none."""
    hub_id = HUB_ID.fullmatch(repository)
    if not hub_id or hub_id[3]:
        raise CheckpointError(f"{repository}:all: give a hub id, as org/name-GGUF:all")
    entry = _entry(*hub_id.groups())
    if not entry.quantizations:
        raise CheckpointError(f"{entry}: the hub's {entry.repo} has no GGUF file")
    return {
        str(Entry(entry.repo, entry.revision, label)): sum(entry.sizes[part] for part in parts)
        for label, parts in entry.quantizations.items()
    }


_entry = functools.lru_cache(maxsize=4)(Entry)  # one request for its listing


def _chosen(entry: Entry) -> str:
    """Which of the repository's quantizations is meant. Raises CheckpointError."""
    there = entry.quantizations
    if not there:
        raise CheckpointError(f"{entry}: {entry.repo} has no GGUF file on the hub")
    if entry.quantization is None and len(there) == 1:
        return next(iter(there))
    for label, parts in there.items():
        names = {label, PART.sub("", PurePosixPath(parts[0]).stem)}
        if entry.quantization and entry.quantization.lower() in map(str.lower, names):
            return label
    sizes = {label: sum(entry.sizes[part] for part in parts) for label, parts in there.items()}
    listed = sorted(sizes, key=lambda label: sizes[label])
    which = ", ".join(f"{label} ({size(sizes[label])})" for label in listed)
    asked = entry.quantization
    there_is_none = f"there is no {asked}; " if asked else ""
    if asked and asked.lower() == "all":
        there_is_none = "quantbench recommend compares all; "
    example = Entry(entry.repo, entry.revision, listed[0])
    raise CheckpointError(f"{entry}: {there_is_none}it holds {which}; name one, as {example}")
