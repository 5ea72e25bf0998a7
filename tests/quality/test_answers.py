"""Lengths of answers: one row at a time they are the same, loops are found, medians have ends."""

import pytest
import torch

from quantbench.generate import Generator
from quantbench.log.config import RunConfig
from quantbench.models.chat import chat_of
from quantbench.quality import answers as of
from quantbench.quality.answers import Answer, answers, compared, is_loop
from quantbench.run.loading import load
from quantbench.run.plan import begin, make_plan


@pytest.fixture(scope="module")
def tiny():
    config = RunConfig(checkpoint_path="tiny", device="cpu", precision="float32")
    plan = begin(make_plan(config))
    return plan, load(plan, lambda done, total: None, lambda line: None).model


@torch.no_grad()
def alone(plan, model, prompt, most):
    """One prompt's answer, a token at a time, in a batch of one."""
    chat = chat_of(plan.tokenizer, plan.name)
    ids, _ = chat.ask(prompt)
    generator, answer = Generator(model, 1, len(ids) + most), []
    logits = generator.forward(torch.tensor([ids]), 0)
    while True:
        answer.append(int(logits[0, -1].argmax()))
        if answer[-1] in chat.stop_ids:
            return Answer(len(answer), True, False)
        if is_loop(answer):
            return Answer(most, False, True)
        if len(answer) == most:
            return Answer(most, False, False)
        logits = generator.forward(torch.tensor([answer[-1:]]), len(ids) + len(answer) - 1)


def test_a_batch_of_prompts_of_several_lengths_gives_each_rows_own_answer(tiny, monkeypatch):
    plan, model = tiny
    monkeypatch.setattr(of, "MOST", 60)
    prompts = ["def add(a, b):", "import os\n\n\ndef main(argv=None):\n    return", "x", "class A:"]
    prompts += ["for i in range(10):\n    print(i)\n" * 3]
    found = answers(plan, model, prompts)
    assert found == [alone(plan, model, prompt, 60) for prompt in prompts]
    assert len({answer.loops for answer in found} | {answer.tokens for answer in found}) > 1


def test_loops():
    assert is_loop([1, 2] + [7] * 48) and is_loop([9] + [1, 2, 3] * 16)
    assert is_loop([*range(64)] * 3)
    assert not is_loop([7] * 47) and not is_loop([*range(100)])
    assert not is_loop([*range(24)] * 2 + [*range(23)])


def test_lengths_are_compared_prompt_by_prompt():
    full = [Answer(tokens, True, False) for tokens in range(10, 34)]
    twice = [Answer(2 * answer.tokens, True, False) for answer in full]
    same, longer = compared(full, full), compared(twice, full)
    assert same.ratio.to_json() == [1, 1, 1]
    assert longer.ratio.value == 2 and 1.3 < longer.ratio.low <= 2 <= longer.ratio.high < 3
    stuck = [Answer(512, False, True), *full[1:]]
    assert compared(stuck, full).loops == 1 / 24 and compared(stuck, full).ends == 23 / 24
    assert "100 % end" in longer.sentence().replace("%", " %")
    assert longer.time(10.0, 20.0) == (
        "4.3 s to the median answer at 10 tok/s, full precision 1.1 s at 20 tok/s"
    )
