// From a weight's header to the type that reads its codes: the one switch over those types. Two more
// switch over a header's coding: which bits a format may have (linear/layout.cpp), and what a code's number
// is, for AMX (linear/many/weights_to_tiles.h). Included in a variant's namespace, after linear/codes.h.

template <class C>
struct Format {};

// Calls `f` with Format<the header's format>.
template <class F>
inline auto with_format(const Header& header, F f) {
  switch (header.coding) {
    case Coding::fp6: return f(Format<Float6>());
    case Coding::bytes: return f(Format<Bytes4>());
    case Coding::table: return f(Format<Table4<3>>());
    case Coding::sparse: return f(Format<Sparse>());
    case Coding::fp8: return f(Format<Float8>());
    case Coding::integer: break;
  }
  switch (header.bits) {
    case 1: return f(Format<Integer<1>>());
    case 2: return f(Format<Integer<2>>());
    case 3: return f(Format<Integer<3>>());
    case 4: return f(Format<Integer<4>>());
    case 5: return f(Format<Integer<5>>());
    case 6: return f(Format<Integer<6>>());
    case 7: return f(Format<Integer<7>>());
    default: return f(Format<Integer<8>>());
  }
}
