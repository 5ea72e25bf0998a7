"""Turning words of a KV cache's codes into numbers, in registers: ops/kv.py for Triton."""

import triton
import triton.language as tl

from quantbench.ops.triton.values import e4m3


@triton.jit
def load_scales(scale, slot, seen, g, SCALES: tl.constexpr):
    """Slots' scales (SLOTS,), or (GROUPS, SLOTS) where they have several, in float32."""
    if SCALES == 1:
        loaded = tl.load(scale + slot, seen, other=0)
    else:
        places = slot[None, :] * SCALES + g[:, None]
        loaded = tl.load(scale + places, seen[None, :] & (g < SCALES)[:, None], other=0)
    return loaded.to(tl.float32)


@triton.jit
def numbers(
    words, u: tl.constexpr, FORMAT: tl.constexpr, NUMBERS: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """The number that code u of every word means, before scaling.

    Converting an integer takes a GPU four times as long as another instruction. So float16 numbers
    are made from bits: an integer below 1024, put into the lowest bits of the float16 1024, gives
    their sum.
    """
    if FORMAT == "int8":
        code = words >> (u * 8)
        if NUMBERS == tl.float16:  # the sign bit flipped, codes count from -128
            bits = ((code.to(tl.int16) & 255) ^ 128) | 0x6400
            result = bits.to(tl.float16, bitcast=True) - 1152
        else:
            result = code.to(tl.int8).to(NUMBERS)
    elif FORMAT == "fp8":
        code = words >> (u * 8)
        if NATIVE_FP8:
            result = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(NUMBERS)
        elif NUMBERS == tl.float16:
            result = _e4m3_as_float16(code.to(tl.int16))
        else:
            result = e4m3(code.to(tl.int32) & 255)
    elif FORMAT == "int4":
        code = (words >> (u * 4)) & 15
        if NUMBERS == tl.float16:
            result = (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032
        else:
            result = code.to(NUMBERS) - 8
    else:
        result = words
    return result


@triton.jit
def _e4m3_as_float16(code):
    """E4M3 in the lowest byte to float16: its fields are moved to float16's places, and the product
    with 256 corrects the exponent's bias, 15 instead of 7."""
    bits = ((code << 8) & -0x8000) | ((code << 7) & 0x3F80)
    return tl.where((code & 127) == 127, float("nan"), bits.to(tl.float16, bitcast=True) * 256)
