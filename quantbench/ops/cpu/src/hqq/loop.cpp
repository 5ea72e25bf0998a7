// The loop of hqq/hqq.h.
//
// A lane of a vector has a group, so sums over a group's columns need no sums over lanes. Its numbers
// are those of ops/hqq.py, bit for bit: no product is fused with a sum (ops/cpu/compiler.py has the
// flag), and every sum is of four sums of every fourth number.
//
// Variants: portable avx2 avx512vnni neon-dotprod

#include "hqq/hqq.h"

namespace {
#include "vector/wide.h"

constexpr float NARROWER[] = {0.95f, 0.9f, 0.85f, 0.8f, 0.7f};  // of the range
constexpr int REFITS = 3;
constexpr float MOST_STEPS = 2e4f;  // of codes for a unit of weight

inline Floats smaller(Floats a, Floats b) { return select(b < a, b, a); }
inline Floats larger(Floats a, Floats b) { return select(b > a, b, a); }
inline Floats magnitude(Floats v) { return (Floats)((Bits)v & 0x7fffffffu); }

// Limited, then rounded to the nearest, ties to even. The limits are far below 2^22.
inline Floats nearest(Floats v, float least, float most) {
  constexpr float TO_INTEGERS = 12582912.0f;  // 1.5 · 2^23: its neighbours are the integers
  return (clamped(v, least, most) + TO_INTEGERS) - TO_INTEGERS;
}

// Rounded to the nearest, ties to even, whatever its size.
inline Floats whole(Floats v) {
  const Floats size = magnitude(v);
  const Floats rounded = select(size < 8388608.0f, (size + 8388608.0f) - 8388608.0f, size);
  return (Floats)((Bits)rounded | ((Bits)v & 0x80000000u));
}

inline bool any(Ints mask) {
  alignas(64) int32_t lanes[16];
  store(lanes, mask);
  int32_t one = 0;
  for (int i = 0; i < 16; ++i) one |= lanes[i];
  return one != 0;
}

struct Sums {
  Floats sum[4] = {};
  Floats total() const { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }
};

// body(column's weights, column % 4) for all columns
template <class Body>
inline void for_columns(const float* x, int64_t columns, const Body& body) {
  for (int64_t k = 0; k < columns; k += 4)
    for (int j = 0; j < 4; ++j) body(load<Floats>(x + (k + j) * AT_ONCE), j);
}

struct Pair {
  Floats scale, zero;
};

struct Fit {
  const Fitting& given;
  const float* x;  // (columns, AT_ONCE)
  Pair best;
  const float half = float(1 << (given.bits - 1)), most = 2 * half - 1;
  Floats error = squares(best);

  // As scale and zero are stored.
  Floats stored(Floats v) const {
    return given.half ? from_f16(as_f16(v)) : (Floats)(converted<Bits>(as_bf16(v)) << 16);
  }

  Floats codes(Floats weights, const Pair& pair, Floats inverse) const {
    return nearest((weights - pair.zero) * inverse, -half, half - 1);
  }

  Floats squares(const Pair& pair) const {
    Sums sums;
    const Floats inverse = all(1.0f) / pair.scale;
    for_columns(x, given.columns, [&](Floats weights, int j) {
      const Floats number = codes(weights, pair, inverse) * pair.scale + pair.zero;
      const Floats off = number - weights;
      sums.sum[j] += off * off;
    });
    return sums.total();
  }

  // Takes the pair for the groups where it is better. Whether it is for any.
  bool attempt(Floats wide_scale, Floats wide_zero) {
    const Pair pair{stored(wide_scale), stored(wide_zero)};
    const Floats found = squares(pair);
    const Ints better = (Ints)(found < error) & (Ints)(pair.scale > 0.0f);
    best = {select(better, pair.scale, best.scale), select(better, pair.zero, best.zero)};
    error = select(better, found, error);
    return any(better);
  }

  Floats mean(const Sums& sums) const { return sums.total() / float(given.columns); }

  // The proximal operator, for the lanes whose error is larger than `least`.
  Floats shrunk(Floats off, float least, float inverse) const {
    alignas(64) float numbers[16];
    store(numbers, off);
    for (int i = 0; i < 16; ++i) {
      const float size = __builtin_fabsf(numbers[i]);
      const float power = float(__builtin_pow(size, given.power)) * inverse;
      const float rest = size - power > 0 ? size - power : 0.0f;
      numbers[i] = size > least ? __builtin_copysignf(rest, numbers[i]) : 0.0f;
    }
    return load<Floats>(numbers);
  }

  void half_quadratic() {
    Floats low = load<Floats>(x), high = low;
    for_columns(x, given.columns, [&](Floats weights, int) {
      low = smaller(low, weights), high = larger(high, weights);
    });
    Floats steps = all(1.0f) / (high - low) * most;
    steps = select(steps > MOST_STEPS, all(MOST_STEPS), steps);
    const Floats unit = all(1.0f) / steps;
    Floats point = -low * steps;
    if (given.bits == 4) point = whole(point);
    Ints unsettled = all(-1);
    for (int i = 0; i < ITERATIONS && any(unsettled); ++i) {
      Sums sums;
      Floats largest{};
      for_columns(x, given.columns, [&](Floats weights, int j) {
        const Floats stretched = weights * steps, code = nearest(stretched + point, 0, most);
        largest = larger(largest, magnitude(weights - (code - point) * unit));
        sums.sum[j] += code - stretched;
      });
      if (any((Ints)(largest > given.least[i]))) {  // rare: weights are small
        sums = {};
        for_columns(x, given.columns, [&](Floats weights, int j) {
          const Floats code = nearest(weights * steps + point, 0, most);
          const Floats off = weights - (code - point) * unit;
          const Floats kept = shrunk(off, given.least[i], given.inverses[i]);
          sums.sum[j] += code - (weights - kept) * steps;
        });
      }
      const Floats next = select(unsettled, mean(sums), point);
      unsettled = unsettled & (Ints)(next != point);
      point = next;
    }
    attempt(unit, (all(half) - point) * unit);
  }

  void narrower(const Pair& range) {
    const Floats centre = range.zero - range.scale * 0.5f;
    for (const float part : NARROWER) {
      const Floats narrow = stored(range.scale * part);
      attempt(narrow, centre + narrow * 0.5f);
    }
  }

  // Whether it was better for any group.
  bool least_squares() {
    Sums code_sums, weight_sums, spreads, products;
    const Floats inverse = all(1.0f) / best.scale;
    for_columns(x, given.columns, [&](Floats weights, int j) {
      code_sums.sum[j] += codes(weights, best, inverse);
      weight_sums.sum[j] += weights;
    });
    const Floats code = mean(code_sums), weight = mean(weight_sums);
    for_columns(x, given.columns, [&](Floats weights, int j) {
      const Floats centred = codes(weights, best, inverse) - code;
      spreads.sum[j] += centred * centred;
      products.sum[j] += centred * weights;
    });
    const Floats spread = spreads.total(), least = all(1e-6f);
    Floats slope = products.total() / select(spread < least, least, spread);
    slope = select(spread > 0.0f, slope, best.scale);
    return attempt(slope, weight - slope * code);
  }
};

void fit_block(const Fitting& given, const float* groups, float* best) {
  const float* behind = groups + given.columns * AT_ONCE;
  const Pair range{load<Floats>(behind), load<Floats>(behind + AT_ONCE)};
  Fit fit{given, groups, range};
  fit.half_quadratic();
  fit.narrower(range);
  for (int i = 0; i < REFITS && fit.least_squares(); ++i) {
  }
  store(best, fit.best.scale);
  store(best + AT_ONCE, fit.best.zero);
}

}  // namespace

FitGroups NAMED(hqq)() { return fit_block; }
