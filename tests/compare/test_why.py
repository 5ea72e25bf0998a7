"""Why an arm is slow: the reason that its facts hold, and only that."""

import pytest

from compare.figures.why import reasons

ROW = {"verdict": "slower", "kernel": "cpu"}
FACTS = {
    "kernels": {"cpu": None, "reference": None},
    "attention_reason": None,
    "decoder": "cpu-step",
    "decoder_reason": None,
    "config": {"compile": True},
}


def test_nothing_to_say_of_an_arm_that_runs_as_it_should():
    assert reasons(ROW, FACTS) == []
    old = {name: value for name, value in FACTS.items() if "decoder" not in name}
    assert reasons(ROW, old) == []


@pytest.mark.parametrize(
    ("row", "facts", "said"),
    [
        (
            {},
            {"decoder": "modules", "decoder_reason": "the KV cache is int8"},
            "a step is not one op (decoder modules): the KV cache is int8",
        ),
        ({}, {"attention_reason": "no compiler"}, "attention runs on plain torch: no compiler"),
        ({}, {"config": {"compile": False}}, "nothing is compiled"),
        ({"kernel": "cpu, torchao"}, {}, "not every layer's shape fits"),
        (
            {"kernel": "reference"},
            {"kernels": {"cpu": "no compiler", "reference": None}},
            "no other kernel here (cpu: no compiler)",
        ),
        ({"bandwidth_share": 0.6}, {}, "memory-bound: it reads its weights at 60%"),
        ({"bandwidth_share": 0.39}, {}, "not memory-bound: it reads its weights at 39%"),
    ],
)
def test_each_reason(row, facts, said):
    (sentence,) = reasons(ROW | row, FACTS | facts)
    assert said in sentence
    assert reasons(ROW | row | {"verdict": "faster"}, FACTS | facts) == []


def test_between_the_two_bounds_nothing_is_claimed():
    assert reasons(ROW | {"bandwidth_share": 0.5}, FACTS) == []
