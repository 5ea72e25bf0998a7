// Which loop of linear/many/many.h runs. Apart from it, because variants must not see the standard library:
// see INLINE in common/variant.h.
#pragma once

#include <memory>
#include <optional>

#include "common/products.h"
#include "linear/many/many.h"

// The loop for a number of tokens; none if reading the weight once for every four of them is faster.
std::optional<ManyVariant> many_for(const Header&, const Geometry&, Number x, int64_t tokens);
std::optional<ManyVariant> many_for_plain(int64_t tokens);

// x by a plain weight (rows, columns).
std::unique_ptr<Product> plain_product_by(const ManyVariant&, const void* weight, int64_t rows,
                                          int64_t columns, Number type, int64_t tokens);
