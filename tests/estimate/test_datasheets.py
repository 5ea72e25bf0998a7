"""The table of datasheets: dense peaks, sources, names; what cards exchange, by NCCL's model."""

import pytest

from quantbench.estimate.datasheets import DATASHEETS, find, known

# A sheet, and how people, shops and clouds name its card.
NAMES = {
    "NVIDIA RTX A5000": "A5000; rtxa5000",
    "NVIDIA RTX A6000": "nvidia rtx a6000; RTX A6000; a6000; NVIDIA RTX A6000; RTX-A6000",
    "NVIDIA GeForce RTX 3090": "RTX 3090; rtx3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090; RTX 4090 24 GB",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA A100-SXM4-80GB": "A100; A100 80GB; A100 SXM; A100sxm4; NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB": "A100 40GB; A100 SXM 40GB; A100 40 GB SXM; Tesla A100 SXM4 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe; A100 PCIe 80GB; NVIDIA A100 PCIe 80 GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB; a100 40gb pcie; A100-PCIe 40GB",
    "NVIDIA H100 PCIe": "H100 PCIe; H100 80GB PCIe",
    "NVIDIA H100 80GB HBM3": "H100 SXM; H100 SXM5; NVIDIA H100-SXM5-80GB; H100 80GB",
    "NVIDIA H200": "H200; H200 SXM 141GB; NVIDIA H200 141GB HBM3e",
    "NVIDIA B200": "B200; B200 192GB; HGX B200",
    "AMD Instinct MI300X": "MI300X; AMD Instinct MI300X OAM",
}


@pytest.mark.parametrize(("name", "spellings"), NAMES.items())
def test_every_device_has_a_sheet_by_each_of_its_names(name, spellings):
    sheet = DATASHEETS[name]
    for said in (name, *spellings.split("; ")):
        assert known(said) is sheet, said
    assert sheet.source and sheet.power > 0 and sheet.link.rate > 0
    assert {"float16", "bfloat16", "float32", "int8"} <= set(sheet.peaks)


@pytest.mark.parametrize("sheet", DATASHEETS.values(), ids=str)
def test_peaks_are_dense(sheet):
    """Units of 8 bits are twice as fast as those of 16 with sums of the same width; a sparse figure
    in a dense table would show as a factor of four or one. GeForce cards have half of the 16-bit
    speed where sums are float32, so that int8 is four times as fast there."""
    geforce = "GeForce" in sheet.name
    assert sheet.peaks["int8"] / sheet.peaks["float16"] == pytest.approx(4 if geforce else 2, 0.02)
    if "float8" in sheet.peaks:
        assert sheet.peaks["float8"] / sheet.peaks["float16"] == pytest.approx(2, 0.02)


@pytest.mark.parametrize(
    ("name", "bandwidth", "memory", "power", "of_two", "of_four"),
    [
        ("A100-SXM4-40GB", 1555, 40, 400, 300, 300),
        ("A100-SXM4-80GB", 2039, 80, 400, 300, 300),
        ("A100-PCIE-40GB", 1555, 40, 250, 300, 32),
        ("A100 80GB PCIe", 1935, 80, 300, 300, 32),
    ],
)
def test_an_a100_of_each_form(name, bandwidth, memory, power, of_two, of_four):
    """NVIDIA's datasheet has a column for each; the names are those of CUDA. A bridge joins two
    cards in slots, and gives 600 GB/s in both directions together, as the twelve links of SXM."""
    sheet = find(f"NVIDIA {name}")
    assert sheet.name == f"NVIDIA {name}"
    assert (sheet.bandwidth, sheet.memory, sheet.power) == (bandwidth * 1e9, memory * 2**30, power)
    assert (sheet.peaks["bfloat16"], sheet.peaks["tfloat32"]) == (312e12, 156e12)
    assert (sheet.link_among(2).rate, sheet.link_among(4).rate) == (of_two * 1e9, of_four * 1e9)


@pytest.mark.parametrize(
    ("kind", "size", "microseconds"),
    [
        # 14 steps of 0.6 µs, 6.6 µs once, and 14 · 1 KB of 8 KB over half of 450 GB/s: 64 ns.
        ("all_reduce", 8192, 15.064),
        ("all_gather", 8192, 11.055),  # half of the steps, each with all of a rank's 8 KB
        # 8.4 µs, 14 steps of 3.4 µs, 14 · 8 MB at 450 GB/s; with flags 249 µs more.
        ("all_reduce", 64_000_000, 304.9),
    ],
)
def test_an_exchange_of_eight_cards_is_its_steps(kind, size, microseconds):
    link = find("H100 SXM").link_among(8)
    assert link.ring_seconds(kind, size, 8) == pytest.approx(1e-6 * microseconds, rel=1e-3)


@pytest.mark.parametrize(
    ("card", "ranks", "rate", "nvlink"),
    [
        ("A6000", 2, 56.25e9, True),  # a bridge joins two
        ("A6000", 8, 32e9, False),
        ("L4", 2, 32e9, False),
        ("H100 SXM", 8, 450e9, True),
        ("MI300X", 2, 64e9, True),  # each pair has a separate link
        ("MI300X", 8, 448e9, True),
    ],
)
def test_links_by_the_number_of_cards(card, ranks, rate, nvlink):
    link = find(card).link_among(ranks)
    assert (link.rate, link.nvlink) == (pytest.approx(rate), nvlink)
