// The contract of decode.
#include <cstddef>

#include "dtype.h"
#include "validate.h"

namespace kda {
namespace {

// snapshots [slots,HV,V,K] with snapshot_slots [N,S], else [N,S,HV,V,K]; accepted [N].
void check_snapshots(const kda_decode_args& a, const Dims& d, Tensors& tensors) {
  const kda_tensor &snapshots = a.snapshots, &slots = a.snapshot_slots;
  const int64_t tokens = d.varlen ? 0 : d.T;  // packed lengths: validate_data
  if (present(slots)) {
    if (!present(snapshots) && !present(a.accepted))
      invalid("snapshot_slots: expected snapshots or accepted with it, got neither");
    if (slots.ndim != 2 || slots.shape[0] != d.N ||
        slots.shape[1] < std::max<int64_t>(1, present(snapshots) ? tokens : 1))
      invalid("snapshot_slots: expected shape [N,S] with N = ", d.N, " and S at least ", std::max<int64_t>(1, tokens),
              ", got ", shape_text(slots.shape, slots.ndim));
    tensors.check_storage("snapshot_slots", slots, kIndices, false);
  }
  if (present(snapshots)) {
    if (present(slots)) {
      check_state("snapshots", snapshots, rows_of("snapshots", snapshots), d, a.in, tensors, true);
    } else {
      const bool v_first = a.in.state_layout == KDA_STATE_V_FIRST;
      const int64_t S = snapshots.ndim == 5 ? snapshots.shape[1] : 0;
      if (snapshots.ndim != 5 || S < std::max<int64_t>(1, tokens))
        invalid("snapshots: expected shape [N,S,HV,V,K] with S at least ", std::max<int64_t>(1, tokens),
                " without snapshot_slots, got ", shape_text(snapshots.shape, snapshots.ndim));
      tensors.check("snapshots", snapshots, {d.N, S, d.HV, v_first ? d.V : d.K, v_first ? d.K : d.V}, 5, kStates, true,
                    " ([N,S,HV,V,K] in the layout of the states)");
    }
  }
  if (present(a.accepted)) {
    if (!present(slots) && !present(snapshots))
      invalid("accepted: expected snapshots or snapshot_slots with it, got neither");
    if (present(slots) && !present(a.states.h0))
      invalid("accepted: expected the pool h0 with snapshot_slots, got none");
    if (present(a.states.has_initial_state)) invalid("has_initial_state: expected none with accepted, got one");
    tensors.check_any_stride("accepted", a.accepted, {d.N}, 1, kIndices, false, " ([N])");
  }
}

}  // namespace

DecodeProblem validate(const kda_decode_args* raw) {
  kda_decode_args a = copy_args(raw, offsetof(kda_decode_args, out_state_indices));
  check_exec(a.exec);
  Tensors tensors;
  Dims d = check_inputs(a.in, a.conv, a.o, true, tensors);
  for (const auto& [name, t] : {std::pair{"o", &a.o},
                                {"snapshots", &a.snapshots},
                                {"snapshot_slots", &a.snapshot_slots},
                                {"accepted", &a.accepted}})
    check_absent_is_empty(name, *t);
  check_states(a.states, a.out_state_indices, d, a.in, tensors, present(a.snapshot_slots) && present(a.accepted));
  tensors.check("o", a.o, {d.B, d.T, d.HV, d.V}, 4, kFloats, true, " like v");
  check_snapshots(a, d, tensors);
  check_norm(a.norm, a.o, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<DecodeProblem>(d, a);
}

bool has_f64(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  return any_f64(a.in) || any_f64(a.conv) || any_f64({&a.states.h0, &a.states.hT, &a.o, &a.snapshots}) ||
         any_f64(a.norm);
}

void validate_data(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  check_states_data(p, a.in, a.states, a.out_state_indices, !present(a.accepted));
  check_width("accepted", a.accepted);
  check_conv_data(a.conv, a.states);
  const bool slots = present(a.snapshot_slots);
  if (slots)
    check_slots("snapshot_slots", a.snapshot_slots, a.states.first_valid_slot,
                present(a.snapshots) ? a.snapshots.shape[0] : a.states.h0.shape[0]);
  if (slots && present(a.snapshots) && present(a.accepted) && a.states.h0.shape[0] < a.snapshots.shape[0])
    check_slots("snapshot_slots", a.snapshot_slots, a.states.first_valid_slot, a.states.h0.shape[0]);
  if (!p.varlen || !present(a.snapshots)) return;
  const int64_t S = slots ? a.snapshot_slots.shape[1] : a.snapshots.shape[1];
  for (int64_t n = 0; n < p.N; ++n)
    if (const int64_t length = sequence_at(p, a.in, n).length; length > S)
      invalid(slots ? "snapshot_slots" : "snapshots", ": expected S at least ", length, ", the tokens of sequence ", n,
              ", got ", S);
}

}  // namespace kda
