#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

// Chunk scores of kda_forward_args, straight from their definition.
void store_scores(const Head& x, const ForwardProblem& p, const Sequence& s, int64_t hv, int64_t first, int64_t rows) {
  const kda_forward_args& a = p.args;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < kChunk; ++j) {
      double qk = 0, kk = 0;
      for (int64_t c = 0; j <= i && c < x.K; ++c) {
        double decay = 0;
        for (int64_t t = j + 1; t <= i; ++t) decay += x.g[(first + t) * x.K + c];
        const double kj = x.k[(first + j) * x.K + c] * std::exp(decay);
        qk += x.q[(first + i) * x.K + c] * kj;
        kk += x.k[(first + i) * x.K + c] * kj;
      }
      const int64_t t = s.t0 + first + i;
      if (present(a.Aqk)) set(a.Aqk, x.scale * qk, s.b, t, hv, j);
      if (present(a.Akk)) set(a.Akk, j < i ? x.beta[first + i] * kk : 0, s.b, t, hv, j);
    }
}

void run_head(const ForwardProblem& p, const Sequence& s, int64_t hv, int64_t first_h) {
  const kda_forward_args& a = p.args;
  const int32_t layout = a.in.state_layout;
  const Head x(p, a.in, s, hv);
  Vector S = load_state(p, a.states.h0, layout, s.slot, hv, s.initial), u(p.V), o(p.V);
  for (int64_t t = 0; t < s.length; ++t) {
    if (t % kChunk == 0) {
      if (present(a.h) && t % (kChunk * a.h_every) == 0)
        store_state(p, S, a.h, h_layout(a), first_h + t / (kChunk * a.h_every), hv);
      if (present(a.Aqk) || present(a.Akk)) store_scores(x, p, s, hv, t, std::min(kChunk, s.length - t));
    }
    x.step(t, S.data(), u.data(), o.data());
    for (int64_t v = 0; v < p.V; ++v) {
      set(a.o, o[v], s.b, s.t0 + t, hv, v);
      if (present(a.v_new)) set(a.v_new, u[v], s.b, s.t0 + t, hv, v);
    }
    const int64_t kept = present(a.checkpoints) ? checkpoint_row(a, s.n, t + 1) : -1;
    if (kept >= 0) store_state(p, S, a.checkpoints, layout, kept, hv);
  }
  const int64_t row = present(a.states.hT) ? final_row(a.out_state_indices, a.states, s) : -1;
  if (row >= 0) store_state(p, S, a.states.hT, layout, row, hv);
}

}  // namespace

void forward(const ForwardProblem& p) {
  int64_t first_h = 0, end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, p.args.in, p.args.states, n);
    if (!s.live) zero_rows(p.args.o, s.b, s.t0, s.length);
    for (int64_t hv = 0; s.live && hv < p.HV; ++hv) run_head(p, s, hv, first_h);
    first_h += h_rows(s.length, p.args.h_every);
    end = s.t0 + s.length;
  }
  if (p.varlen) zero_rows(p.args.o, 0, end, p.T - end);
}

void decode(const DecodeProblem& p) {
  const kda_decode_args& a = p.args;
  const int32_t layout = a.in.state_layout;
  const Convolved in(a.in, a.conv, {});
  int64_t end = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence_at(p, n);
    end = s.t0 + s.length;
    if (!s.live) zero_rows(a.o, s.b, s.t0, s.length);
    const Start start = start_of(p, s);
    const Snapshots snapshots = snapshots_of(p, n);
    std::vector<Vector> before;  // of every head, before any state is written: start and snapshots may share slots
    for (int64_t hv = 0; s.live && hv < p.HV; ++hv)
      before.push_back(load_state(p, start.states, layout, start.row, hv, start.initial));
    for (int64_t hv = 0; s.live && hv < p.HV; ++hv) {
      const Head x(p, in.inputs, s, hv);
      Vector S = before[hv], o(p.V);
      for (int64_t t = 0; t < s.length; ++t) {
        x.step(t, S.data(), nullptr, o.data());
        for (int64_t v = 0; v < p.V; ++v) set(a.o, o[v], s.b, s.t0 + t, hv, v);
        const int64_t row = present(snapshots.states) ? snapshots.row(t) : -1;
        if (row >= 0) store_state(p, S, snapshots.states, layout, row, hv);
      }
      const int64_t last = present(a.states.hT) ? final_row(a.out_state_indices, a.states, s) : -1;
      if (last >= 0) store_state(p, S, a.states.hT, layout, last, hv);
    }
    if (s.live) conv_roll(a.conv.x, a.conv.state, slot_of(a.conv.indices, n), n, s, {}, s.length);
  }
  if (p.varlen) zero_rows(a.o, 0, end, p.T - end);
}

void gate(const GateProblem& p) {
  const kda_gate_args& a = p.args;
  const Gate gate{form_of(a), a.lower_bound};
  for (int64_t m = 0; m < a.x.shape[0]; ++m)
    for (int64_t hv = 0; hv < a.x.shape[1]; ++hv)
      for (int64_t k = 0; k < a.x.shape[2]; ++k)
        set(a.g, gate(get_A_log(a.A_log, hv), get(a.x, m, hv, k) + (present(a.dt_bias) ? get(a.dt_bias, hv, k) : 0)), m,
            hv, k);
}

}  // namespace kda::reference
