// Decode of tokens that lie one after another, as serving engines keep them. kda_decode takes views [N,T,..] of them.
// They are made here, in nanoseconds: made by torch they take 1 to 2 us each, and a call needs up to ten.
#pragma once
#include <kda/kda.h>

#include <string>
#include <tuple>

#include "_reader.h"
#include "contract/dtype.h"

namespace kda::binding {

inline std::string shape_text(const int64_t* shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}
inline std::string shape_text(const kda_tensor& t) { return shape_text(t.shape, t.ndim); }

inline void add_dimension(kda_tensor& t, int64_t size, int64_t stride) {
  t.shape[t.ndim] = size, t.stride[t.ndim] = stride;
  ++t.ndim;
}

// The first `count` dimensions of a tensor as one.
struct Merged {
  int64_t size = 1, stride = 0;
  bool regular = true;  // one stride steps through all of them

  Merged(const kda_tensor& t, int count) {
    for (int i = count; i-- > 0;) {
      if (size == 1) stride = t.stride[i];
      regular &= t.shape[i] == 1 || t.stride[i] == size * stride;
      size *= t.shape[i];
    }
  }
};

// The tokens of N requests, T of each: the first N * T rows of a tensor, which may have more.
struct TokenRows {
  int64_t N, T;

  // Makes [N,T,..] of a tensor whose first dimensions, in whatever shape, are its rows.
  void split(const char* name, kda_tensor& t, int leading) const {
    const kda_tensor given = t;
    const Merged rows(given, leading);
    if (rows.size < N * T)
      value_error(std::string(name) + ": expected " + std::to_string(N * T) + " rows of tokens, got " +
                  shape_text(given));
    if (!rows.regular)
      value_error(std::string(name) + ": expected rows that lie equally far apart, got strides " +
                  shape_text(given.stride, given.ndim) + " of " + shape_text(given));
    t.ndim = 0;
    add_dimension(t, N, T * rows.stride), add_dimension(t, T, rows.stride);
    for (int i = leading; i < given.ndim; ++i) add_dimension(t, given.shape[i], given.stride[i]);
  }
  // A row is `size` numbers.
  void numbers(const char* name, kda_tensor& t, int64_t size) const {
    if (t.ndim == 0) return;  // absent
    if (t.ndim < 2 || t.shape[t.ndim - 1] != size)
      value_error(std::string(name) + ": expected rows of " + std::to_string(size) + ", got " + shape_text(t));
    split(name, t, t.ndim - 1);
  }
  // A row is heads of `size` numbers, in two dimensions or in one.
  void heads(const char* name, kda_tensor& t, int64_t heads, int64_t size) const {
    if (t.ndim == 0) return;
    const int last = t.ndim - 1;
    if (last > 1 && t.shape[last - 1] == heads && t.shape[last] == size) return split(name, t, last - 1);
    if (last < 1 || t.shape[last] != heads * size || t.stride[last] != 1 || t.ndim == KDA_MAX_NDIM)
      value_error(std::string(name) + ": expected rows of " + std::to_string(heads) + " heads of " +
                  std::to_string(size) + ", got " + shape_text(t));
    t.shape[last] = heads, t.stride[last] = size;
    add_dimension(t, size, 1);
    split(name, t, last);
  }
  // A table with a row for each request, or for more.
  void requests(kda_tensor& t) const {
    if (t.ndim && t.shape[0] > N) t.shape[0] = N;
  }
};

// Rows of q, k and v one behind another, given as q alone: H*K, H*K and HV*V numbers.
inline void split_joint(kda_inputs& in, int64_t HV, int64_t K, int64_t V) {
  kda_tensor& rows = in.q;
  const int last = rows.ndim - 1;
  const int64_t keys = rows.shape[last] - HV * V, H = K ? keys / (2 * K) : 0;
  if (last < 1 || H < 1 || keys != 2 * H * K || rows.stride[last] != 1 || rows.ndim == KDA_MAX_NDIM)
    value_error("q: expected rows of 2 * H * " + std::to_string(K) + " + " + std::to_string(HV * V) + ", got " +
                shape_text(rows));
  char* next = static_cast<char*>(rows.data);
  rows.ndim = last;
  in.k = in.v = rows;
  for (const auto& [part, heads, size] : {std::tuple{&in.q, H, K}, {&in.k, H, K}, {&in.v, HV, V}}) {
    part->data = next;
    add_dimension(*part, heads, size), add_dimension(*part, size, 1);
    if (next) next += heads * size * dtype_size(part->dtype);
  }
}

// Parameters of the gate: [HV], or [HV,K] of which the dimensions may be one; dimensions of 1 count for nothing. The
// library refuses other shapes.
inline void flatten(kda_tensor& t, int64_t HV) {
  const Merged all(t, t.ndim);
  if (t.ndim == 0 || !all.regular || all.size != HV) return;
  t.ndim = 0;
  add_dimension(t, HV, all.stride);
}
inline void flatten(kda_tensor& t, int64_t HV, int64_t K) {
  kda_tensor found = t;
  found.ndim = 0;
  for (int i = 0; i < t.ndim; ++i)
    if (t.shape[i] != 1) add_dimension(found, t.shape[i], t.stride[i]);
  const bool flat = found.ndim < 2 && (found.ndim ? found.shape[0] : 1) == HV * K;
  if (t.ndim == 0 || (!flat && (found.ndim != 2 || found.shape[0] != HV || found.shape[1] != K))) return;
  if (flat) {
    const int64_t stride = found.ndim ? found.stride[0] : 1;
    found.ndim = 0;
    add_dimension(found, HV, K * stride), add_dimension(found, K, stride);
  }
  t = found;
}

// States [rows,S,HV,V,K] as a pool [slots,HV,V,K], in which token t of a row is slot stride[0] / stride[1] * row + t.
inline void as_pool(kda_tensor& t) {
  if (t.ndim != 5) return;
  if (t.stride[1] <= 0 || t.stride[0] % t.stride[1] != 0)
    value_error("snapshots: expected rows that lie apart by a multiple of a state, got strides " +
                std::to_string(t.stride[0]) + " and " + std::to_string(t.stride[1]));
  kda_tensor pool = t;
  pool.ndim = 0;
  const int64_t rows = t.shape[0], apart = t.stride[0] / t.stride[1];
  add_dimension(pool, rows == 0 ? 0 : (rows - 1) * apart + t.shape[1], t.stride[1]);
  for (int i = 2; i < 5; ++i) add_dimension(pool, t.shape[i], t.stride[i]);
  t = pool;
}

// The convolution in front: its weight [D,1,W] as [D,W], and rows of D numbers.
inline void take_rows(kda_conv_inputs& conv, const TokenRows& rows) {
  kda_tensor& w = conv.weight;
  if (w.ndim == 3 && w.shape[1] == 1) w.shape[1] = w.shape[2], w.stride[1] = w.stride[2], w.ndim = 2;
  if (w.ndim) rows.numbers("x", conv.x, w.shape[0]);
  rows.requests(conv.indices);
}

inline void take_rows(kda_decode_args& a, int64_t N, int64_t T) {
  const kda_tensor& pool = a.states.h0;
  if (pool.ndim != 4) value_error("state: expected a pool of states, got " + shape_text(pool));
  const bool v_first = a.in.state_layout == KDA_STATE_V_FIRST;
  const int64_t HV = pool.shape[1], V = pool.shape[v_first ? 2 : 3], K = pool.shape[v_first ? 3 : 2];
  const TokenRows rows{N, T};
  kda_inputs& in = a.in;
  if (in.q.ndim && !in.k.ndim && !in.v.ndim) split_joint(in, HV, K, V);
  const int64_t H = in.q.ndim > 1 ? in.q.shape[in.q.ndim - 2] : 0;
  rows.heads("q", in.q, H, K), rows.heads("k", in.k, H, K), rows.heads("v", in.v, HV, V);
  rows.heads("g", in.g, HV, K), rows.numbers("beta", in.beta, HV), rows.heads("out", a.o, HV, V);
  flatten(in.A_log, HV), flatten(in.dt_bias, HV, K);
  kda_tensor& slots = a.states.state_indices;
  // Those of snapshots, too: the state of a request is in its first.
  if (slots.ndim == 2 && slots.shape[1] > 0 && a.snapshot_slots.ndim) slots.ndim = 1;
  rows.requests(slots), rows.requests(a.accepted), rows.requests(a.snapshot_slots);
  as_pool(a.snapshots);
  take_rows(a.conv, rows);
  rows.heads("gate", a.norm.gate, HV, V);
}

}  // namespace kda::binding
