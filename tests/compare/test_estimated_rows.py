"""Rows of ab: what was estimated before beside what was measured, and joules per token."""

import dataclasses

import pytest

from compare.figures.rows import rows
from compare.output.tables import estimate_sentence, joules_sentence, terminal
from compare.sampling.answers import ArmFacts
from tests.compare.example_results import example_results


def with_figures(results):
    """The second arm has a counter and an estimate of a step that is a tenth too long."""
    arm = results.arms[1]
    row = rows(results)[1]
    estimate = {
        "prompt_seconds": row.time_to_first_token_s,
        "token_seconds": 1.1 / row.decode_tok_s,
        "tokens_per_second": row.tok_s_all_rows / 1.1,
        "peak_memory_bytes": 1.5e9,  # of 3 GB measured
        "joules_per_token": 1.0,
    }
    arm.facts = dataclasses.replace(arm.facts, estimate=estimate)
    arm.samples = [dataclasses.replace(sample, joules=6.0) for sample in arm.samples]
    return results


def test_a_row_has_its_estimate_and_the_errors():
    results = with_figures(example_results())
    row = rows(results)[1]
    config = results.arms[1].facts.run.config
    joules = 6 / config.max_new_tokens / config.batch_size
    assert row.joules_per_token == pytest.approx(joules)
    assert row.estimate_errors == pytest.approx(
        {"prompt_seconds": 0, "token_seconds": 0.1, "tokens_per_second": -1 / 11,
         "peak_memory_bytes": -0.5, "joules_per_token": 1 / joules - 1}
    )  # fmt: skip
    assert joules_sentence(row).endswith("without the idle machine's; 1 J estimated")
    assert estimate_sentence(row).endswith("tok/s -9%, peak memory -50%")
    assert estimate_sentence(row) in terminal(results, rows(results))


def test_without_a_counter_the_estimate_stands_alone():
    results = with_figures(example_results())
    arm = results.arms[1]
    arm.samples = [dataclasses.replace(sample, joules=None) for sample in arm.samples]
    row = rows(results)[1]
    assert "joules_per_token" not in row.estimate_errors
    assert joules_sentence(row) == (
        "at most 1 J a new token (no counter; power limit × time is an upper bound)"
    )


def test_an_arm_without_either_says_nothing():
    row = rows(example_results())[1]
    assert row.estimated is None and row.joules_per_token is None
    assert estimate_sentence(row) == ""


def test_an_arms_estimate_goes_through_its_json():
    facts = with_figures(example_results()).arms[1].facts
    assert ArmFacts.from_json(facts.to_json()).estimate == facts.estimate
