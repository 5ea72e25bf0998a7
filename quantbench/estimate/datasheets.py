"""What makers state of their accelerators: peaks, bandwidth, memory, power, links; with sources.

    sheet = find("NVIDIA RTX A6000")
    sheet.peaks["float16"]          # operations per second, dense
    sheet.bandwidth                 # bytes per second

Makers like to print the speed of products with 2:4 sparsity, twice that of dense ones. Every figure
here is dense; where the source prints only the sparse one, the row says that it was halved. Peaks
are those with sums in float32: consumer cards of the RTX series have half of their 16-bit peak
then, and that is how torch sums.

A source names the maker's document. Few of these documents could be opened while the table was
checked, so each source also says where its figures were read, and which of them were read nowhere:
those are marked "not confirmed". docs/estimates.md has the addresses.
"""

import difflib
import re
from dataclasses import dataclass, field, replace

from quantbench.errors import UsageError

T, G = 1e12, 1e9


@dataclass(frozen=True)
class Link:
    """How devices of one machine exchange numbers."""

    name: str
    rate: float  # bytes per second that a device sends; it receives as many at the same time
    nvlink: bool = True  # or PCIe, over which a message takes longer to arrive


PCIE_4 = Link("PCIe 4.0 x16", 32 * G, nvlink=False)
PCIE_5 = Link("PCIe 5.0 x16", 64 * G, nvlink=False)
BRIDGE = Link("NVLink bridge", 56.25 * G)  # of GA102: four links of 14.0625 GB/s


@dataclass(frozen=True)
class Datasheet:
    """One device. Speeds are peaks; no program reaches them."""

    name: str
    peaks: dict[str, float]  # operations per second, dense, by dtype
    bandwidth: float  # of memory, bytes per second
    memory: float  # bytes; makers count 1e9 or 2**30, which the source says
    power: float  # watts, the limit of the whole board
    link: Link  # between two devices
    source: str
    halved: bool = False  # whether the source prints peaks with sparsity
    # Among more than two devices, where that is another link: a bridge joins two cards alone.
    link_of_more: Link | None = None
    # Whether each pair of devices has a link of its own, so that more devices have more of them.
    link_each: bool = False
    aliases: tuple[str, ...] = field(default=())

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


_WIDER = {
    "float8": ("float16",),
    "int8": ("float16",),
    "bfloat16": ("float16",),
    "tfloat32": ("float32",),
}


def _peaks(
    half: float, eight: float | None, integer: float, tf32: float, single: float
) -> dict[str, float]:
    """Tera-operations per second: of 16 bits, of float8 (None: no unit), int8, TF32, float32."""
    peaks = {"float16": half, "bfloat16": half, "int8": integer, "tfloat32": tf32}
    peaks |= {"float32": single} | ({} if eight is None else {"float8": eight})
    return {name: value * T for name, value in peaks.items()}


# Where figures were read: a table of dense peaks, memory, bandwidth and power of accelerators,
# stas00/ml-engineering, compute/accelerator/README.md; and others' copies of makers' sheets.
_TABLE = "read in stas00/ml-engineering"
_A100 = f"NVIDIA A100 datasheet (2021), figures {_TABLE} and glennklockwood.com"
_A100_PCIE = (
    "NVIDIA A100 datasheet (2021), figures read in Thunder Compute's comparison of the four A100; "
    "peaks and NVLink are the SXM card's, twelve links, which nvidia.com says of two PCIe cards"
)
_BRIDGED = "NVLink is GA102's, read in Hugging Face's quotation of NVIDIA's whitepaper"
_HOPPER = f"with sparsity there, halved here; figures {_TABLE} and glennklockwood.com"

DATASHEETS = {
    sheet.name: sheet
    for sheet in (
        Datasheet("NVIDIA RTX A5000", _peaks(111.1, None, 222.2, 55.6, 27.8), 768 * G, 24 * 2**30,
                  230, BRIDGE, "NVIDIA RTX A5000 datasheet: float32, memory, power read in lists "
                  f"of cards; {_BRIDGED}; not confirmed: bandwidth, and peaks of products, which "
                  "have the A6000's ratios to float32", halved=True, link_of_more=PCIE_4,
                  aliases=("A5000",)),
        Datasheet("NVIDIA RTX A6000", _peaks(154.8, None, 309.7, 77.4, 38.7), 768 * G, 48 * 2**30,
                  300, BRIDGE, "NVIDIA Ampere GA102 whitepaper, V2.0, appendix C, figures read in "
                  f"Microway's comparison of Ampere cards; {_BRIDGED}",
                  link_of_more=PCIE_4, aliases=("A6000",)),
        Datasheet("NVIDIA GeForce RTX 3090", _peaks(71.0, None, 284.0, 35.6, 35.6), 936 * G,
                  24 * 2**30, 350, BRIDGE, "NVIDIA Ampere GA102 whitepaper, V2.0, appendix A: "
                  "float32, bandwidth, memory, power, and 142 Tflop/s with sums in float16, of "
                  f"which the peak is half, read in lists of cards; {_BRIDGED}; not confirmed: "
                  "that half, and int8",
                  link_of_more=PCIE_4, aliases=("RTX 3090", "3090")),
        Datasheet("NVIDIA GeForce RTX 4090", _peaks(165.2, 330.3, 660.6, 82.6, 82.6), 1008 * G,
                  24 * 2**30, 450, PCIE_4, "NVIDIA Ada whitepaper, V2.01, appendix A, figures read "
                  "in waredb.com's copy", aliases=("RTX 4090", "4090")),
        Datasheet("NVIDIA L4", _peaks(121.0, 242.5, 242.5, 60.0, 30.3), 300 * G, 24 * 2**30, 72,
                  PCIE_4, "NVIDIA L4 datasheet; with sparsity there, halved here; figures read in "
                  "sellers' copies", halved=True, aliases=("L4",)),
        Datasheet("NVIDIA L40S", _peaks(362.05, 733.0, 733.0, 183.0, 91.6), 864 * G, 48 * 2**30,
                  350, PCIE_4, f"NVIDIA L40S datasheet, dense | sparse, read in a seller's copy; "
                  f"int8 {_TABLE}", aliases=("L40S",)),
        Datasheet("NVIDIA A100-SXM4-40GB", _peaks(312.0, None, 624.0, 156.0, 19.5), 1555 * G,
                  40 * 2**30, 400, Link("NVLink 3", 300 * G), _A100,
                  aliases=("A100 40GB", "A100 SXM 40GB")),
        Datasheet("NVIDIA A100-SXM4-80GB", _peaks(312.0, None, 624.0, 156.0, 19.5), 2039 * G,
                  80 * 2**30, 400, Link("NVLink 3", 300 * G), _A100,
                  aliases=("A100 80GB", "A100 SXM 80GB", "A100 SXM", "A100")),
        Datasheet("NVIDIA A100-PCIE-40GB", _peaks(312.0, None, 624.0, 156.0, 19.5), 1555 * G,
                  40 * 2**30, 250, Link("NVLink bridge", 300 * G), _A100_PCIE,
                  link_of_more=PCIE_4, aliases=("A100 PCIe 40GB", "A100 40GB PCIe")),
        Datasheet("NVIDIA A100 80GB PCIe", _peaks(312.0, None, 624.0, 156.0, 19.5), 1935 * G,
                  80 * 2**30, 300, Link("NVLink bridge", 300 * G), _A100_PCIE,
                  link_of_more=PCIE_4, aliases=("A100 PCIe 80GB", "A100 PCIe")),
        Datasheet("NVIDIA H100 PCIe", _peaks(756.0, 1513.0, 1513.0, 378.0, 51.0), 2000 * G,
                  80 * 2**30, 350, Link("NVLink bridge", 300 * G), "NVIDIA H100 PCIe product brief "
                  f"PB-11133-001 (bandwidth, power); peaks {_TABLE}; not confirmed: NVLink bridge",
                  halved=True, link_of_more=PCIE_5, aliases=("H100-PCIe",)),
        Datasheet("NVIDIA H100 80GB HBM3", _peaks(989.4, 1978.9, 1978.9, 494.7, 66.9), 3350 * G,
                  80 * 2**30, 700, Link("NVLink 4", 450 * G), f"NVIDIA H100 datasheet, {_HOPPER}",
                  halved=True, aliases=("H100 SXM", "H100-SXM", "H100")),
        Datasheet("NVIDIA H200", _peaks(989.4, 1978.9, 1978.9, 494.7, 66.9), 4800 * G,
                  143771 * 2**20, 700, Link("NVLink 4", 450 * G), "NVIDIA H200 datasheet (memory "
                  f"as nvidia-smi lists it, 143771 MiB), {_HOPPER}",
                  halved=True, aliases=("H200",)),
        Datasheet("NVIDIA B200", _peaks(2250.0, 4500.0, 4500.0, 1100.0, 80.0), 8000 * G,
                  183359 * 2**20, 1000, Link("NVLink 5", 900 * G), "NVIDIA HGX B200 "
                  "specifications (of 8 GPUs, divided by 8), with sparsity there, halved here; "
                  "figures read in glennklockwood.com and Vultr's description of its servers (179 "
                  "GB, 8 TB/s); memory as nvidia-smi lists it, 183359 MiB",
                  halved=True, aliases=("B200",)),
        Datasheet("AMD Instinct MI300X", _peaks(1307.4, 2614.9, 2614.9, 653.7, 163.4), 5300 * G,
                  192 * 2**30, 750, Link("Infinity Fabric, 7 links", 64 * G), "AMD Instinct MI300X "
                  f"data sheet (2023), figures {_TABLE}; links (896 GB/s of seven, both "
                  "directions) in gpu.blog's copy", link_each=True, aliases=("MI300X",)),
    )
}  # fmt: skip


# Words that people leave out, or add.
_MAKERS = ("nvidia", "amd", "geforce", "instinct", "rtx", "tesla", "hgx", "oam", "gpu", "graphics")
_ONE_FORM = ("H200", "B200", "MI300X")  # of which there is no other card than the one that is named
_MEMORY = re.compile(r"[\s(-]*\b(\d+)\s*Gi?B\b\)?", re.IGNORECASE)
_KIND = re.compile("hbm.*|gddr.*")  # of memory
_AS_MUCH = 0.08  # GB are 1e9 bytes or 2**30, and a B200 of 180 GB is sold as 192, too


def find(name: str) -> Datasheet:
    """The datasheet of a device, by its name or a common short form; case does not matter.

    Raises UsageError, with the nearest names, if there is none.
    """
    if (sheet := known(name)) is not None:
        return sheet
    spellings = {_plain(s): sheet.name for sheet in DATASHEETS.values() for s in _spellings(sheet)}
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
    sheets = [s for s in DATASHEETS.values() if said is None or _has(s, float(said[1]) * G)]
    for without in (False, True):
        plain = _plain(name, without)
        for sheet in sheets:
            if plain in {_plain(spelling, without) for spelling in _spellings(sheet)}:
                return sheet
    return None


def _has(sheet: Datasheet, memory: float) -> bool:
    sizes = memory, memory * 2**30 / G
    return any(abs(size / sheet.memory - 1) < _AS_MUCH for size in sizes)


def _spellings(sheet: Datasheet) -> tuple[str, ...]:
    one_form = tuple(f"{alias} SXM" for alias in sheet.aliases if alias in _ONE_FORM)
    return (sheet.name, *sheet.aliases, *one_form)


def _plain(name: str, without_memory: bool = False) -> str:
    """Letters and digits alone, without the maker; SXM4 and SXM5 are SXM."""
    name = _MEMORY.sub(" ", name) if without_memory else name
    name = re.sub(r"sxm\d?", " sxm ", name.lower())
    name = re.sub(r"\brtx(?=[a-z]?\d)", "", name)
    words = "".join(c if c.isalnum() else " " for c in name).split()
    return "".join(word for word in words if word not in _MAKERS and not _KIND.fullmatch(word))
