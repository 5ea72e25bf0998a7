"""Why an arm is slow: the reason that its facts hold, and only that."""

from dataclasses import replace

import pytest

from quantbench.answer.row import Row
from quantbench.answer.rows import reasons
from quantbench.log.config import RunConfig
from quantbench.run.why import Limit
from tests.bench.facts import arm_facts

COMPILED = RunConfig(compile=True)
ROW = Row("arm", verdict="slower")


def test_nothing_to_say_of_an_arm_that_runs_as_it_should():
    for share in (None, 0.5):  # between the two bounds nothing is claimed
        assert reasons(replace(ROW, bandwidth_share=share), arm_facts(config=COMPILED)) == []


@pytest.mark.parametrize(
    ("facts", "share", "said"),
    [
        ({"decoder": "modules", "decoder_reason": "the KV cache is int8"}, None,
         "a step is not one op (decoder modules): the KV cache is int8"),
        ({"attention_reason": "no compiler"}, None, "attention runs on plain torch: no compiler"),
        ({"config": RunConfig(), "decoder": "modules"}, None, "nothing is compiled"),
        ({"kernel": "cpu, torchao"}, None, "not every layer's shape fits"),
        ({"kernel": "reference", "kernels": {"cpu": "no compiler", "reference": None}}, None,
         "no other kernel here (cpu: no compiler)"),
        ({}, 0.6, "memory-bound: it reads its weights at 60%"),
        ({}, 0.39, "not memory-bound: it reads its weights at 39%"),
    ],
)  # fmt: skip
def test_each_reason(facts, share, said):
    row = replace(ROW, bandwidth_share=share)
    arm = arm_facts(**({"config": COMPILED} | facts))
    (sentence,) = reasons(row, arm)
    assert said in sentence
    assert reasons(replace(row, verdict="faster"), arm) == []


def test_how_near_a_step_is_to_what_the_machine_allows():
    """1.5 GB at 50 GB/s are 30 ms of the 40 that a step takes."""
    row = replace(ROW, decode_tok_s=25.0)
    arm = replace(
        arm_facts(config=COMPILED), estimate={"token_seconds": 0.038}, limit=Limit(1.5e9, 50e9)
    )
    assert reasons(row, arm) == [
        "a step runs at 75% of what memory allows for these bytes (1.50 GB at 50.0 GB/s)"
    ]
    assert reasons(replace(row, verdict="faster"), arm) == []
    assert reasons(ROW, arm) == []  # no steps
    assert reasons(row, replace(arm, limit=None)) == []
