// The causal convolution (math.md 7.6): xx = state ++ x, y_t = bias + sum_j w_j xx_(t+j), z = y sigmoid(y).
#include "contract/drafts.h"
#include "reference/math.h"
#include "reference/reference.h"

namespace kda::reference {
namespace {

struct Span {
  int64_t b, t0, length;
};
Span span_of(const kda_tensor& x, const kda_tensor& cu_seqlens, int64_t n) {
  if (!present(cu_seqlens)) return {n, 0, x.shape[1]};
  const int64_t t0 = int_at(cu_seqlens, n);
  return {0, t0, int_at(cu_seqlens, n + 1) - t0};
}

// Channel c of x, x1 and x2: which tensor has it, and where.
template <class Args>
std::pair<const kda_tensor&, int64_t> place_of(const Args& a, int64_t c) {
  for (const kda_tensor* x : {&a.x, &a.x1}) {
    if (c < x->shape[2]) return {*x, c};
    c -= x->shape[2];
  }
  return {a.x2, c};
}

// Channel c of a sequence, with its state in front.
template <class Args>
Vector inputs(const Args& a, const Span& s, int64_t c, const kda_tensor& state, int64_t slot, int64_t keep) {
  const auto [x, channel] = place_of(a, c);
  Vector xx;
  for (int64_t i = 0; i < keep; ++i) xx.push_back(present(state) ? get(state, slot, c, i) : 0);
  for (int64_t t = 0; t < s.length; ++t) xx.push_back(get(x, s.b, s.t0 + t, channel));
  return xx;
}

double convolved(const Vector& xx, int64_t t, int64_t c, const kda_tensor& weight, const kda_tensor& bias) {
  double y = present(bias) ? get(bias, c) : 0;
  for (int64_t j = 0; j < weight.shape[1]; ++j) y += get(weight, c, j) * xx[t + j];
  return y;
}

void zero_rest(const kda_tensor& t, const kda_tensor& cu_seqlens, int64_t N) {
  if (!present(cu_seqlens)) return;
  const int64_t end = int_at(cu_seqlens, N);
  zero_rows(t, 0, end, t.shape[1] - end);
}

}  // namespace

void conv(const ConvProblem& p) {
  const kda_conv_args& a = p.args;
  for (int64_t n = 0; n < p.N; ++n) {
    const Span s = span_of(a.x, a.cu_seqlens, n);
    const int64_t slot = present(a.state_indices) ? int_at(a.state_indices, n) : n;
    if (present(a.state_indices) && slot < a.first_valid_slot) {
      zero_rows(a.y, s.b, s.t0, s.length);
      continue;
    }
    const bool initial = !present(a.has_initial_state) || int_at(a.has_initial_state, n);
    const int64_t out = present(a.final_state) ? final_row(index_of(a.out_state_indices), a.first_valid_slot,
                                                           a.final_state.shape[0], n, slot)
                                               : -1;
    for (int64_t c = 0; c < p.D; ++c) {
      const Vector xx = inputs(a, s, c, initial ? a.initial_state : kda_tensor{}, slot, p.W - 1);
      for (int64_t t = 0; t < s.length; ++t) {
        const double y = convolved(xx, t, c, a.weight, a.bias);
        set(a.y, a.silu ? y * sigmoid(y) : y, s.b, s.t0 + t, c);
      }
      const CheckpointPlaces places = checkpoint_places(a.checkpoint_offset, a.checkpoint_every, n);
      for (int64_t m = 0; present(a.checkpoints) && places.place(m) <= s.length; ++m) {
        const int64_t row = checkpoint_row(a.checkpoint_slots, a.first_valid_slot, a.checkpoints.shape[0], n, m);
        for (int64_t i = 0; row >= 0 && i < p.W - 1; ++i) set(a.checkpoints, xx[places.place(m) + i], row, c, i);
      }
      for (int64_t i = 0; out >= 0 && i < p.W - 1; ++i) set(a.final_state, xx[s.length + i], out, c, i);
    }
  }
  zero_rest(a.y, a.cu_seqlens, p.N);
}

void conv_backward(const ConvBackwardProblem& p) {
  const kda_conv_backward_args& a = p.args;
  const int64_t W = p.W, keep = W - 1;
  for (int64_t c = 0; c < p.D; ++c) {
    Vector dw(W);
    double dbias = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const Span s = span_of(a.x, a.cu_seqlens, n);
      const Vector xx = inputs(a, s, c, a.initial_state, n, keep);
      Vector dxx(xx.size());
      for (int64_t i = 0; present(a.d_final_state) && i < keep; ++i) dxx[s.length + i] = get(a.d_final_state, n, c, i);
      for (int64_t t = 0; t < s.length; ++t) {
        const double y = convolved(xx, t, c, a.weight, a.bias), sg = sigmoid(y), slope = y * sigmoid_slope(y);
        const double dy = get(a.dy, s.b, s.t0 + t, c) * (a.silu ? sg + slope : 1);
        for (int64_t j = 0; j < W; ++j) {
          dw[j] += dy * xx[t + j];
          dxx[t + j] += dy * get(a.weight, c, j);
        }
        dbias += dy;
      }
      for (int64_t i = 0; present(a.d_initial_state) && i < keep; ++i) set(a.d_initial_state, dxx[i], n, c, i);
      for (int64_t t = 0; present(a.dx) && t < s.length; ++t) set(a.dx, dxx[keep + t], s.b, s.t0 + t, c);
    }
    for (int64_t j = 0; present(a.dweight) && j < W; ++j) set(a.dweight, dw[j], c, j);
    if (present(a.dbias)) set(a.dbias, dbias, c);
  }
  if (present(a.dx)) zero_rest(a.dx, a.cu_seqlens, p.N);
}

// Channel c of the rows that a token's taps read, newest first: the token, its ancestors, then the state from its end.
Vector taps(const kda_tensor& x, const Sequence& s, const Window& window, int64_t t, int64_t c, const kda_tensor& state,
            int64_t slot, int64_t count) {
  Vector xx;
  for (; t >= 0 && std::ssize(xx) < count; t = window.parent(t)) xx.push_back(get(x, s.b, s.t0 + t, c));
  const bool stored = present(state) && slot >= 0 && slot < state.shape[0];
  for (int64_t i = (present(state) ? state.shape[2] : 0) - 1; std::ssize(xx) < count; --i)
    xx.push_back(stored && i >= 0 ? get(state, slot, c, i) : 0);
  return xx;
}

Window chain_or_tree(const kda_tensor& parents, int64_t n) {
  Window w;
  w.parents = index_rows(parents).row(n);
  return w;
}

Convolved::Convolved(const kda_inputs& in, const kda_conv_inputs& conv, const kda_tensor& parents) : inputs(in) {
  if (!present(conv.x)) return;
  const int64_t B = conv.x.shape[0], T = conv.x.shape[1], D = conv.x.shape[2], W = conv.weight.shape[1];
  rows.assign(B * T * D * dtype_size(conv.x.dtype), 0);
  const kda_tensor z{rows.data(), conv.x.dtype, 3, {B, T, D}, {T * D, D, 1}};
  const int64_t N = present(in.cu_seqlens) ? in.cu_seqlens.shape[0] - 1 : B;
  for (int64_t n = 0; n < N; ++n) {
    const Span span = span_of(conv.x, in.cu_seqlens, n);
    const Sequence s{n, span.b, span.t0, span.length, n, true, true};
    const Window window = chain_or_tree(parents, n);
    for (int64_t t = 0; t < s.length; ++t)
      for (int64_t c = 0; c < D; ++c) {
        const Vector xx = taps(conv.x, s, window, t, c, conv.state, slot_of(conv.indices, n), W);
        double y = present(conv.bias) ? get(conv.bias, c) : 0;
        for (int64_t j = 0; j < W; ++j) y += get(conv.weight, c, W - 1 - j) * xx[j];
        set(z, y * sigmoid(y), s.b, s.t0 + t, c);
      }
  }
  slice_convolved(inputs, rows.data());
}

void conv_roll(const kda_tensor& x, const kda_tensor& state, int64_t slot, int64_t n, const Sequence& s,
               const kda_tensor& parents, int64_t m) {
  if (!present(x) || m <= 0 || slot < 0 || slot >= state.shape[0]) return;
  const int64_t keep = state.shape[2];
  for (int64_t c = 0; c < state.shape[1]; ++c) {
    const Vector xx = taps(x, s, chain_or_tree(parents, n), m - 1, c, state, slot, keep);
    for (int64_t i = 0; i < keep; ++i) set(state, xx[keep - 1 - i], slot, c, i);
  }
}

}  // namespace kda::reference
