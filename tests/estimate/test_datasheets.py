"""The table of datasheets: dense peaks, sources, names."""

import pytest

from errors import UsageError
from estimate.datasheets import DATASHEETS, find, known

ASKED = ["A5000", "A6000", "RTX 3090", "RTX 4090", "L4", "L40S", "A100 40GB", "A100 80GB",
         "H100 PCIe", "H100 SXM", "H200", "B200", "MI300X"]  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_every_device_has_a_sheet_with_its_source(name):
    sheet = find(name)
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


def test_known_figures():
    """Hand-copied: FP16 dense of the A100 is 312 Tflop/s, 624 with sparsity; H100 SXM 989."""
    assert find("A100").peaks["float16"] == 312e12
    assert find("NVIDIA H100 80GB HBM3").peaks["bfloat16"] == 989.4e12
    assert find("A6000").bandwidth == find("A5000").bandwidth == 768e9


@pytest.mark.parametrize(
    "name", ["nvidia rtx a6000", "RTX A6000", "a6000", "NVIDIA RTX A6000", "RTX-A6000"]
)
def test_names_are_found_however_they_are_spelled(name):
    assert known(name).name == "NVIDIA RTX A6000"


def test_an_unknown_device_names_the_nearest_and_how_to_calibrate():
    with pytest.raises(UsageError) as caught:
        find("NVIDIA RTX A600")
    line = str(caught.value)
    assert (
        "nearest: NVIDIA RTX A6000," in line and "quantbench calibrate" in line and "\n" not in line
    )
