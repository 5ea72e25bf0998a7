// quantbench::cpu_decode_attention and cpu_past_attention: checks, how the work is split over
// threads, and how the parts' sums are joined.
//
// A part is some slots of one row and key head, for a piece: at most MAX_GROUP of the query heads that share
// it. Slots and heads are split by counts and shapes alone, never by the number of threads, nor by how many
// queries read the same row of the cache; each thread takes its share, then what others have left; and the
// thread that finishes the last part of some query heads adds their parts up in order. So the result is the
// same, bit for bit, for any number of threads and of queries.

#include "attention/attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/isa.h"
#include "common/products.h"

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t HEADS_UNIT = 8;    // query heads that the inner loops take at a time, at most
constexpr int64_t PARTS = 128;       // about, at most, if a row has one query: threads finish together
constexpr int64_t MIN_SLOTS = 256;   // of a part
constexpr int64_t MIN_NUMBERS = 32 << 10;  // of its keys, for ALONE_HEADS: starting a part takes 1 µs
constexpr int64_t ALONE = 64 << 10;  // bytes that one thread reads faster than others wake up
constexpr int64_t READ_ALONE = 16 << 10;  // numbers of a query, the same
constexpr int64_t ALONE_HEADS = 16;  // for this many query heads; more take longer than the reading

KvFormat kv_format(const KvStorage& storage, ScalarType codes) {
  if (!storage.codes) return static_cast<KvFormat>(number_of(codes));
  STD_TORCH_CHECK(codes == *storage.codes, "the cache's codes have not the dtype of format ", storage.name);
  return storage.format;
}

// Where attention is taken from: keys or values of all rows and heads.
struct Side {
  Slots slots;
  int64_t row_bytes, head_bytes, row_scale_bytes = 0, head_scale_bytes = 0;

  Side(const Tensor& codes, const std::optional<Tensor>& scale, int64_t scales) {
    inner_contiguous(codes);
    const int64_t code_bytes = codes.element_size();
    slots.codes = static_cast<const char*>(codes.const_data_ptr());
    slots.slot_bytes = codes.size(3) * code_bytes;
    row_bytes = codes.stride(0) * code_bytes;
    head_bytes = codes.stride(1) * code_bytes;
    STD_TORCH_CHECK(scale.has_value() == (scales > 0), "a scale is missing, or one too many");
    slots.scale = nullptr;
    slots.slot_scales = scales;
    slots.scale_type = Number::f32;
    if (!scale) return;
    inner_contiguous(*scale);
    for (int i = 0; i < 3; ++i)
      STD_TORCH_CHECK(scale->size(i) == codes.size(i), "codes and scale differ in shape");
    STD_TORCH_CHECK(scale->size(3) == scales, "scale's last dimension is not ", scales);
    slots.scale = static_cast<const char*>(scale->const_data_ptr());
    slots.scale_type = number_of(scale->scalar_type());
    row_scale_bytes = scale->stride(0) * size_of(slots.scale_type);
    head_scale_bytes = scale->stride(1) * size_of(slots.scale_type);
  }

  static void inner_contiguous(const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 4, "a cache has 4 dimensions, not ", t.dim());
    STD_TORCH_CHECK((t.size(3) == 1 || t.stride(3) == 1) &&
                        (t.size(2) == 1 || t.stride(2) == t.size(3)),
                    "a cache's slots must follow one another in memory");
  }

  Slots of(int64_t row, int64_t head) const {
    Slots s = slots;
    s.codes += row * row_bytes + head * head_bytes;
    if (s.scale) s.scale += row * row_scale_bytes + head * head_scale_bytes;
    return s;
  }
};

// The place of a head's element d in the order of the inner loop.
int place(KvFormat format, int d) {
  if (format != KvFormat::int4) return d;
  int group = d / INT4_GROUP * INT4_GROUP, i = d % INT4_GROUP;
  return group + i / 2 + i % 2 * (INT4_GROUP / 2);
}

// Calls `f` with a zero of the type.
template <typename F>
void with_type(Number type, F f) {
  switch (type) {
    case Number::f32: return f(float());
    case Number::bf16: return f(BFloat16());
    case Number::f16: return f(Half());
  }
}

// Query head i of all rows'.
template <typename T>
void read_query(const Tensor& query, int64_t i, KvFormat format, float* to) {
  const int64_t H = query.size(1), D = query.size(2), step = query.stride(2);
  const T* x = static_cast<const T*>(query.const_data_ptr()) + i / H * query.stride(0) +
               i % H * query.stride(1);
  for (int64_t d = 0; d < D; ++d) to[place(format, d)] = float(x[d * step]);
}

// What a part leaves behind: `largest`, `sum` and `weighted` of each of its query heads.
struct Partial {
  float* largest;
  float* sum;
  float* weighted;
  static int64_t floats(int64_t heads, int64_t padded) {
    // Whole pairs of cache lines, so that no two threads write to the same: they come in pairs.
    return (heads * (padded + 2) + 31) / 32 * 32;
  }
  Partial(float* base, int64_t heads, int64_t padded)
      : largest(base + heads * padded), sum(largest + heads), weighted(base) {}
};

// Parts of the same heads, `step` floats apart, into their attention, `out`, and, unless it is null,
// `denominator`: the logarithm of the softmax's denominator.
template <typename T>
void add_up(float* parts, int64_t count, int64_t step, int64_t heads, int64_t head_dim, int64_t padded,
            KvFormat format, T* out, float* denominator) {
  std::vector<float> share(count);
  for (int64_t h = 0; h < heads; ++h, out += head_dim) {
    float largest = Partial(parts, heads, padded).largest[h];
    for (int64_t i = 1; i < count; ++i)
      largest = std::max(largest, Partial(parts + i * step, heads, padded).largest[h]);
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      Partial part(parts + i * step, heads, padded);
      share[i] = std::exp(part.largest[h] - largest);
      sum += share[i] * part.sum[h];
    }
    float* total = Partial(parts, heads, padded).weighted + h * padded;
    for (int64_t d = 0; d < head_dim; ++d) total[d] *= share[0];
    for (int64_t i = 1; i < count; ++i) {
      const float* more = Partial(parts + i * step, heads, padded).weighted + h * padded;
      for (int64_t d = 0; d < head_dim; ++d) total[d] += share[i] * more[d];
    }
    for (int64_t d = 0; d < head_dim; ++d) out[d] = T(total[place(format, d)] / sum);
    if (denominator) denominator[h] = largest + std::log(sum);
  }
}

// The slots that a query sees, and how they are cut into parts.
struct Row {
  int64_t first, count, part_slots, parts;
};

// Some query heads of one key head, at most MAX_GROUP.
struct Piece {
  int64_t head, heads;           // the first among all rows' query heads, and how many
  int64_t parts;
  float* partials;               // what the parts leave behind, one behind the other
  std::atomic<int64_t> missing;  // parts that are not done
};

typedef void (*Attend)(const Part&);

Attend version() {
#if defined(__x86_64__)
  if (has(Isa::amx)) return attend_amx;
  if (has(Isa::avx512bf16)) return attend_avx512bf16;
  if (has(Isa::avx512vnni)) return attend_avx512vnni;
  if (has(Isa::avx512)) return attend_avx512;
  if (has(Isa::avxvnni)) return attend_avxvnni;
  if (has(Isa::avx2)) return attend_avx2;
#endif
  return attend_portable;
}

// One call's attention: of query (B, H, D), where H / K query heads share each key head.
struct Attention : Attending {
  const KvStorage& storage;
  KvFormat format;
  Number type;
  float scale, softcap;
  Side key, value;
  int64_t B, H, D, K, T, heads, padded, parts = 0, partial_floats;
  int64_t queries;              // that read the same row of the cache, one behind the other
  int64_t piece_heads, pieces;  // of a key head
  std::vector<Row> rows;
  std::unique_ptr<Piece[]> every_piece;  // (B, K, pieces)
  struct Task {
    Part part;
    Piece& piece;
  };
  std::vector<Task> tasks;  // in the order in which they are taken
  const Tensor given;
  std::vector<float> query;  // as read: zeros behind each head
  std::unique_ptr<float[]> memory;     // the parts' results
  Tensor out;                          // in the query's dtype; float32 if `denominator`
  std::optional<Tensor> denominator;   // (B, H) float32; only for past_attention
  Attend attend = version();
  int64_t threads;
  struct alignas(128) Share {  // parts that follow one another, of which `next` is not taken yet
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::unique_ptr<Share[]> shares;  // as many as threads
  std::atomic<int64_t> arrived{0};

  static Number query_type(const Tensor& query) {
    STD_TORCH_CHECK(query.dim() == 3, "query is (B, H, D)");
    return number_of(query.scalar_type());
  }

  Attention(const AttentionInputs& in, bool with_denominator)
      : storage(kv_storage(in.format)), format(kv_format(storage, in.key_codes.scalar_type())),
        type(query_type(in.query)), scale(in.scale), softcap(in.softcap),
        key(in.key_codes, in.key_scale, storage.scales(in.query.size(2))),
        value(in.value_codes, in.value_scale, storage.scales(in.query.size(2))), B(in.query.size(0)),
        H(in.query.size(1)), D(in.query.size(2)), K(in.key_codes.size(1)), T(in.key_codes.size(2)),
        given(in.query),
        out(torch::stable::new_empty(
            in.query, {B, H, D}, with_denominator ? ScalarType::Float : in.query.scalar_type())) {
    const int64_t unit = format == KvFormat::int4 ? INT4_GROUP : 8;
    for (int i = 0; i < 4; ++i)
      STD_TORCH_CHECK(in.key_codes.size(i) == in.value_codes.size(i), "keys and values differ in shape");
    STD_TORCH_CHECK(in.key_codes.scalar_type() == in.value_codes.scalar_type(),
                    "keys and values differ in dtype");
    queries = std::max<int64_t>(1, B / std::max<int64_t>(1, in.key_codes.size(0)));
    STD_TORCH_CHECK(in.key_codes.size(0) * queries == B && in.key_codes.size(3) * storage.numbers == D,
                    "query and cache differ in rows or head_dim");
    STD_TORCH_CHECK(K > 0 && H > 0 && H % K == 0,
                    "decode attention takes a multiple of the key heads as query heads, not ", H,
                    " for ", K);
    STD_TORCH_CHECK(D % unit == 0 && D > 0 && D <= MAX_HEAD_DIM, "decode attention takes a head_dim up to ",
                    MAX_HEAD_DIM, ", a multiple of ", unit, "; not ", D);
    STD_TORCH_CHECK(T > 0, "the cache has no slots");
    for (const Tensor* t : {&in.first, &in.count})
      STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == B && t->scalar_type() == ScalarType::Long,
                      "first and count are (B,) int64");
    heads = H / K;
    piece_heads = heads;
    if (heads > MAX_GROUP) {  // pieces alike in size, of whole tiles
      const int64_t least = (heads + MAX_GROUP - 1) / MAX_GROUP;
      piece_heads = ((heads + least - 1) / least + HEADS_UNIT - 1) / HEADS_UNIT * HEADS_UNIT;
    }
    pieces = (heads + piece_heads - 1) / piece_heads;
    padded = (D + HEAD_DIM_UNIT - 1) / HEAD_DIM_UNIT * HEAD_DIM_UNIT;
    partial_floats = Partial::floats(piece_heads, padded);
    if (with_denominator) denominator = torch::stable::new_empty(in.query, {B, H}, ScalarType::Float);
    query.resize(B * H * padded);
    const int64_t visible = cut(in.first, in.count);
    order();
    const int64_t read = visible * K * key.slots.slot_bytes * 2;
    threads = read * ((heads + ALONE_HEADS - 1) / ALONE_HEADS) <= ALONE
                  ? 1 : std::min<int64_t>(parts, torch::stable::get_num_threads());
    shares.reset(new Share[threads]);
    for (int64_t t = 0; t < threads; ++t)
      shares[t].next = parts * t / threads, shares[t].end = parts * (t + 1) / threads;
  }

  // Rows into parts; returns how many slots are visible in all.
  int64_t cut(const Tensor& first, const Tensor& count) {
    int64_t visible = 0;
    auto at = [](const Tensor& t, int64_t b) {
      return static_cast<const int64_t*>(t.const_data_ptr())[b * t.stride(0)];
    };
    for (int64_t b = 0; b < B; ++b) {
      Row row{};
      row.first = ((at(first, b) % T) + T) % T;
      row.count = std::min(at(count, b), T);
      STD_TORCH_CHECK(row.count > 0, "row ", b, " sees no slot: its count is ", at(count, b));
      const int64_t wanted = std::max<int64_t>(1, PARTS / (B / queries * K * pieces));
      const int64_t times = (piece_heads + ALONE_HEADS - 1) / ALONE_HEADS;  // more heads take longer
      const int64_t least = std::max({MIN_SLOTS, MIN_NUMBERS / D / times,
                                      (row.count + wanted - 1) / wanted});
      row.part_slots = (least + SLOTS_UNIT - 1) / SLOTS_UNIT * SLOTS_UNIT;
      row.parts = (row.count + row.part_slots - 1) / row.part_slots;
      parts += row.parts * K * pieces;
      visible += row.count;
      rows.push_back(row);
    }
    return visible;
  }

  // Queries of a row of the cache have the same slots' parts one behind the other: memory is read once.
  void order() {
    memory.reset(new float[parts * partial_floats + 32]);
    auto* partials = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 127) & ~uintptr_t(127));
    every_piece.reset(new Piece[B * K * pieces]);
    for (int64_t i = 0; i < B * K * pieces; ++i) {
      const int64_t row = i / (K * pieces), k = i / pieces % K, first = i % pieces * piece_heads;
      Piece& piece = every_piece[i];
      piece.head = row * H + k * heads + first, piece.heads = std::min(piece_heads, heads - first);
      piece.parts = piece.missing = rows[row].parts, piece.partials = partials;
      partials += piece.parts * partial_floats;
    }
    tasks.reserve(parts);
    for (int64_t row = 0; row < B; row += queries) {
      int64_t most = 0;
      for (int64_t b = row; b < row + queries; ++b) most = std::max(most, rows[b].parts);
      for (int64_t k = 0; k < K; ++k)
        for (int64_t piece = 0; piece < pieces; ++piece)
          for (int64_t i = 0; i < most; ++i)
            for (int64_t b = row; b < row + queries; ++b)
              if (i < rows[b].parts) add_task(b, k, every_piece[(b * K + k) * pieces + piece], i);
    }
  }

  void add_task(int64_t b, int64_t k, Piece& piece, int64_t i) {
    const Row& row = rows[b];
    const int64_t skipped = i * row.part_slots, cached = b / queries;
    const Partial result(piece.partials + i * partial_floats, piece.heads, padded);
    tasks.push_back({{format, key.of(cached, k), value.of(cached, k), int(piece.heads), int(D), int(padded),
                      (row.first + skipped) % T, std::min(row.part_slots, row.count - skipped), T,
                      query.data() + piece.head * padded, type, scale, softcap, result.largest, result.sum,
                      result.weighted}, piece});
  }

  void finish(const Piece& piece) {
    const bool wide = denominator.has_value();
    float* logarithms = wide ? static_cast<float*>(denominator->mutable_data_ptr()) + piece.head : nullptr;
    with_type(wide ? Number::f32 : type, [&]<class T>(T) {
      add_up(piece.partials, piece.parts, partial_floats, piece.heads, D, padded, format,
             static_cast<T*>(out.mutable_data_ptr()) + piece.head * D, logarithms);
    });
  }

  // A thread takes the parts of its share in order, for a part prefetches the first lines of the one
  // behind it; then those that others have left. So parts that are worked on at a time are far
  // apart, too: in parts side by side two threads read 15 % less.
  void work() override {
    const int64_t own = arrived.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[(own + i) % threads];
      for (int64_t n; (n = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        attend(tasks[n].part);
        if (Piece& piece = tasks[n].piece; piece.missing.fetch_sub(1, std::memory_order_acq_rel) == 1)
          finish(piece);
      }
    }
  }

  void read(int64_t first, int64_t last) override {
    with_type(type, [&]<class T>(T) {
      for (int64_t i = first; i < last; ++i) read_query<T>(given, i, format, query.data() + i * padded);
    });
  }

  bool alone() const override { return threads == 1; }
  const Tensor& result() const override { return out; }

  void by_all_threads() {
    torch::stable::parallel_for(0, B * H, READ_ALONE / padded,
                                [&](int64_t first, int64_t last) { read(first, last); });
    if (alone()) return work();
    torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1,
                                [&](int64_t, int64_t) { work(); });
  }
};

}  // namespace

std::unique_ptr<Attending> Attending::make(const AttentionInputs& inputs) {
  return std::unique_ptr<Attending>(new Attention(inputs, false));
}

namespace {

// Attention, and with DENOMINATOR the logarithm of its softmax's denominator.
template <bool DENOMINATOR>
auto attention(const Tensor& query, const Tensor& key_codes, const std::optional<Tensor>& key_scale,
               const Tensor& value_codes, const std::optional<Tensor>& value_scale,
               const Tensor& first, const Tensor& count, const std::string& format, double scale,
               double softcap) {
  Attention work({query, key_codes, key_scale, value_codes, value_scale, first, count, format, scale,
                  softcap}, DENOMINATOR);
  work.by_all_threads();
  if constexpr (DENOMINATOR) return std::tuple<Tensor, Tensor>(work.out, *work.denominator);
  else return work.out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_decode_attention", TORCH_BOX(&attention<false>));
  library.impl("cpu_past_attention", TORCH_BOX(&attention<true>));
}
