"""What makers state of their accelerators: peaks, bandwidth, memory, power, links; with sources.

    sheet = find("NVIDIA RTX A6000")
    sheet.peaks["float16"]          # operations per second, dense
    sheet.bandwidth                 # bytes per second
    sheet.link_among(8).ring_seconds("all_reduce", 8192, ranks=8)

The figures, their units and their sources are in datasheets.toml. How long an exchange among ranks
takes is NCCL's own model, by which it chooses among its algorithms
(https://github.com/NVIDIA/nccl, src/graph/tuning.cc, of June 2026): a fixed time, a time for each
step around a ring, and the bytes that each rank sends over its link. Nothing was measured here.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantbench.errors import UsageError

T, G, MIB = 1e12, 1e9, 1 << 20
# NCCL's seconds once, and for each step of the ring over NVLink and over PCIe; and the share of the
# link's bandwidth that numbers have.
PROTOCOLS = (
    (6.6e-6, 0.6e-6, 1.0e-6, 0.5),  # LL: every 4 bytes with 4 bytes of flags
    (8.4e-6, 3.4e-6, 5.7e-6, 1.0),  # Simple: chunks, and a wait for each
)


@dataclass(frozen=True)
class Link:
    """How devices of one machine exchange numbers."""

    name: str
    rate: float  # bytes per second that a device sends; and receives at the same time

    @property
    def nvlink(self) -> bool:
        """Whether it is none of PCIe, over which a message takes longer to arrive."""
        return not self.name.startswith("PCIe")

    def ring_seconds(self, kind: str, size: int, ranks: int) -> float:
        """Seconds of one call, by the faster protocol. size: bytes of one rank's tensor. A sum goes
        around the ring twice, to add up and to tell every rank, in parts of a rank's share."""
        steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        sent = steps * size / (ranks if kind == "all_reduce" else 1)
        return min(
            once + steps * (nvlink if self.nvlink else pcie) + sent / (share * self.rate)
            for once, nvlink, pcie, share in PROTOCOLS
        )


@dataclass(frozen=True)
class Datasheet:
    """One device. Speeds are peaks; no program reaches them."""

    name: str
    aliases: tuple[str, ...]
    peaks: dict[str, float]  # operations per second, dense, by dtype
    bandwidth: float  # of memory, bytes per second
    memory: float  # bytes
    power: float  # watts, the limit of the whole board
    source: str
    link: Link  # between two devices
    link_of_more: Link | None  # among more than two, where that is another one
    link_each: bool  # whether each pair of devices has a separate link

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def peak(self, dtype: str) -> float:
        """Operations per second in this dtype; of the nearest wider one if it has no unit of it."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            if name in self.peaks:
                return self.peaks[name]
        return self.peaks["float32"]

    def link_among(self, ranks: int) -> Link:
        """The link over which each device reaches the others, if `ranks` devices share a model."""
        if ranks > 2 and self.link_of_more is not None:
            return self.link_of_more
        if self.link_each:
            return replace(self.link, rate=self.link.rate * (ranks - 1))
        return self.link


_WIDER = {"float8": ("float16",), "int8": ("float16",), "tfloat32": ("float32",)}


def _sheet(name: str, row: dict[str, Any]) -> Datasheet:
    """A table of the file."""
    peaks = {dtype: tera * T for dtype, tera in row["tera"].items()}
    peaks["float16"] = peaks["bfloat16"] = peaks.pop("half")
    link, more = (Link(words[0], words[1] * G) if words else None
                  for words in (row["link"], row.get("link_of_more")))  # fmt: skip
    assert link is not None
    return Datasheet(
        name, tuple(row["aliases"]), peaks, row["bandwidth"] * G, row["memory"] * MIB, row["power"],
        row["source"].strip(), link, more, row.get("link_each", False),
    )  # fmt: skip


_FILE = Path(__file__).with_suffix(".toml")
DATASHEETS = {n: _sheet(n, row) for n, row in tomllib.loads(_FILE.read_text("utf-8")).items()}


# Words that people leave out, or add.
_MAKERS = ("nvidia", "amd", "geforce", "instinct", "rtx", "tesla", "hgx", "oam", "gpu", "graphics")
_MEMORY = re.compile(r"[\s(-]*\b(\d+)\s*Gi?B\b\)?", re.IGNORECASE)
_KIND = re.compile("hbm.*|gddr.*")  # of memory
_AS_MUCH = 0.08  # GB are 1e9 bytes or 2**30, and a B200 of 180 GB is sold as 192, too


def find(name: str) -> Datasheet:
    """The datasheet of a device, by its name or a common short form; case does not matter.

    Raises UsageError, with the nearest names, if there is none.
    """
    if (sheet := known(name)) is not None:
        return sheet
    spellings = {_plain(s): sheet.name for sheet in DATASHEETS.values() for s in sheet.spellings}
    close = difflib.get_close_matches(_plain(name), spellings, n=5, cutoff=0.5)
    near = list(dict.fromkeys(spellings[spelling] for spelling in close))[:3] or list(DATASHEETS)
    raise UsageError(
        f"--device {name!r}: no datasheet; nearest: {', '.join(near)}. Or on that machine: "
        "quantbench estimate --device here"
    )


def known(name: str) -> Datasheet | None:
    """The datasheet of a device by its name or a short form; None if there is none, also where the
    name says another size of memory."""
    said = _MEMORY.search(name)
    memory = [float(said[1]) * unit for unit in (G, 2**30)] if said else []
    sheets = [
        sheet
        for sheet in DATASHEETS.values()
        if said is None or any(abs(size / sheet.memory - 1) < _AS_MUCH for size in memory)
    ]
    for without in (False, True):
        plain = _plain(name, without)
        for sheet in sheets:
            if plain in {_plain(spelling, without) for spelling in sheet.spellings}:
                return sheet
    return None


def _plain(name: str, without_memory: bool = False) -> str:
    """Letters and digits alone, without the maker; SXM4 and SXM5 are SXM."""
    name = _MEMORY.sub(" ", name) if without_memory else name
    name = re.sub(r"sxm\d?", " sxm ", name.lower())
    name = re.sub(r"\brtx(?=[a-z]?\d)", "", name)
    words = "".join(c if c.isalnum() else " " for c in name).split()
    return "".join(word for word in words if word not in _MAKERS and not _KIND.fullmatch(word))
