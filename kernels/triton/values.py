"""From words of packed codes to float32 numbers, in registers: kernels/formats.py for Triton.

A unit is a run of columns of which every plane holds its part in one word: eight columns of 6-bit
codes are a word of 32 bits in the plane of width 4 and one of 16 bits in the plane of width 2. The
first column lies in a word's lowest bits, so column i of a unit is a shift by i · width.
"""

import triton
import triton.language as tl


@triton.jit
def load_words(plane0, plane1, plane2, offsets, inside):
    """The word of every unit at `offsets`, as int32, plane by plane; a plane may be None."""
    words = (tl.load(plane0 + offsets, inside, other=0).to(tl.int32),)
    if plane1 is not None:
        words = words + (tl.load(plane1 + offsets, inside, other=0).to(tl.int32),)
    if plane2 is not None:
        words = words + (tl.load(plane2 + offsets, inside, other=0).to(tl.int32),)
    return words


@triton.jit
def values(words, table, i: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr):
    """The float32 numbers, before any scale, that column i of every unit stands for."""
    if FORMAT == "2:4":
        return _kept(words, i, 0) + _kept(words, i, 1)
    code = _field(words[0], i, WIDTHS[0])
    BITS: tl.constexpr = WIDTHS[0] + WIDTHS[1] + WIDTHS[2]
    if WIDTHS[1] > 0:
        code |= _field(words[1], i, WIDTHS[1]) << WIDTHS[0]
    if WIDTHS[2] > 0:
        code |= _field(words[2], i, WIDTHS[2]) << (WIDTHS[0] + WIDTHS[1])
    if FORMAT == "int":
        if BITS == 8:  # stored signed; its sign bit flipped it counts from -128
            code ^= 128
        return _integer(code, 1 << (BITS - 1))
    elif FORMAT == "fp8":
        return e4m3(code)
    elif FORMAT == "fp6":
        return _float(code, 6, 2, 3)
    elif FORMAT == "fp4":
        return _float(code, 4, 1, 1)
    else:
        flat = tl.reshape(code, [code.shape[0] * code.shape[1]])
        return tl.reshape(tl.gather(table, flat, 0), code.shape)


@triton.jit
def load_scales(pointers, inside, KIND: tl.constexpr):
    """Scales as float32. Those of 8 bits come as bytes: not every device's Triton has the types."""
    raw = tl.load(pointers, inside, other=0)
    if KIND == "e4m3":
        return e4m3(raw.to(tl.int32))
    elif KIND == "e8m0":  # 2 to the (byte - 127), which for 0 is a subnormal; 255 is NaN
        byte = raw.to(tl.int32)
        bits = tl.where(byte == 0, 1 << 22, byte << 23)
        return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def e4m3(code):
    """An 8-bit float with 4 bits of exponent; no infinity, all ones are NaN."""
    return tl.where((code & 127) == 127, float("nan"), _float(code, 8, 3, 7))


@triton.jit
def lookup_table(VALUES: tl.constexpr):
    """16 numbers as a tensor: one in registers needs no memory that outlives the kernel."""
    place = tl.arange(0, 16)
    table = tl.full([16], 0.0, tl.float32)
    for k in tl.static_range(16):
        table = tl.where(place == k, VALUES[k], table)
    return table


@triton.jit
def _field(word, i: tl.constexpr, WIDTH: tl.constexpr):
    return (word >> (i * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _integer(code, OFFSET: tl.constexpr):
    """code - OFFSET. The bits of 2^23 + code are those of 2^23 with code in the lowest places: an
    or and a subtraction, which a device runs at four times the rate of a conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _float(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A small float, its fields moved to where float32 has them: then only the bias is wrong, by a
    power of two. Subnormals land on float32's subnormals, so they come out right too."""
    sign = (code >> (BITS - 1)) << 31
    magnitude = (code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)
    return (sign | magnitude).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))


@triton.jit
def _kept(words, i: tl.constexpr, WHICH: tl.constexpr):
    """Of the two values kept for column i's four, the one asked for if it stands there, else 0."""
    SLOT: tl.constexpr = i // 4 * 2 + WHICH
    kept = _integer(_field(words[0], SLOT, 4), 8)
    return tl.where(_field(words[1], SLOT, 2) == i % 4, kept, 0.0)
