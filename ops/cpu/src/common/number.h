// What activations are made of.
#pragma once

#include <cstdint>

enum class Number : int32_t { f32, bf16, f16 };
