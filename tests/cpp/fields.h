// The tensors of a call by name, from the tables of operands, for loops over all of them.
#pragma once
#include <vector>

#include "contract/tables_stages.h"

namespace kda::test {

struct Field {
  const char* name;
  kda_tensor* t;
  bool output = false;
  unsigned free = 0;  // a bit for each dimension whose size follows from no other tensor
};

// All of them, in the order of the table.
template <class Args>
std::vector<Field> fields(Args& a) {
  std::vector<Field> all;
  unsigned met = bit(static_cast<int>(Size::C)) | bit(static_cast<int>(Size::kChunk)) |
                 bit(static_cast<int>(Size::kChunks)) | bit(static_cast<int>(Size::kWritten));
  for (const Operand& o : operands_of<Args>()) {
    if (!o.tensor()) continue;
    unsigned free = 0;
    for (int i = 0; i < o.ndim; ++i) {
      const unsigned size = bit(static_cast<int>(o.shape[i].size));
      if (!(met & size)) free |= bit(i);
      if (o.shape[i].size != Size::kAny) met |= size;
    }
    all.push_back({o.name, &tensor_of(&a, o), o.output(), free});
  }
  return all;
}

// Those that the call has.
template <class Args>
std::vector<Field> given(Args& a) {
  std::vector<Field> all = fields(a);
  std::erase_if(all, [](const Field& f) { return f.t->ndim == 0; });
  return all;
}

}  // namespace kda::test
