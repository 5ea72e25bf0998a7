"""Converting words of packed codes to float32 numbers in registers: ops/formats.py for Triton.

A unit is a number of columns whose codes fill one word in each plane. For example, eight columns of
6-bit codes fill a 32-bit word in the plane of width 4 and a 16-bit word in the plane of width 2.
The first column is in the lowest bits, so column i of a unit is reached by a shift by i · width.
"""

import triton
import triton.language as tl


@triton.jit
def zeros(SHAPE: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of COUNT float32 tensors of zeros."""
    tensors = ()
    for _ in tl.static_range(COUNT):
        tensors = tensors + (tl.full(SHAPE, 0.0, tl.float32),)
    return tensors


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
    """The float32 numbers of column i of every unit, before scaling. For integer formats it is
    their `_fraction`, which `centred` or `load_scales` converts."""
    BITS: tl.constexpr = WIDTHS[0] + WIDTHS[1] + WIDTHS[2]
    if FORMAT == "2:4":
        number = _fraction(_expanded(words, i), 4)
    elif FORMAT == "int":
        code = _joined(words, i, WIDTHS)
        if BITS == 8:  # stored signed; its sign bit flipped it counts from -128
            code ^= 128
        number = _fraction(code, BITS)
    elif FORMAT == "fp8":
        number = e4m3(words[0] >> (i * 8))
    elif FORMAT == "fp6":
        number = _float(_joined(words, i, WIDTHS), 6, 2, 3)
    elif FORMAT == "fp4":
        number = _float(_joined(words, i, WIDTHS), 4, 1, 1)
    else:
        code = _joined(words, i, WIDTHS)
        number = tl.reshape(tl.gather(table, tl.reshape(code, [code.numel]), 0), code.shape)
    return number


@triton.jit
def centred(number, INTEGER_BITS: tl.constexpr):
    """The integers of `_fraction`s. bfloat16 holds the integers exactly, but not the fractions."""
    if INTEGER_BITS > 0:
        number = number * (1 << INTEGER_BITS) - 1.5 * (1 << INTEGER_BITS)
    return number


@triton.jit
def load_scales(scale, zero, places, inside, KIND: tl.constexpr, INTEGER_BITS: tl.constexpr):
    """(factor, offset) in float32: a weight is `values` · factor + offset."""
    factor = load_floats(scale + places, inside, KIND)
    if INTEGER_BITS > 0:
        factor *= 1 << INTEGER_BITS
    offset = -1.5 * factor if INTEGER_BITS > 0 else tl.full(factor.shape, 0.0, tl.float32)
    if zero is not None:
        offset += load_floats(zero + places, inside, KIND)
    return factor, offset


@triton.jit
def load_group_scales(
    scale,  # (rows, groups)
    zero,
    row,
    j,
    units,
    inside,
    UNITS_PER_GROUP: tl.constexpr,
    KIND: tl.constexpr,
    INTEGER_BITS: tl.constexpr,
):
    """`load_scales` of the groups that units j of these rows are in. Where a row has one scale (0
    units per group) nothing is loaded: the sums are multiplied by it at the end."""
    factor = 1.0
    offset = 0.0
    if UNITS_PER_GROUP > 0:
        places = row * (units // UNITS_PER_GROUP) + j // UNITS_PER_GROUP
        factor, offset = load_scales(scale, zero, places, inside, KIND, INTEGER_BITS)
    return factor, offset


@triton.jit
def weights(
    words,
    table,
    i: tl.constexpr,
    factor,
    offset,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    INTEGER_BITS: tl.constexpr,
):
    """The float32 weights of column i of every unit, scaled unless there is one scale per row."""
    number = values(words, table, i, FORMAT, WIDTHS)
    if UNITS_PER_GROUP > 0:
        number = number * factor + offset
    else:
        number = centred(number, INTEGER_BITS)
    return number


@triton.jit
def load_floats(pointers, inside, KIND: tl.constexpr):
    """Floats of any dtype as float32. Floats of 8 bits are loaded as bytes and converted here, so
    that the device need not support them."""
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
    """16 numbers as a tensor in registers, which needs no device memory."""
    place = tl.arange(0, 16)
    table = tl.full([16], 0.0, tl.float32)
    for k in tl.static_range(16):
        table = tl.where(place == k, VALUES[k], table)
    return table


@triton.jit
def _joined(words, i: tl.constexpr, WIDTHS: tl.constexpr):
    """Column i's code, from all planes."""
    code = _field(words[0], i, WIDTHS[0])
    if WIDTHS[1] > 0:
        code |= _field(words[1], i, WIDTHS[1]) << WIDTHS[0]
    if WIDTHS[2] > 0:
        code |= _field(words[2], i, WIDTHS[2]) << (WIDTHS[0] + WIDTHS[1])
    return code


@triton.jit
def _field(word, i: tl.constexpr, WIDTH: tl.constexpr):
    return (word >> (i * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _fraction(code, BITS: tl.constexpr):
    """1 + code / 2**BITS: the bits of 1.0 with the code in the highest bits of the mantissa. This
    is one OR; converting an integer would take a GPU four times as long."""
    return ((code << (23 - BITS)) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _float(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A small float as float32: its fields are moved to float32's places, and a product with a
    power of two corrects the exponent's bias. Subnormals become float32's subnormals, so they are
    right."""
    sign = (code >> (BITS - 1)) << 31
    magnitude = (code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)
    return (sign | magnitude).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))


@triton.jit
def _expanded(words, i: tl.constexpr):
    """Column i's code in the dense matrix: if one of the two codes that are stored for its four
    columns has this place, that code; otherwise 8, which means zero."""
    FIRST: tl.constexpr = i // 4 * 2
    code = tl.where(_field(words[1], FIRST, 2) == i % 4, _field(words[0], FIRST, 4), 8)
    second = _field(words[1], FIRST + 1, 2) == i % 4
    return tl.where(second, _field(words[0], FIRST + 1, 4), code)
