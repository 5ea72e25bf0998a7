"""What only the Triton kernel of decode attention has: a deep cache that processors share, CUDA
graphs; and whether it compiles for a GPU. Its numbers: test_decode_attention.py."""

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops.attend import attend
from quantbench.ops.kv import Stored, dequantize
from tests.ops import attention_contract, exact
from tests.ops.attention_contract import TRITON, stored, triton_allowed
from tests.ops.gpu_compiler import compile_for_gpus

pytest.importorskip("triton")

from quantbench.ops.triton import attention  # noqa: E402

IN_INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU here"),
)
DEVICES = pytest.mark.parametrize(
    "device", [IN_INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)]
)
FORMATS = pytest.mark.parametrize("format", CACHES)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
run = TRITON


def problem(B, H, K, T, D, dtype, format, device):
    return attention_contract.problem(B, H, K, T, D, dtype, format, 0, device)


def check(*given):
    return attention_contract.check(TRITON, *given)


@DEVICES
@FORMATS
def test_few_positions_in_a_deep_cache(format, device, monkeypatch):
    T = 1000
    if device == "cpu":
        monkeypatch.setattr(attention, "_processors", lambda device: 20)
    query, key, value = problem(1, 4, 1, T, 64, FLOAT16, format, device)
    for first, count in ((990, 200), (0, 200), (T - 1, T)):
        y = check(query, key, value, [first], [count])
    assert torch.equal(run(query, key, value, [-1], [T]), y)


@DEVICES
def test_a_compiled_cache_decodes_with_it(device):
    dtype = FLOAT32
    caches = [CACHES["int8"](1, 2, 60, 64, dtype, device, 16) for _ in range(2)]
    caches[0].kernel = "triton"

    def layer(cache, query, key, value, positions):
        return attend(query, *cache.update(positions, key, value), positions, cache.window)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for position in range(20):  # past the window, so that its ring wraps
        parts = [torch.randn(1, heads, 1, 64, device=device) for heads in (8, 2, 2)]
        where = torch.tensor([position], device=device)
        ys = [step(c, *parts, where) for step, c in zip((compiled, layer), caches, strict=True)]
        torch.testing.assert_close(*ys, atol=1e-5, rtol=1e-5)  # float32 sums in another order


def test_kernels_compile_for_gpus():
    compile_for_gpus("attention")


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "K", "D"), [(1, 32, 8, 128), (4, 64, 8, 128), (1, 32, 32, 128), (2, 16, 8, 256)]
)
def test_caches_of_real_models(format, dtype, B, H, K, D):
    query, key, value = problem(B, H, K, 8192, D, dtype, format, "cuda")
    for first, count in ((0, 1), (0, 200), (8000, 4097), (1, 8192)):
        y = check(query, key, value, [first] * B, [count] * B)
        assert torch.equal(run(query, key, value, [first] * B, [count] * B), y)


@pytest.mark.gpu
@FORMATS
def test_a_cuda_graph_replays_at_another_depth(format):
    query, key, value = problem(2, 32, 8, 4096, 128, BFLOAT16, format, "cuda")
    first, count = (torch.tensor(x, device="cuda") for x in ([0, 7], [1, 2]))
    attention.decode_attention(query, key, value, first, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention.decode_attention(query, key, value, first, count)
    for depths in ([1, 1], [200, 3000], [4096, 17]):
        count.copy_(torch.tensor(depths))
        first.copy_(torch.tensor([0, 4000]))
        query.copy_(torch.randn_like(query))
        graph.replay()
        assert torch.equal(captured, check(query, key, value, first, count))


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    B, K, T, D = 17, 8, 131072, 128
    codes = torch.zeros(B, K, T, D, dtype=torch.int8, device="cuda")
    scale = torch.zeros(B, K, T, 1, dtype=BFLOAT16, device="cuda")
    assert codes.numel() > 2**31
    last = torch.randn(1, K, 300, D, device="cuda").bfloat16()
    whole, small = Stored(codes, scale, "int8"), stored(last, "int8")
    codes[-1:, :, -300:], scale[-1:, :, -300:] = small.codes, small.scale
    query = torch.randn(B, 32, D, device="cuda").bfloat16()
    y = run(query, whole, whole, [T - 300] * B, [300] * B)
    expected = exact.attention(
        query[-1:, :, None],
        *[dequantize(small, torch.float64)] * 2,
        torch.ones(1, 300, dtype=torch.bool, device="cuda"),
    )
    allowed = triton_allowed(query, whole, whole, None, None, expected)
    expected.check(y[-1:, :, None], **allowed)
    assert (y[:-1] == 0).all()
