// The operands of every operator but the stages, in the order of Python's calls. Comments in kda.h say what they mean.
#pragma once
#include <span>

#include "contract/gate_form.h"
#include "operand.h"

namespace kda {

#define KDA_T(member, ...) tensor_at(#member, offsetof(A, member), __VA_ARGS__)
#define KDA_INT(member) scalar_at(#member, offsetof(A, member), Type::kInt)
#define KDA_FLAG(member) scalar_at(#member, offsetof(A, member), Type::kFlag)
#define KDA_FLOAT(member) scalar_at(#member, offsetof(A, member), Type::kFloat)
#define KDA_DOUBLE(member) scalar_at(#member, offsetof(A, member), Type::kDouble)
#define KDA_RESERVED(name) scalar_at(name, offsetof(A, reserved), Type::kReserved)

#define KDA_GROUP(member, operands) group_at(#member, offsetof(A, member), operands)

// ---- groups that several operators share ----

struct InputsGroup {
  using A = kda_inputs;
  static constexpr auto operands = std::array{
      KDA_T(q, "[B,T,H,K]", kFloats).from(""),
      KDA_T(k, "[B,T,H,K]", kFloats).like_dtype("q").from(" like q"),
      KDA_T(v, "[B,T,HV,V]", kFloats).like_dtype("q").from(" ([B,T] like q)"),
      KDA_T(g, "[B,T,HV,K]", kFloats).from(" ([B,T,HV,K] of q and v)"),
      KDA_T(beta, "[B,T,HV]", kFloats).strided().from(" ([B,T,HV] of q and v)"),
      KDA_T(A_log, "[HV]", kSingles).maybe().from(" ([HV] of v)"),
      KDA_T(dt_bias, "[HV,K]", kSingles).maybe().from(" ([HV,K] of q and v)"),
      KDA_T(cu_seqlens, "[N+1]", kIndices).maybe(),
      KDA_INT(gate_form).range(KDA_GATE_LOG, kLastGateForm),
      KDA_INT(beta_form).range(KDA_BETA_ACTIVATED, KDA_BETA_2SIGMOID),
      KDA_FLAG(qk_l2norm).called("use_qk_l2norm_in_kernel"),
      KDA_INT(state_layout).range(KDA_STATE_V_FIRST, KDA_STATE_K_FIRST),
      KDA_FLOAT(lower_bound),
      KDA_FLOAT(scale),
  };
};

struct StatesGroup {
  using A = kda_states;
  static constexpr auto operands = std::array{
      KDA_T(h0, "[N,HV,V,K]", kStates).maybe().size(0, Size::kRead),
      KDA_T(hT, "[N,HV,V,K]", kStates).out().maybe().size(0, Size::kWritten).be("h0"),
      KDA_T(state_indices, "[N]", kIndices).maybe().strided(),
      KDA_T(has_initial_state, "[N]", bit(KDA_BOOL)).maybe().strided().need("h0"),
      KDA_INT(first_valid_slot).range(0, INT32_MAX),
      KDA_RESERVED("states.reserved"),
  };
};

struct ConvGroup {
  using A = kda_conv_inputs;
  // `state`: what the operator does with the conv state.
  static constexpr auto operands(Role state) {
    std::array all{
        KDA_T(x, "[B,T,D]", kFloats).maybe().called("conv.x"),
        KDA_T(weight, "[D,W]", kFloats).need("conv.x").called("conv.weight"),
        KDA_T(bias, "[D]", kFloats).maybe().need("conv.x").called("conv.bias"),
        KDA_T(state, "[slots,D,W-1]", kFloats).strided().need("conv.x").called("conv.state"),
        KDA_T(indices, "[N]", kIndices).maybe().strided().need("conv.x").called("conv.indices"),
    };
    all[3].role = state;
    return all;
  }
};

struct NormGroup {
  using A = kda_norm_inputs;
  static constexpr auto operands = std::array{
      KDA_T(gate, "[B,T,HV,V]", kFloats).maybe().from(" like o").called("norm.gate"),
      KDA_T(weight, "[V]", kFloats).maybe().from(" ([V] of o)").called("norm.weight"),
      KDA_DOUBLE(eps).called("norm.eps"),
      KDA_INT(activation).range(KDA_NORM_NONE, KDA_NORM_SILU).called("norm.activation"),
      KDA_FLAG(apply).called("norm.apply"),
  };
};

struct RecordsGroup {
  using A = kda_records;
  // `role`: what the operator does with the entries, `cursors`: with those of a ring.
  static constexpr auto operands(Role role, Role cursors) {
    std::array all{
        KDA_T(u, "[slots,R,HV,V]", kSingles).maybe().layers().called("records.u"),
        KDA_T(k, "[slots,R,H,K]", kSingles).maybe().layers().called("records.k"),
        KDA_T(alpha, "[slots,R,HV,K]", kSingles).maybe().layers().called("records.alpha"),
        KDA_T(indices, "[N]", kIndices).maybe().strided().called("records.indices"),
        KDA_T(ring_first, "[slots]", bit(KDA_I32)).maybe().strided().called("records.ring_first"),
        KDA_T(ring_count, "[slots]", bit(KDA_I32)).maybe().strided().called("records.ring_count"),
    };
    for (int i = 0; i < 3; ++i)
      all[i].role = role, all[i].shape[0].size = Size::kSlots, all[i].shape[1].size = Size::kR;
    for (int i = 4; i < 6; ++i) all[i].role = cursors, all[i].shape[0].size = Size::kSlots;
    return all;
  }
  // The records of the last round.
  static constexpr auto last() {
    auto all = operands(Role::kIn, Role::kIn);
    const char* const names[] = {"last.u",       "last.k",          "last.alpha",
                                 "last.indices", "last.ring_first", "last.ring_count"};
    for (int i = 0; i < 6; ++i) {
      all[i].name = names[i];
      for (Dimension& d : all[i].shape)
        d.size = d.size == Size::kSlots ? Size::kLastSlots : d.size == Size::kR ? Size::kLastR : d.size;
    }
    return all;
  }
};

// ---- operators ----

template <class Args>
struct Table;

template <>
struct Table<kda_forward_args> {
  using A = kda_forward_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands), KDA_GROUP(states, StatesGroup::operands),
             std::array{
                 KDA_T(o, "[B,T,HV,V]", kFloats).out().from(" like v"),
                 KDA_T(checkpoints, "[slots,HV,V,K]", kStates).out().maybe().be("h0", "hT"),
                 KDA_T(checkpoint_slots, "[N,M]", kIndices).together("checkpoints").apart(),
                 KDA_T(h, "[NT,HV,V,K]", kStates).out().maybe(),
                 KDA_T(v_new, "[B,T,HV,V]", kStates).out().maybe().from(" like v"),
                 KDA_T(Aqk, "[B,T,HV,C]", kSingles).out().maybe(),
                 KDA_T(Akk, "[B,T,HV,C]", kSingles).out().maybe(),
                 KDA_INT(checkpoint_every),
                 KDA_INT(h_every),
             },
             trailing(std::array{
                 KDA_T(out_state_indices, "[N]", kIndices).maybe().strided().need("a pool hT"),
                 KDA_T(checkpoint_offset, "[N]", kIndices).maybe().strided(),
             }),
             trailing(KDA_GROUP(norm, NormGroup::operands)),
             trailing(std::array{KDA_FLAG(h_v_first), KDA_RESERVED("args.reserved")}));
};

template <>
struct Table<kda_backward_args> {
  using A = kda_backward_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands),
             std::array{
                 KDA_T(h0, "[N,HV,V,K]", kStates).maybe(),
                 KDA_T(d_o, "[B,T,HV,V]", kFloats).from(" like v"),
                 KDA_T(dhT, "[N,HV,V,K]", kStates).maybe(),
                 KDA_T(h, "[NT,HV,V,K]", kStates).maybe(),
                 KDA_T(v_new, "[B,T,HV,V]", kStates).maybe().from(" like v"),
                 KDA_T(Aqk, "[B,T,HV,C]", kSingles).maybe(),
                 KDA_T(Akk, "[B,T,HV,C]", kSingles).maybe(),
                 KDA_T(dq, "[B,T,H,K]", kFloats).out().maybe().from(" like q"),
                 KDA_T(dk, "[B,T,H,K]", kFloats).out().maybe().from(" like k"),
                 KDA_T(dv, "[B,T,HV,V]", kFloats).out().maybe().from(" like v"),
                 KDA_T(dg, "[B,T,HV,K]", kFloats).out().maybe().from(" like g"),
                 KDA_T(dbeta, "[B,T,HV]", kFloats).out().maybe().strided().from(" like beta"),
                 KDA_T(dA_log, "[HV]", kSingles).out().maybe().need("A_log"),
                 KDA_T(d_dt_bias, "[HV,K]", kSingles).out().maybe().need("dt_bias"),
                 KDA_T(dh0, "[N,HV,V,K]", kStates).out().maybe(),
                 KDA_INT(h_every),
                 KDA_FLAG(h_v_first),
             });
};

template <>
struct Table<kda_decode_args> {
  using A = kda_decode_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands), KDA_GROUP(states, StatesGroup::operands),
             std::array{KDA_T(o, "[B,T,HV,V]", kFloats).out().from(" like v")},
             trailing(std::array{KDA_T(out_state_indices, "[N]", kIndices).maybe().strided().need("a pool hT")}),
             trailing(KDA_GROUP(conv, ConvGroup::operands(Role::kInOut))),
             trailing(std::array{
                 KDA_T(snapshots, "[N,S,HV,V,K]", kStates).out().maybe().apart().be("h0"),
                 KDA_T(snapshot_slots, "[N,S]", kIndices).maybe().apart(),
                 KDA_T(accepted, "[N]", kIndices).maybe().strided(),
             }),
             trailing(KDA_GROUP(norm, NormGroup::operands)));
};

template <>
struct Table<kda_verify_args> {
  using A = kda_verify_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands), KDA_GROUP(states, StatesGroup::operands),
             KDA_GROUP(conv, ConvGroup::operands(Role::kIn)),
             std::array{KDA_T(o, "[B,T,HV,V]", kFloats).out().from(" like v")},
             KDA_GROUP(records, RecordsGroup::operands(Role::kOut, Role::kIn)),
             std::array{KDA_T(parents, "[N,T]", kIndices).maybe().apart().size(1)},
             trailing(KDA_GROUP(norm, NormGroup::operands)));
};

template <>
struct Table<kda_flush_args> {
  using A = kda_flush_args;
  static constexpr auto operands = joined(
      std::array{
          KDA_T(state, "[slots,HV,V,K]", kStates).in_out().layers(),
          KDA_T(state_indices, "[N]", kIndices).maybe().strided(),
      },
      KDA_GROUP(records, RecordsGroup::operands(Role::kIn, Role::kIn)),
      std::array{
          KDA_T(accept_len, "[N]", kIndices).strided(),
          KDA_T(parents, "[N,T]", kIndices).maybe().apart().size(1),
          KDA_T(conv_x, "[N,T,D]", kFloats).maybe().layers().size(1),
          KDA_T(conv_state, "[slots,D,W-1]", kFloats)
              .in_out()
              .strided()
              .layers()
              .together("conv_x")
              .from(" ([slots,D,W-1], D like conv_x)"),
          KDA_T(conv_indices, "[N]", kIndices).maybe().strided().need("conv_x"),
          KDA_INT(state_layout).range(KDA_STATE_V_FIRST, KDA_STATE_K_FIRST),
          KDA_INT(first_valid_slot).range(0, INT32_MAX),
      });
};

template <>
struct Table<kda_flush_verify_args> {
  using A = kda_flush_verify_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands), KDA_GROUP(states, StatesGroup::operands),
             KDA_GROUP(conv, ConvGroup::operands(Role::kInOut)),
             std::array{KDA_T(o, "[B,T,HV,V]", kFloats).out().from(" like v")}, KDA_GROUP(last, RecordsGroup::last()),
             std::array{
                 KDA_T(accept_len, "[N]", kIndices).strided(),
                 KDA_T(last_parents, "[N,T']", kIndices).maybe().apart(),
                 KDA_T(last_conv_x, "[N,T',D]", kFloats)
                     .together("conv.x")
                     .like_dtype("conv.x")
                     .from(" ([N,T,D], D like conv.x)"),
             },
             KDA_GROUP(records, RecordsGroup::operands(Role::kOut, Role::kOut)),
             std::array{
                 KDA_T(parents, "[N,T]", kIndices).maybe().apart().size(1),
                 KDA_INT(max_tokens),
                 KDA_RESERVED("args.reserved"),
             },
             trailing(KDA_GROUP(norm, NormGroup::operands)));
};

template <>
struct Table<kda_segment_map_args> {
  using A = kda_segment_map_args;
  static constexpr auto operands =
      joined(KDA_GROUP(in, InputsGroup::operands), std::array{
                                                       KDA_T(d_o, "[B,T,HV,V]", kFloats).together("d").from(" like v"),
                                                       KDA_T(M, "[N,HV,K,K]", kSingles).out().maybe(),
                                                       KDA_T(b, "[N,HV,V,K]", kSingles).out().maybe(),
                                                       KDA_T(d, "[N,HV,V,K]", kSingles).out().maybe(),
                                                   });
};

template <>
struct Table<kda_segment_merge_args> {
  using A = kda_segment_merge_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(M, "[P,HV,K,K]", kSingles),
      KDA_T(b, "[P,HV,V,K]", kSingles),
      KDA_T(h0, "[HV,V,K]", kStates).maybe(),
      KDA_T(states, "[P+1,HV,V,K]", kSingles).out(),
      KDA_INT(state_layout).range(KDA_STATE_V_FIRST, KDA_STATE_K_FIRST),
      KDA_FLAG(reverse).range(0, 1),
  });
};

template <>
struct Table<kda_gate_args> {
  using A = kda_gate_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(x, "[M,HV,K]", kFloats),
      KDA_T(A_log, "[HV]", kSingles).maybe().from(" ([HV] of x)"),
      KDA_T(dt_bias, "[HV,K]", kSingles).maybe().from(" ([HV,K] of x)"),
      KDA_T(g, "[M,HV,K]", kFloats).out().from(" like x"),
      KDA_INT(gate_form).range(KDA_GATE_SOFTPLUS, kLastGateForm),
      KDA_FLOAT(lower_bound),
  });
};

template <>
struct Table<kda_gate_backward_args> {
  using A = kda_gate_backward_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(x, "[M,HV,K]", kFloats),
      KDA_T(A_log, "[HV]", kSingles).maybe().from(" ([HV] of x)"),
      KDA_T(dt_bias, "[HV,K]", kSingles).maybe().from(" ([HV,K] of x)"),
      KDA_T(dg, "[M,HV,K]", kFloats).from(" like x"),
      KDA_T(dx, "[M,HV,K]", kFloats).out().from(" like x"),
      KDA_T(dA_log, "[HV]", kSingles).out().maybe().need("A_log"),
      KDA_T(d_dt_bias, "[HV,K]", kSingles).out().maybe().need("dt_bias"),
      KDA_INT(gate_form).range(KDA_GATE_SOFTPLUS, kLastGateForm),
      KDA_FLOAT(lower_bound),
  });
};

template <>
struct Table<kda_norm_gate_args> {
  using A = kda_norm_gate_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(x, "[B,T,HV,V]", kFloats),
      KDA_T(gate, "[B,T,HV,V]", kFloats).maybe().from(" like x"),
      KDA_T(weight, "[V]", kFloats).maybe().from(" ([V] of x)"),
      KDA_T(y, "[B,T,HV,V]", kFloats).out().from(" like x").be("x", "gate"),
      KDA_DOUBLE(eps),
      KDA_INT(activation).range(KDA_NORM_NONE, KDA_NORM_SILU),
      KDA_RESERVED("args.reserved"),
  });
};

template <>
struct Table<kda_norm_gate_backward_args> {
  using A = kda_norm_gate_backward_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(x, "[B,T,HV,V]", kFloats),
      KDA_T(gate, "[B,T,HV,V]", kFloats).maybe().from(" like x"),
      KDA_T(weight, "[V]", kFloats).maybe().from(" ([V] of x)"),
      KDA_T(dy, "[B,T,HV,V]", kFloats).from(" like x"),
      KDA_T(dx, "[B,T,HV,V]", kFloats).out().maybe().from(" like x"),
      KDA_T(dgate, "[B,T,HV,V]", kFloats).out().maybe().need("gate").from(" like gate"),
      KDA_T(dweight, "[V]", kSingles).out().maybe().need("weight").from(" ([V] of x)"),
      KDA_DOUBLE(eps),
      KDA_INT(activation).range(KDA_NORM_NONE, KDA_NORM_SILU),
      KDA_RESERVED("args.reserved"),
  });
};

template <>
struct Table<kda_conv_args> {
  using A = kda_conv_args;
  static constexpr auto operands = joined(
      std::array{
          KDA_T(x, "[B,T,D]", kFloats).size(2),
          KDA_T(weight, "[D,W]", kFloats).from(" ([D,W], D like x)", " ([D,W], D of x, x1 and x2)"),
          KDA_T(bias, "[D]", kFloats).maybe().from(" ([D] of x)"),
          KDA_T(cu_seqlens, "[N+1]", kIndices).maybe(),
          KDA_T(initial_state, "[N,D,W-1]", kFloats).maybe().strided().size(0, Size::kRead),
          KDA_T(final_state, "[N,D,W-1]", kFloats).out().maybe().strided().size(0, Size::kWritten).be("initial_state"),
          KDA_T(state_indices, "[N]", kIndices).maybe().strided(),
          KDA_T(has_initial_state, "[N]", bit(KDA_BOOL)).maybe().strided().need("initial_state"),
          KDA_T(y, "[B,T,D]", kFloats).out().like_dtype_or_f64("x").from(" like x", " like x, x1 and x2"),
          KDA_FLAG(silu),
          KDA_INT(first_valid_slot).range(0, INT32_MAX),
          KDA_RESERVED("args.reserved"),
      },
      trailing(std::array{
          KDA_T(out_state_indices, "[N]", kIndices).maybe().strided().need("a pool final_state"),
          KDA_T(checkpoints, "[slots,D,W-1]", kFloats).out().maybe().strided().be("initial_state", "final_state"),
          KDA_T(checkpoint_slots, "[N,M]", kIndices).together("checkpoints").apart(),
          KDA_T(checkpoint_offset, "[N]", kIndices).maybe().strided(),
          KDA_INT(checkpoint_every),
          KDA_T(x1, "[B,T,D1]", kFloats).maybe().like_dtype("x").from(" (B and T of x)"),
          KDA_T(x2, "[B,T,D2]", kFloats).maybe().like_dtype("x").need("x1").from(" (B and T of x)"),
      }));
};

template <>
struct Table<kda_conv_backward_args> {
  using A = kda_conv_backward_args;
  static constexpr auto operands = joined(
      std::array{
          KDA_T(x, "[B,T,D]", kFloats).size(2),
          KDA_T(weight, "[D,W]", kFloats).from(" ([D,W], D like x)", " ([D,W], D of x, x1 and x2)"),
          KDA_T(bias, "[D]", kFloats).maybe().from(" ([D] of x)"),
          KDA_T(cu_seqlens, "[N+1]", kIndices).maybe(),
          KDA_T(initial_state, "[N,D,W-1]", kFloats).maybe().strided(),
          KDA_T(dy, "[B,T,D]", kFloats).like_dtype_or_f64("x").from(" like x", " like x, x1 and x2"),
          KDA_T(d_final_state, "[N,D,W-1]", kFloats).maybe().strided(),
          KDA_T(dx, "[B,T,D]", kFloats).out().maybe().like_dtype_or_f64("x").from(" like x", " like x, x1 and x2"),
          KDA_T(dweight, "[D,W]", kSingles).out().maybe().from(" like weight"),
          KDA_T(dbias, "[D]", kSingles).out().maybe().need("bias").from(" like bias"),
          KDA_T(d_initial_state, "[N,D,W-1]", kFloats).out().maybe().strided(),
          KDA_FLAG(silu),
          KDA_RESERVED("args.reserved"),
      },
      trailing(std::array{
          KDA_T(x1, "[B,T,D1]", kFloats).maybe().like_dtype("x").from(" (B and T of x)"),
          KDA_T(x2, "[B,T,D2]", kFloats).maybe().like_dtype("x").need("x1").from(" (B and T of x)"),
      }));
};

template <>
struct Table<kda_prefill_f32_args> {
  using A = kda_prefill_f32_args;
  static constexpr auto operands = joined(std::array{
      KDA_T(q, "[B,H,T,K]", kSingles).from(""),
      KDA_T(k, "[B,H,T,K]", kSingles).from(" like q"),
      KDA_T(v, "[B,HV,T,V]", kSingles).from(" ([B,T] like q)"),
      KDA_T(g, "[B,HV,T,K]", kSingles).from(" ([B,HV,T,K] of q and v)"),
      KDA_T(beta, "[B,HV,T]", kSingles).strided().from(" ([B,HV,T] of q and v)"),
      KDA_T(h0, "[B,HV,V,K]", kSingles).maybe(),
      KDA_T(o, "[B,HV,T,V]", kSingles).out().from(" like v"),
      KDA_T(w, "[B,HV,ceil(T/chunk),chunk,K]", kSingles).out().maybe(),
      KDA_T(u, "[B,HV,ceil(T/chunk),chunk,V]", kSingles).out().maybe(),
      KDA_T(hT, "[B,HV,V,K]", kSingles).out().maybe().be("h0"),
      KDA_INT(chunk),
      KDA_INT(state_layout).range(KDA_STATE_V_FIRST, KDA_STATE_K_FIRST),
      KDA_FLOAT(scale),
      KDA_RESERVED("args.reserved"),
  });
};

// ---- stages: tables_stages.h ----

// The operands of a call's struct, for code that serves every operator.
template <class Args>
constexpr std::span<const Operand> operands_of() {
  return Table<Args>::operands;
}
// The number of the operand at a member of args, by its offset in 32-bit words.
template <class Args>
constexpr auto kRowAt = [] {
  std::array<uint8_t, sizeof(Args) / sizeof(int32_t)> rows{};
  for (uint8_t i = 0; const Operand& o : operands_of<Args>()) rows[o.offset / sizeof(int32_t)] = i++;
  return rows;
}();

// Where in args the operands are of which `such` is true.
template <class Args, bool (*such)(const Operand&)>
constexpr auto kPlaces = [] {
  std::array<uint16_t, std::ranges::count_if(Table<Args>::operands, such)> all{};
  for (size_t i = 0; const Operand& o : Table<Args>::operands)
    if (such(o)) all[i++] = o.offset;
  return all;
}();

constexpr bool may_be_f64(const Operand& o) { return o.tensor() && o.dtypes & bit(KDA_F64); }
// (Lengths, [N+1], are none.)
constexpr bool is_index(const Operand& o) { return o.tensor() && o.dtypes == kIndices && !o.shape[0].plus; }

// Does any tensor of the call hold float64?
template <class Args>
bool any_f64(const Args& args) {
  const auto& places = kPlaces<Args, may_be_f64>;
  return std::any_of(places.begin(), places.end(), [&](uint16_t place) {
    const auto& t = *reinterpret_cast<const kda_tensor*>(reinterpret_cast<const char*>(&args) + place);
    return t.ndim > 0 && t.dtype == KDA_F64;
  });
}

inline kda_tensor& tensor_of(void* args, const Operand& o) {
  return *reinterpret_cast<kda_tensor*>(static_cast<char*>(args) + o.offset);
}
inline const kda_tensor& tensor_of(const void* args, const Operand& o) {
  return *reinterpret_cast<const kda_tensor*>(static_cast<const char*>(args) + o.offset);
}
inline const kda_tensor& tensor_of(const void* args, uint16_t offset) {
  return *reinterpret_cast<const kda_tensor*>(static_cast<const char*>(args) + offset);
}

}  // namespace kda
