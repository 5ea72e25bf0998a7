#include "attention.h"

namespace {
#include "vector_portable.h"

#include "attention_numbers.h"

#include "attention_part.h"
}  // namespace

void attend_portable(const Part& part) { attend(part); }
