"""Scheme names: what is understood, and what is said of the rest."""

import pytest

from errors import UsageError
from quantize.spec import SPECS, parse


@pytest.mark.parametrize("name", [spec.form for spec in SPECS])
def test_a_name_survives_the_round_trip(name):
    assert str(parse(name)) == name


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("int8w0", "nearest: int8wo"),
        ("INT8WO", "nearest: int8wo"),
        ("int8-dq", "nearest: int8dq"),
        ("nonee", "nearest: none"),
        ("marlin-9", "Schemes: none, int8wo, int8dq"),
        ("", "Schemes: none, int8wo, int8dq"),
    ],
)
def test_a_mistyped_scheme_is_an_error_that_names_the_nearest(name, nearest):
    with pytest.raises(UsageError) as error:
        parse(name)
    assert repr(name) in str(error.value) and nearest in str(error.value)
    assert "\n" not in str(error.value)
