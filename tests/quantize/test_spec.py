"""Scheme and kernel names: which the parser takes, and how it refuses the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantbench.errors import UsageError
from quantbench.log.config import KERNELS, RunConfig
from quantbench.quantize.recipe import Recipe
from quantbench.quantize.registry import SCHEMES
from quantbench.quantize.spec import (
    SHOWN,
    SPECS,
    AutoQuant,
    Stored,
    UintX,
    every_spec,
    form,
    forms,
    parse,
    parse_scheme,
)
from tests.models.refused import refusal


@given(st.sampled_from(list(every_spec())))
def test_a_name_survives_the_round_trip(spec):
    assert parse(str(spec)) == spec and str(parse(str(spec))) == str(spec)


@given(st.text(max_size=20) | st.from_regex(r"(int4wo|uintx|fp|int8dq|bnb)[-a-z0-9]{0,12}"))
def test_whatever_is_understood_is_written_the_same(name):
    try:
        assert str(parse(name)) == name
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


def test_there_are_as_many_schemes_as_the_grammar_says():
    """1 + … : N is one of 7, G of 4 (of 6 for uintx); nothing, -hqq, -gptq, -gptq-inorder
    or -awq; and as-is."""
    assert (
        len(list(every_spec()))
        == 1 + 1 + 1 + 4 * 5 + 4 * 4 + 1 + 2 + 1 + 7 * 6 * 5 + 2 + 4 + 1 + 1 + 2 + 3 + 1
    )
    assert len({str(spec) for spec in every_spec()}) == len(list(every_spec()))


def test_every_spelling_has_a_scheme_and_is_shown():
    assert set(SPECS) == set(SCHEMES) - {Stored, Recipe}
    assert {type(parse(name)) for name in (*SHOWN, "as-is")} == set(SPECS)


def test_a_selection_is_no_scheme_and_says_so():
    assert parse("autoquant") == AutoQuant() and parse("autoquant").scheme is None
    assert parse("fp6").scheme == parse_scheme("fp6") == parse("fp6")
    with pytest.raises(UsageError, match="autoquant is known only after measuring; here a scheme"):
        parse_scheme("autoquant")


def test_forms_are_as_help_texts_have_them():
    assert form(UintX) == "uintx-N-G[-{hqq,gptq,gptq-inorder,awq}]"
    assert "float8dq-{tensor,row}" in forms() and "bnb-{int8,nf4,fp4}" in forms()


@pytest.mark.parametrize(
    "name, said",
    [
        ("INT8WO", "nearest: int8wo"),
        ("nonee", "nearest: none"),
        ("int4wo", "nearest: int4wo-64."),
        ("uintx-4", "nearest: uintx-4-64."),
        ("q4_k_m", "nearest: uintx-4-64."),
        ("UD-Q5_K_XL", "nearest: uintx-5-64."),
        ("Q8_0", "nearest: int8wo."),
        ("awq", "nearest: int4wo-64-awq."),
        ("GPTQ", "nearest: int4wo-64-gptq."),
        ("int4", "nearest: int4wo-64."),
        ("int8", "nearest: int8wo."),
        ("marlin", "nearest: sparse-marlin"),
        ("int4wo-48", "G in int4wo-G[-{hqq,gptq,gptq-inorder,awq}] is 32, 64, 128 or 256"),
        ("uintx-9-64", "N in uintx-N-G[-{hqq,gptq,gptq-inorder,awq}] is 1, 2, 3, 4, 5, 6 or 7"),
        ("uintx-4-7-hqq", "gptq-inorder,awq}] is 8, 16, 32, 64, 128 or 256"),
        ("int4wo-64-", "nearest: int4wo-64"),
        ("", "Schemes: none, int8wo, int8dq"),
        ("?", "Schemes: none, int8wo, int8dq"),
    ],
)
def test_a_mistyped_scheme_is_one_line_that_says_what_works(name, said):
    assert said in refusal(UsageError, parse, name)


def test_a_spec_made_by_hand_is_checked_too():
    with pytest.raises(UsageError, match="N in uintx-N-G"):
        UintX(bits=8)


def test_which_schemes_round_activations():
    """autoquant: some of its candidates do."""
    rounding = {"int8dq", "float8dq-row", "int8dq-int4wo-32", "bnb-int8", "autoquant"}
    for name in (*rounding, "none", "int8wo", "bnb-nf4"):
        assert parse(name).rounds_activations == (name in rounding), name


def test_kernels_that_can_be_asked_for_are_those_that_schemes_have():
    kernels = {name for scheme in SCHEMES.values() for name in scheme.kernels}
    assert sorted(KERNELS) == sorted({"auto", *kernels})
    for kernel in KERNELS:
        assert RunConfig(kernel=kernel).kernel == kernel
        with pytest.raises(UsageError, match="torch"):
            RunConfig(kernel=f"{kernel}x")
