// Calls whose sequences start from one slot and write others, with indices of either width and checkpoints anywhere:
// the same on the CPU and on the GPU.
#pragma once
#include "calls.h"

namespace kda::test {

struct SlotCase {
  Case c;
  int32_t width = KDA_I32;  // of indices
};
inline void PrintTo(const SlotCase& s, std::ostream* out) { *out << s.c.name; }

inline std::vector<SlotCase> slot_cases() {
  const std::vector<int64_t> lengths = {70, 3, 0, 40, 5};
  std::vector<SlotCase> all;
  const auto add = [&](Case c, int32_t width) {
    c.lengths = lengths, c.tail = 2, c.qk_l2norm = true;
    all.push_back({c, width});
  };
  add({.name = "f32", .HV = 2, .K = 61, .V = 37}, KDA_I32);
  add({.name = "f32_K_first", .HV = 2, .K = 40, .V = 68, .state_layout = KDA_STATE_K_FIRST}, KDA_I64);
  add({.name = "K256", .HV = 2, .K = 256, .V = 20, .state_dtype = KDA_BF16}, KDA_I64);
  add({.name = "bf16_64", .HV = 2, .K = 64, .V = 64, .dtype = KDA_BF16, .g_dtype = KDA_BF16}, KDA_I64);
  add({.name = "bf16_128", .HV = 2, .K = 128, .V = 128, .dtype = KDA_BF16, .g_dtype = KDA_BF16}, KDA_I32);
  add({.name = "bf16_128_states",
       .HV = 2,
       .K = 128,
       .V = 128,
       .dtype = KDA_BF16,
       .g_dtype = KDA_BF16,
       .state_dtype = KDA_BF16},
      KDA_I64);
  return all;
}

inline Tensor indices(int32_t width, std::vector<int64_t> shape, const std::vector<double>& values) {
  Tensor t(width, std::move(shape));
  for (size_t i = 0; i < values.size(); ++i) t.set(static_cast<int64_t>(i), values[i]);
  return t;
}

// Memory of a call whose sequences all start from one slot, but for the last, which starts from zeros. They write their
// own slots, or one that was free; the last writes none.
struct Shared {
  Pool pool;
  Tensor o, read, write, checkpoints, checkpoint_slots, offset;

  Shared(const SlotCase& s, const Inputs& in, bool exact)
      : pool(in, exact ? KDA_F64 : s.c.state_dtype),
        o(exact ? KDA_F64 : s.c.dtype, {in.B, in.T, s.c.HV, s.c.V}),
        checkpoints(exact ? KDA_F64 : KDA_F32, in.state_shape(8)) {
    const auto slot = [&](int64_t n) { return static_cast<double>(pool.slots[n]); };
    read = indices(s.width, {5}, std::vector<double>(5, slot(0)));
    write = indices(s.width, {5}, {0, slot(1), 1, slot(3), -1});
    pool.has_initial_state.set(4, 0);
    checkpoint_slots = indices(s.width, {5, 2}, {5, 2, 0, -1, 6, 1, 3, 7, -1, 4});
    offset = indices(s.width, {5}, {21, 14, 0, 48, 1000});
  }
  void give(kda_states& states, kda_tensor& out) const {
    states.h0 = states.hT = pool.h;
    states.state_indices = read, states.has_initial_state = pool.has_initial_state;
    out = write;
  }
};

inline kda_forward_args slot_forward_args(const Inputs& in, const Shared& x, int32_t every = 0, bool offset = false) {
  kda_forward_args a = KDA_FORWARD_ARGS_INIT;
  a.in = in.view(), a.o = x.o;
  x.give(a.states, a.out_state_indices);
  if (every) a.checkpoints = x.checkpoints, a.checkpoint_slots = x.checkpoint_slots, a.checkpoint_every = every;
  if (offset) a.checkpoint_offset = x.offset;
  return a;
}
inline kda_decode_args slot_decode_args(const Inputs& in, const Shared& x) {
  kda_decode_args a = KDA_DECODE_ARGS_INIT;
  a.in = in.view(), a.o = x.o;
  x.give(a.states, a.out_state_indices);
  return a;
}
// Intervals of checkpoints, and whether requests resume. 0: none.
constexpr std::pair<int32_t, bool> kCheckpointForms[] = {{0, false}, {64, false}, {16, false}, {48, true}, {64, true}};

}  // namespace kda::test
