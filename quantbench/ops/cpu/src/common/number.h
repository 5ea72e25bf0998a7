// What activations are made of.
#pragma once

#include <cstdint>

#include "common/variant.h"

enum class Number : int32_t { f32, bf16, f16 };
