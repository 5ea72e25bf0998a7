"""A model that ranks share computes what one rank computes."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quantbench.errors import KernelError, UsageError
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.loading import load_config
from quantbench.models.registry import of_config
from quantbench.models.split import Split, check_split, possible_ranks
from quantbench.ops.ranks import ALONE, Ranks
from quantbench.parallel.split_loading import split_for
from quantbench.quantize import recipe
from quantbench.quantize.activation import ROUNDINGS, rounded
from quantbench.quantize.spec import SHOWN, parse
from tests.models import hugging_face, test_activations
from tests.parallel import work
from tests.parallel.work import TOKENS, WIDE, agree


@pytest.mark.parametrize("family", hugging_face.FAMILIES)
def test_logits_of_every_family(pool, tmp_path, family):
    folder, oracle = hugging_face.saved(family, tmp_path)
    config = load_config(str(folder))
    if not of_config(config).splits:
        with pytest.raises(UsageError, match="--tp"):
            check_split(config, 2)
        return
    expected = oracle(torch.tensor(TOKENS)).logits
    for size in (2, 4):
        first, *others = pool.run(size, work.logits, str(folder), TOKENS)
        agree(first, expected)
        assert all(torch.equal(first, other) for other in others)


UNCALIBRATED = [name for name in SHOWN if not parse(name).calibrated]


def together(name, parts):
    """The whole weight, put together by hand from the two ranks' parts of it."""
    if name.endswith(("wo", "w2")):
        return torch.cat(parts, 1)
    if name in ("output", "tok_embeddings"):
        return torch.cat(parts)
    if name.endswith("w13"):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    if name.endswith("wqkv"):  # two query heads each, and both the only key/value head
        assert torch.equal(parts[0][256:], parts[1][256:])
        return torch.cat([part[:256] for part in parts] + [parts[0][256:]])
    assert torch.equal(*parts)
    return parts[0]


def drawn_recipe(folder, model):
    """A recipe's file: a scheme for each layer, drawn anew in every run."""
    config = load_config(model)
    schemes = {layer: random.choice(UNCALIBRATED) for layer in config.linear_shapes()}
    made = recipe.make("", config.linear_shapes(), schemes | {"tok_embeddings": "embed-int8"})
    recipe.write(str(folder / "mix.json"), made)
    return str(folder / "mix.json")


@pytest.mark.parametrize("scheme", [*UNCALIBRATED, "recipe"])
def test_quantized_numbers_are_those_of_one_rank(pool, wide, scheme, tmp_path):
    scheme = drawn_recipe(tmp_path, wide) if scheme == "recipe" else scheme
    whole = work.numbers(ALONE, wide, scheme)
    parts = pool.run(2, work.numbers, wide, scheme)
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    for name, expected in whole.items():
        assert torch.equal(together(name, [part[name] for part in parts]), expected), name


@pytest.mark.parametrize("label", ["w8a8-static", "fp8-128"])
def test_activations_that_a_file_rounds(pool, tmp_path, label):
    """By a scale for all ranks, and by scales of groups that no rank's columns end in."""
    folder = str(test_activations.written(tmp_path, label, "llama-3")[0])
    alone = work.logits(ALONE, folder, TOKENS, "as-is")
    for shared in pool.run(2, work.logits, folder, TOKENS, "as-is"):
        # Three layers of large weights; without the rounding logits differ by half of the largest.
        assert (shared - alone).abs().max() <= 5e-2 * alone.abs().max()


@pytest.mark.parametrize("how", ROUNDINGS)
def test_activations_are_rounded_by_all_columns(pool, how):
    x, weight, bias = torch.randn(3, 7, 24), torch.randn(10, 24), torch.randn(10)
    numbers, scale = rounded(x, how)
    expected = F.linear(numbers, weight) * scale + bias
    for total in pool.run(2, work.rounded_product, how, x, weight, bias, [16, 8]):
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(
    "scheme", ["none", "int8wo", "int4wo-64", "embed-int8", "sparse-marlin", "recipe"]
)
@pytest.mark.parametrize("saved_by", [1, 2])
def test_saved_by_some_ranks_and_loaded_by_others(pool, wide, tmp_path, scheme, saved_by):
    scheme = drawn_recipe(tmp_path, wide) if scheme == "recipe" else scheme
    folder, loaded_by = str(tmp_path / "saved"), 3 - saved_by
    pool.run(saved_by, work.save, wide, scheme, folder)
    again = pool.run(loaded_by, work.logits, folder, TOKENS)
    fresh = pool.run(loaded_by, work.logits, wide, TOKENS, scheme)
    assert all(map(torch.equal, again, fresh))


@pytest.mark.parametrize("kv_cache", ["dense", "int8"])
def test_decoding_through_caches(pool, kv_cache):
    logits, tokens = work.steps(ALONE, TOKENS[0], kv_cache, "modules", "tiny", "int8wo")
    for shared, drawn in pool.run(2, work.steps, TOKENS[0], kv_cache, "auto", "tiny", "int8wo"):
        agree(shared, logits)
        assert torch.equal(drawn, tokens)


@pytest.mark.parametrize("file", ["", "memory"])
def test_a_step_of_a_rank_compiles_into_one_graph(pool, tmp_path, file):
    memory = str(tmp_path / file) if file else ""
    for compiled, plain in pool.run(2, work.compiled_step, memory, "tiny"):
        agree(compiled, plain)


def test_numbers_of_ranks_that_are_possible():
    config = from_hugging_face(WIDE, "wide")
    assert possible_ranks(config) == [1, 2, 4]
    assert possible_ranks(replace(config, num_heads=24, num_kv_heads=8)) == [1, 2, 4, 8, 24]
    with pytest.raises(UsageError, match="4 query and 1 key/value heads.* --tp takes 1, 2, 4$"):
        Split(config, Ranks(0, 3))


def test_groups_that_a_ranks_heads_do_not_fit():
    config = replace(from_hugging_face(WIDE, "wide"), ffn_dim=1024)
    with pytest.raises(KernelError, match="128 columns of attention.wo.* 256 that int4wo-256"):
        split_for(config, Ranks(0, 4), parse("int4wo-256"))


def test_a_network_narrower_than_the_ranks():
    with pytest.raises(UsageError, match="768 columns, in groups of 256, is too narrow"):
        split_for(from_hugging_face(WIDE, "wide"), Ranks(0, 4), parse("int4wo-256"))
