"""Words of packed codes to numbers, in registers, two at a time: ops/formats.py for Triton.

A unit is a number of columns whose codes fill one word in each plane. For example, eight columns of
6-bit codes fill a 32-bit word in the plane of width 4 and a 16-bit word in the plane of width 2.
The first column is in the lowest bits, so column i of a unit is reached by a shift by i · width.

Column i of a unit and column i + UNIT / 2 are converted together: their codes lie 16 bits apart, or
are put there, and a shift and a mask move both to where bfloat16 has its fields, one in each half
of a 32-bit register. Codes of integers become mantissas of subnormal numbers. One instruction then
multiplies both by the power of two that is missing, and centres integers. Where a device has no
such instruction, or x is not bfloat16, the halves are made into float32 first, which has the same
fields with 16 bits more: the numbers are the same.

So the columns of a unit come in the order 0, UNIT / 2, 1, UNIT / 2 + 1, …, here and in x.
"""

import triton
import triton.language as tl

# Two bfloat16 numbers in an int32.
NOTHING = tl.constexpr(-0x7FFF8000)  # -0.0, which added to a number gives it
MINUS_ONE = tl.constexpr(-0x407F4080)


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
def numbers(
    words,  # (rows, units)
    table,
    factor,  # (rows, units)
    offset,
    FORMAT: tl.constexpr,
    WIDTHS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The numbers (rows, units · UNIT), bfloat16 if PAIRED, else float32; integers are divided by
    half their range. SCALED: times factor, plus offset unless PAIRED."""
    ROWS: tl.constexpr = words[0].shape[0]
    UNITS: tl.constexpr = words[0].shape[1]
    HALF: tl.constexpr = UNIT // 2 if UNIT > 1 else 1
    if UNIT > 1:
        words = _spread(words, FORMAT, WIDTHS, UNIT)
    if PAIRED:
        pairs = ()
        for i in tl.static_range(HALF):
            pair = _pair(words, i, FORMAT, WIDTHS)
            if SCALED:
                pair = _fma(pair, factor, NOTHING)
            pairs = pairs + (pair,)
        joined = _interleaved(pairs, HALF)
        low = (joined & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (joined >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        lows = ()
        highs = ()
        for i in tl.static_range(HALF):
            low, high = _two(words, table, i, FORMAT, WIDTHS)
            if SCALED:
                low = low * factor + offset
                high = high * factor + offset
            lows = lows + (low,)
            highs = highs + (high,)
        low = _interleaved(lows, HALF)
        high = _interleaved(highs, HALF)
    if UNIT > 1:
        low = tl.reshape(tl.join(low, high), [ROWS, UNITS * UNIT])
    return low


@triton.jit
def _interleaved(parts, COUNT: tl.constexpr):
    """(rows, units · COUNT) from 1, 2 or 4 tensors (rows, units)."""
    ROWS: tl.constexpr = parts[0].shape[0]
    UNITS: tl.constexpr = parts[0].shape[1]
    if COUNT == 1:
        return parts[0]
    elif COUNT == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), [ROWS, UNITS * 2])
    else:
        evens_and_odds = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return tl.reshape(evens_and_odds, [ROWS, UNITS * 4])


@triton.jit
def _spread(words, FORMAT: tl.constexpr, WIDTHS: tl.constexpr, UNIT: tl.constexpr):
    """Each plane's word with the fields of its second half from bit 16 on."""
    FIELDS: tl.constexpr = UNIT // 4 if FORMAT == "2:4" else UNIT // 2  # of half a unit
    spread = (_apart(words[0], FIELDS * WIDTHS[0]),)
    if WIDTHS[1] > 0:
        spread = spread + (_apart(words[1], FIELDS * WIDTHS[1]),)
    if WIDTHS[2] > 0:
        spread = spread + (_apart(words[2], FIELDS * WIDTHS[2]),)
    return spread


@triton.jit
def _apart(word, BITS: tl.constexpr):
    LOW: tl.constexpr = (1 << BITS) - 1
    if BITS < 16:
        word = (word & LOW) | ((word & (LOW << BITS)) << (16 - BITS))
    return word


@triton.jit
def _moved(word, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr):
    """The field of both halves that begins at bit FROM, to bit TO."""
    FIELD: tl.constexpr = ((1 << WIDTH) - 1) << TO
    BOTH: tl.constexpr = FIELD | (FIELD << 16)
    MASK: tl.constexpr = BOTH - (1 << 32) if BOTH >= (1 << 31) else BOTH  # an int32
    shifted = word << (TO - FROM) if TO >= FROM else word >> (FROM - TO)
    return shifted & MASK


@triton.jit
def _bits(words, i: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr):
    """Column i's number and column i + UNIT / 2's, as bfloat16 apart from a power of two, in the
    halves of an int32; of signed bytes the lowest seven bits, to which `_sign` belongs."""
    BITS: tl.constexpr = WIDTHS[0] + WIDTHS[1] + WIDTHS[2]
    if FORMAT == "2:4":  # beside the bits of 8, which means zero
        ZERO: tl.constexpr = 0x00400040
        first = _moved(words[0], 0, 3, 4) ^ ZERO
        second = _moved(words[0], 4, 3, 4) ^ ZERO
        bits = _chosen(first, second, words[1], i) ^ ZERO
    elif FORMAT == "int" and BITS == 8:
        bits = _moved(words[0], i * 8, 0, 7)
    elif FORMAT == "int":  # the highest bits of the mantissa
        bits = _moved(words[0], i * WIDTHS[0], 7 - BITS, WIDTHS[0])
        if WIDTHS[1] > 0:
            bits |= _moved(words[1], i * WIDTHS[1], 7 - BITS + WIDTHS[0], WIDTHS[1])
        if WIDTHS[2] > 0:
            bits |= _moved(words[2], i * WIDTHS[2], 7 - WIDTHS[2], WIDTHS[2])
    elif FORMAT == "fp8":  # NaN, which no weight is, comes out as 480
        bits = _moved(words[0], i * 8, 4, 7) | _moved(words[0], i * 8 + 7, 15, 1)
    elif FORMAT == "fp6":  # the sign and an exponent's bit are in the plane of width 2
        bits = _moved(words[0], i * 4, 5, 4) | _moved(words[1], i * 2, 9, 1)
        bits |= _moved(words[1], i * 2 + 1, 15, 1)
    else:  # fp4
        bits = _moved(words[0], i * 4, 6, 3) | _moved(words[0], i * 4 + 3, 15, 1)
    return bits


@triton.jit
def _sign(words, i: tl.constexpr):
    """128 where a signed byte is negative, like `_bits`."""
    return _moved(words[0], i * 8 + 7, 7, 1)


@triton.constexpr_function
def _missing(FORMAT):
    """The power of two by which `_bits` are multiplied: what the exponent's bias lacks."""
    return {"fp8": 120, "fp6": 124, "fp4": 126}.get(FORMAT, 127)


@triton.jit
def _pair(words, i: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr):
    """Column i's number and column i + UNIT / 2's as bfloat16 in the halves of an int32."""
    POWER: tl.constexpr = ((127 + _missing(FORMAT)) << 7) * 0x10001
    bits = _bits(words, i, FORMAT, WIDTHS)
    if FORMAT == "2:4":  # converted before they are chosen: there are half as many
        first = _fma(_moved(words[0], 0, 3, 4), POWER, MINUS_ONE)
        second = _fma(_moved(words[0], 4, 3, 4), POWER, MINUS_ONE)
        pair = _chosen(first, second, words[1], i)
    elif FORMAT == "int" and WIDTHS[0] == 8:
        pair = _fma(bits, POWER, _fma(_sign(words, i), POWER - 0x7FFF8000, NOTHING))
    elif FORMAT == "int":
        pair = _fma(bits, POWER, MINUS_ONE)
    else:
        pair = _fma(bits, POWER, NOTHING)
    return pair


@triton.jit
def _fma(a, b, c):
    """a · b + c for both bfloat16 numbers of an int32."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _two(words, table, i: tl.constexpr, FORMAT: tl.constexpr, WIDTHS: tl.constexpr):
    """Column i's number and column i + UNIT / 2's in float32."""
    POWER: tl.constexpr = 2.0 ** _missing(FORMAT)
    if table is not None:
        code = _moved(words[0], i * 4, 0, 4)
        low = _looked_up(table, code & 15)
        high = _looked_up(table, code >> 16)
    else:
        low, high = _as_float32(_bits(words, i, FORMAT, WIDTHS))
        low *= POWER
        high *= POWER
        if FORMAT == "int" and WIDTHS[0] == 8:
            less, more = _as_float32(_sign(words, i))
            low -= less * POWER
            high -= more * POWER
        elif FORMAT == "int" or FORMAT == "2:4":
            low -= 1
            high -= 1
    return low, high


@triton.jit
def _as_float32(bits):
    """The bfloat16 numbers in the halves of an int32."""
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _looked_up(table, code):
    return tl.reshape(tl.gather(table, tl.reshape(code, [code.numel]), 0), code.shape)


@triton.jit
def _chosen(first, second, places, i: tl.constexpr):
    """Of the two that are stored for four columns, in both halves, the one whose place is i, or 0.
    The first is never the last of the four, and the second never the first."""
    if i == 0:
        return first & _where(places, i)
    elif i == 3:
        return second & _where(places >> 2, i)
    else:
        return (first & _where(places, i)) | (second & _where(places >> 2, i))


@triton.jit
def _where(places, i: tl.constexpr):
    """All bits of the halves whose lowest two are i."""
    low = places if i % 2 == 1 else ~places
    high = places >> 1 if i >= 2 else ~(places >> 1)
    return (low & high & 0x00010001) * 0xFFFF


@triton.jit
def load_scales(scale, zero, places, inside, KIND: tl.constexpr, INTEGER_BITS: tl.constexpr):
    """(factor, offset) in float32: a weight is its number · factor + offset."""
    factor = load_floats(scale + places, inside, KIND)
    if INTEGER_BITS > 0:
        factor *= (1 << (INTEGER_BITS - 1)) if INTEGER_BITS < 8 else 64
    offset = tl.full(factor.shape, 0.0, tl.float32)
    if zero is not None:
        offset += load_floats(zero + places, inside, KIND)
    return factor, offset


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
def _float(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A small float as float32: its fields are moved to float32's places, and a product with a
    power of two corrects the exponent's bias. Subnormals become float32's subnormals, so they are
    right."""
    sign = (code >> (BITS - 1)) << 31
    magnitude = (code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)
    return (sign | magnitude).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
