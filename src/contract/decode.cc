// The contract of decode.
#include <cstddef>

#include "contract/rules.h"

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
    tensors.check(slots);
  }
  if (present(snapshots)) {
    const bool pool = present(slots);
    const int64_t S = snapshots.ndim == 5 ? snapshots.shape[1] : 0;
    if (pool && snapshots.ndim != 4) invalid("snapshots: expected 4 dimensions [slots,HV,V,K], got ", snapshots.ndim);
    if (!pool && S < std::max<int64_t>(1, tokens))
      invalid("snapshots: expected shape [N,S,HV,V,K] with S at least ", std::max<int64_t>(1, tokens),
              " without snapshot_slots, got ", shape_text(snapshots.shape, snapshots.ndim));
    const int64_t rows = tensors.k_first ? d.K : d.V, columns = tensors.k_first ? d.V : d.K;
    const Shape shape = pool ? Shape{snapshots.shape[0], d.HV, rows, columns} : Shape{d.N, S, d.HV, rows, columns};
    if (!std::equal(shape.begin(), shape.begin() + snapshots.ndim, snapshots.shape))
      invalid("snapshots: expected shape ", shape_text(shape.data(), snapshots.ndim),
              pool ? tensors.like(tensors.row(&snapshots)) : " ([N,S,HV,V,K] in the layout of the states)", ", got ",
              shape_text(snapshots.shape, snapshots.ndim));
    tensors.check(snapshots);
  }
  if (present(a.accepted)) {
    if (!present(slots) && !present(snapshots))
      invalid("accepted: expected snapshots or snapshot_slots with it, got neither");
    if (present(slots) && !present(a.states.h0))
      invalid("accepted: expected the pool h0 with snapshot_slots, got none");
    if (present(a.states.has_initial_state)) invalid("has_initial_state: expected none with accepted, got one");
    tensors.check(a.accepted);
  }
}

}  // namespace

DecodeProblem validate(const kda_decode_args* raw) {
  kda_decode_args a = copy_args(raw, offsetof(kda_decode_args, out_state_indices));
  Tensors tensors(a);
  Dims d = check_inputs(a.in, a.conv, a.o, tensors);
  tensors.check_form(a.o, a.snapshots, a.snapshot_slots, a.accepted);
  check_states(a.states, &a.out_state_indices, tensors, present(a.snapshot_slots) && present(a.accepted));
  tensors.check(a.o);
  check_snapshots(a, d, tensors);
  check_norm(a.norm, tensors);
  check_memory(tensors, a.exec, d);
  return with_dims<DecodeProblem>(d, a);
}

void validate_data(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  check_cu_seqlens(p, a.in);
  check_states_data(states_of(a.states, &a.out_state_indices), p.N, !present(a.accepted));
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
