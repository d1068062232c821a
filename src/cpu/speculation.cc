// Speculative decoding on the CPU (math.md 7): verify, flush, and both in one pass over the state. Bound by memory: the
// state is read once and, where a flush applies something, written once; tokens and records stay in L1 and L2.
//
// Decays between two tokens are ordered products of alpha in [0, 1]: exact for every gate, and no quotient anywhere.
// Verify, per draft t, walking back from its parent to the oldest committed entry, with x and y the key and query
// decayed to where the walk stands:
//   A[t,i] = x . k_i     P[t,i] = y . k_i     and at its end kG_t = x, qG_t = y
//   u_t = beta_t (v_t - S^T kG_t - sum_i A[t,i] u_i)        o_t = S^T qG_t + sum_i P[t,i] u_i + (q_t . k_t) u_t
// Flush, walking back from the newest accepted token, with f the product of all younger alpha:
//   S <- Diag(f_oldest) S + sum_i (k_i f_i) u_i^T
// The work on the state is cut into strips: V-first rows, K-first columns. Value columns are independent, so neither
// strips nor threads change a bit.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/speculation.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/gemm-inl.h"
// clang-format on

#include "cpu/arena.h"
#include "speculation.h"

#ifndef KDA_CPU_SPECULATION_TYPES
#define KDA_CPU_SPECULATION_TYPES
namespace kda::cpu {
constexpr int64_t kStripRows = 128;     // V-first
constexpr int64_t kConvertedRows = 32;  // V-first, where they pass through scratch: as many as stay in L1
constexpr int64_t kStripColumns = 64;   // K-first
constexpr int64_t kStripWidth = std::max(kStripRows, kStripColumns);
constexpr int64_t kPrefetchRows = 16;  // V-first: how far ahead, 8 KiB at K = 128

// One layer of a call of any of the three operators.
struct SpeculationCall {
  const Dims& d;
  int32_t layout;
  kda_tensor h0, hT;     // hT: absent where the state is only read
  const kda_inputs* in;  // nullptr without verify
  const kda_tensor* o;
  kda_records records;  // verify: absent tensors if nothing is recorded
  kda_records last;     // flush
};
// Sizes of the scratch.
struct SpeculationSizes {
  int64_t K, V, entries, drafts;  // entries: the most that one request can have in its window
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

struct SpeculationScratch {
  // flush
  Matrix w;         // [entries][K]  k_i f_i, newest first
  float* f;         // [K]           product of all alpha
  double* product;  // [K]         the same in f64, in which it is computed
  Matrix u_last;    // [entries][strip]
  // verify, rows of the window: committed entries, then drafts
  Matrix k, alpha;  // [entries + drafts][K]
  Matrix u;         // [entries + drafts][strip]
  // verify, rows of drafts
  Matrix q;          // [drafts][K]
  Matrix kq;         // [2 drafts][K]      kG, then qG
  Matrix xo;         // [2 drafts][strip]  S^T kG, then S^T qG
  Matrix v;          // [drafts][strip]
  Matrix A, P;       // [drafts][entries + drafts]  in the order of the walk back
  float *beta, *qk;  // [drafts]
  float* raw;        // [K]
  float* bias;       // [K]
  Matrix strip;      // [rows][K] or [K][columns]: the state, where it cannot be worked on in place

  SpeculationScratch(Arena arena, const SpeculationSizes& z, uint64_t* bytes) {
    const auto matrix = [&](int64_t rows, int64_t columns) {
      return Matrix{arena.floats(rows * padded(columns)), padded(columns)};
    };
    const int64_t window = z.entries + z.drafts;
    w = matrix(z.entries, z.K), u_last = matrix(z.entries, kStripWidth);
    k = matrix(window, z.K), alpha = matrix(window, z.K), u = matrix(window, kStripWidth);
    q = matrix(z.drafts, z.K), kq = matrix(2 * z.drafts, z.K), xo = matrix(2 * z.drafts, kStripWidth);
    v = matrix(z.drafts, kStripWidth), A = matrix(z.drafts, window), P = matrix(z.drafts, window);
    for (float** p : {&beta, &qk}) *p = arena.floats(kMaxDrafts);
    for (float** p : {&f, &raw, &bias}) *p = arena.floats(padded(z.K));
    product = reinterpret_cast<double*>(arena.floats(2 * padded(z.K)));
    strip = matrix(std::max(kStripRows, z.K), std::max(padded(z.K), kStripColumns));
    if (bytes) *bytes = arena.bytes();
  }
};

uint64_t speculation_scratch_bytes(const SpeculationSizes& sizes) {
  uint64_t bytes;
  SpeculationScratch(Arena(), sizes, &bytes);
  return bytes;
}

// Dot products of rows of the state with 2 kTokens vectors, kG and qG of tokens t ...
template <int kStateRows, int kTokens>
HWY_INLINE void dots(const float* S, int64_t pitch, const SpeculationScratch& x, int64_t drafts, int64_t t, int64_t Kp,
                     int64_t column) {
  constexpr int kSums = 2 * kTokens * kStateRows;
  Vec sum[kPad];  // those beyond kSums fill the last vectors of sums
  for (int i = 0; i < kPad; ++i) sum[i] = hn::Zero(kF32);
  const auto vector = [&](int i) { return (i < kTokens ? t : drafts + t - kTokens) + i; };
  for (int64_t d = 0; d < Kp; d += lanes()) {
    Vec row[kStateRows];
    for (int r = 0; r < kStateRows; ++r) row[r] = load(S + r * pitch + d);
    for (int i = 0; i < 2 * kTokens; ++i) {
      const Vec y = load(x.kq.row(vector(i)) + d);
      for (int r = 0; r < kStateRows; ++r) sum[i * kStateRows + r] = hn::MulAdd(row[r], y, sum[i * kStateRows + r]);
    }
  }
  float sums[kPad];
  for (int64_t i = 0; i < kSums; i += lanes()) sum_lanes_of_all(sum + i, sums + i);
  for (int i = 0; i < 2 * kTokens; ++i)
    std::memcpy(x.xo.row(vector(i)) + column, sums + i * kStateRows, kStateRows * sizeof(float));
}

struct SpeculationTask {
  const SpeculationCall& c;
  const Request& r;
  int64_t hv, v0_of_task;
  const SpeculationScratch& x;
  int64_t flushed = 0;    // entries applied
  int64_t committed = 0;  // entries of the ring before the drafts

  int64_t drafts() const { return r.s.length; }
  int64_t h() const { return hv / c.d.group(); }

  // ---- once per head ----

  // Computes w and f: the accepted keys decayed to the end, and the product of all decays. That product is kept in
  // f64: close to 1, the product of two f32 always rounds down (what is lost is the product of their distances from
  // 1), and thousands of flushes would add up the loss.
  void prepare_flush() {
    const int64_t K = c.d.K;
    for (int64_t i = 0; i < padded(K); ++i) x.f[i] = 1, x.product[i] = 1;
    for (int64_t w = r.newest; w >= 0; w = r.flush.before(w), ++flushed) {
      const int64_t e = r.flush.entry(w);
      float* key = x.w.row(flushed);
      load_row(KDA_F32, at(c.last.k, r.last_slot, e, h()), K, key);
      load_row(KDA_F32, at(c.last.alpha, r.last_slot, e, hv), K, x.raw);
      for (int64_t i = 0; i < padded(K); i += lanes()) store(hn::Mul(load(key + i), load(x.f + i)), key + i);
      for (int64_t i = 0; i < padded(K); ++i) x.f[i] = static_cast<float>(x.product[i] *= x.raw[i]);
    }
  }

  // Prefetches what follows a row of inputs: the row of the next head, which is most likely this thread's next task.
  HWY_INLINE void prefetch_next(const kda_tensor& t, const char* row) const {
    const int64_t bytes = t.shape[3] * dtype_size(t.dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + bytes + i);
  }

  // Loads the window's keys and decays and the drafts' activated inputs, and computes A, P, kG and qG.
  void prepare_verify() {
    const kda_inputs& in = *c.in;
    const int64_t K = c.d.K, Kp = padded(K), L = drafts();
    const Gate gate = head_gate(in.gate_form, in.lower_bound, in.A_log, in.dt_bias, hv, K, x.bias);
    committed = r.slot >= 0 ? r.verify.committed : 0;
    for (int64_t w = 0; w < committed; ++w) {
      const int64_t e = r.verify.entry(w);
      load_row(KDA_F32, at(c.records.k, r.slot, e, h()), K, x.k.row(w));
      load_row(KDA_F32, at(c.records.alpha, r.slot, e, hv), K, x.alpha.row(w));
    }
    for (int64_t t = 0; t < L; ++t) {
      const int64_t token = r.s.t0 + t;
      float *q = x.q.row(t), *k = x.k.row(committed + t), *alpha = x.alpha.row(committed + t);
      if (L > 1) {  // the rows of a single token arrive without it
        for (const kda_tensor* input : {&in.q, &in.k}) prefetch_next(*input, at(*input, r.s.b, token, h()));
        for (const kda_tensor* input : {&in.g, &in.v}) prefetch_next(*input, at(*input, r.s.b, token, hv));
      }
      load_row(in.q.dtype, at(in.q, r.s.b, token, h()), K, q);
      load_row(in.k.dtype, at(in.k, r.s.b, token, h()), K, k);
      load_row(in.g.dtype, at(in.g, r.s.b, token, hv), K, alpha);
      normalise_row(q, K, in.qk_l2norm, in.scale);
      normalise_row(k, K, in.qk_l2norm, 1);
      decay_row(gate, alpha, K);
      x.beta[t] = activate_beta(in.beta_form, load_scalar(in.beta.dtype, at(in.beta, r.s.b, token, hv)));
      x.qk[t] = dot(q, k, Kp);
      walk(t);
    }
  }

  // The row of the window before row w, or -1. Rows are those of r.verify, or of drafts alone if this request has no
  // records.
  int64_t before(int64_t w) const {
    if (w < committed) return w - 1;
    const int64_t p = r.verify.parent(w - committed);
    return p < 0 ? committed - 1 : committed + p;
  }

  HWY_INLINE void walk(int64_t t) {
    const int64_t Kp = padded(c.d.K);
    float *kG = x.kq.row(t), *qG = x.kq.row(drafts() + t), *A = x.A.row(t), *P = x.P.row(t);
    const float *k = x.k.row(committed + t), *q = x.q.row(t), *decay = x.alpha.row(committed + t);
    for (int64_t w = before(committed + t);; w = before(w)) {
      const float* key = w < 0 ? nullptr : x.k.row(w);
      Vec a = hn::Zero(kF32), p = a;
      for (int64_t d = 0; d < Kp; d += lanes()) {
        const Vec alpha = load(decay + d), kd = hn::Mul(load(k + d), alpha), qd = hn::Mul(load(q + d), alpha);
        store(kd, kG + d), store(qd, qG + d);
        if (!key) continue;
        a = hn::MulAdd(kd, load(key + d), a);
        p = hn::MulAdd(qd, load(key + d), p);
      }
      if (!key) return;
      *A++ = sum_lanes(a), *P++ = sum_lanes(p);
      k = kG, q = qG, decay = x.alpha.row(w);
    }
  }

  void record_keys() {
    for (int64_t t = 0; t < drafts(); ++t) {
      const int64_t e = r.verify.entry(r.verify.token(t));
      store_row(KDA_F32, x.alpha.row(committed + t), c.d.K, at(c.records.alpha, r.slot, e, hv));
      if (hv % c.d.group() == 0) store_row(KDA_F32, x.k.row(committed + t), c.d.K, at(c.records.k, r.slot, e, h()));
    }
  }

  // ---- strips of the state ----

  char* address(const kda_tensor& t, int64_t v0, int64_t i) const {
    if (c.layout == KDA_STATE_V_FIRST) return at(t, r.s.slot, hv, v0 + i);
    return at(t, r.s.slot, hv, i) + v0 * dtype_size(t.dtype);
  }

  // Runs value columns v0 .. v0+V-1, at most one strip.
  void run_strip(int64_t v0, int64_t V) {
    const bool v_first = c.layout == KDA_STATE_V_FIRST;
    const int64_t K = c.d.K, rows = v_first ? V : K, columns = v_first ? K : V;
    const int64_t width = v_first ? padded(K) : kStripColumns;
    const kda_tensor& h0 = c.h0;
    const bool in_place = h0.dtype == KDA_F32 && columns == width;

    float* S = x.strip.data;
    int64_t pitch = width;
    if (in_place) {
      S = reinterpret_cast<float*>(address(h0, v0, 0)), pitch = h0.stride[2];
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        float* row = S + i * width;
        zero(row, width);
        if (r.s.initial) load_row(h0.dtype, address(h0, v0, i), columns, row);
      }
    }
    if (in_place && !r.s.initial) {  // never read from memory that has not been set
      S = x.strip.data, pitch = width;
      zero(S, rows * width);
    }
    if (flushed) {
      for (int64_t i = 0, w = r.newest; i < flushed; ++i, w = r.flush.before(w))
        load_row(KDA_F32, at(c.last.u, r.last_slot, r.flush.entry(w), hv) + v0 * sizeof(float), V, x.u_last.row(i));
      if (!v_first) {
        const Matrix m{S, pitch};
        gemm<Acc::kDecay>(K, V, flushed, x.w.columns(), x.u_last, m, {x.f, m});
        for (int64_t i = 0; !in_place && i < rows; ++i) store_flushed(S + i * pitch, v0, i, columns);
      }
    }
    const bool verifies = c.in && drafts() > 0;
    if (v_first) run_rows(S, pitch, V, in_place, v0);
    else if (verifies) gemm<Acc::kSet>(2 * drafts(), V, K, x.kq.rows(), Matrix{S, pitch}, x.xo);
    if (verifies) outputs(v0, V);
  }

  // Prefetches a row of the state. A row past the end of a head's state is its neighbour's.
  HWY_INLINE void prefetch(const float* row) const {
    for (int64_t d = 0; d < c.d.K; d += 16) __builtin_prefetch(row + d);
  }

  // Prefetches the first rows, for which run_rows() would ask too late, while keys and gates are prepared.
  HWY_INLINE void prefetch_first(int64_t v0) const {
    if (c.layout != KDA_STATE_V_FIRST || c.h0.dtype != KDA_F32) return;
    const auto* S = reinterpret_cast<const float*>(address(c.h0, v0, 0));
    for (int64_t i = 0; i < kPrefetchRows; ++i) prefetch(S + i * c.h0.stride[2]);
  }

  HWY_INLINE void flush_row(float* S, int64_t column) {
    for (int64_t d = 0; d < padded(c.d.K); d += lanes()) {
      Vec sum = hn::Mul(load(S + d), load(x.f + d));
      for (int64_t i = 0; i < flushed; ++i) sum = hn::MulAdd(splat(x.u_last.row(i)[column]), load(x.w.row(i) + d), sum);
      store(sum, S + d);
    }
  }

  // Computes S^T kG and S^T qG from rows of K numbers, after flushing into them what is to be flushed. Each sum has
  // one order, whatever the grouping of rows and tokens.
  void run_rows(float* S, int64_t pitch, int64_t V, bool in_place, int64_t v0) {
    constexpr int kPair = HWY_TARGET == HWY_AVX3 ? 2 : 1;
    for (int64_t i = 0; i < V;) {
      const int64_t rows = i + kPair <= V ? kPair : 1;
      for (int64_t j = i; j < i + rows; ++j) {
        prefetch(S + (j + kPrefetchRows) * pitch);
        if (!flushed) continue;
        flush_row(S + j * pitch, j);
        if (!in_place) store_flushed(S + j * pitch, v0, j, c.d.K);
      }
      if (rows == kPair) multiply_rows<kPair>(S + i * pitch, pitch, i);
      else multiply_rows<1>(S + i * pitch, pitch, i);
      i += rows;
    }
  }

  template <int kStateRows>
  HWY_INLINE void multiply_rows(const float* S, int64_t pitch, int64_t column) {
    const int64_t L = c.in ? drafts() : 0, Kp = padded(c.d.K);
    int64_t t = 0;
    for (; t + 4 <= L; t += 4) dots<kStateRows, 4>(S, pitch, x, L, t, Kp, column);
    if (t + 2 <= L) dots<kStateRows, 2>(S, pitch, x, L, t, Kp, column), t += 2;
    if (t < L) dots<kStateRows, 1>(S, pitch, x, L, t, Kp, column);
  }

  // Stores row i of the strip where the state is, and loads it again, rounded as a separate call would find it.
  void store_flushed(float* row, int64_t v0, int64_t i, int64_t columns) {
    store_row(c.hT.dtype, row, columns, address(c.hT, v0, i));
    load_row(c.hT.dtype, address(c.hT, v0, i), columns, row);
  }

  void outputs(int64_t v0, int64_t V) {
    const kda_inputs& in = *c.in;
    const int64_t L = drafts();
    for (int64_t w = 0; w < committed; ++w)
      load_row(KDA_F32, at(c.records.u, r.slot, r.verify.entry(w), hv) + v0 * sizeof(float), V, x.u.row(w));
    for (int64_t t = 0; t < L; ++t) {
      float *u = x.u.row(committed + t), *o = x.xo.row(L + t);
      const float *A = x.A.row(t), *P = x.P.row(t), *X = x.xo.row(t);
      const int64_t token = r.s.t0 + t;
      load_row(in.v.dtype, at(in.v, r.s.b, token, hv) + v0 * dtype_size(in.v.dtype), V, x.v.row(t));
      for (int64_t d = 0; d < padded(V); d += lanes()) {
        Vec e = hn::Sub(load(x.v.row(t) + d), load(X + d)), out = load(o + d);
        int64_t i = 0;
        for (int64_t w = before(committed + t); w >= 0; w = before(w), ++i) {
          const Vec uw = load(x.u.row(w) + d);
          e = hn::NegMulAdd(splat(A[i]), uw, e);
          out = hn::MulAdd(splat(P[i]), uw, out);
        }
        e = hn::Mul(e, splat(x.beta[t]));
        store(e, u + d);
        store(hn::MulAdd(splat(x.qk[t]), e, out), o + d);
      }
      store_row(c.o->dtype, o, V, at(*c.o, r.s.b, token, hv) + v0 * dtype_size(c.o->dtype));
      if (r.slot >= 0)
        store_row(KDA_F32, u, V, at(c.records.u, r.slot, r.verify.entry(r.verify.token(t)), hv) + v0 * sizeof(float));
    }
  }
};

// Runs value columns v0 .. v0+V-1 of one head of one request.
void speculation_task(const SpeculationCall& c, const Request& r, int64_t hv, int64_t v0, int64_t V,
                      const SpeculationSizes& sizes, char* memory) {
  const SpeculationScratch scratch(Arena(memory), sizes, nullptr);
  SpeculationTask task{c, r, hv, v0, scratch};
  task.prefetch_first(v0);
  if (r.newest >= 0) task.prepare_flush();
  if (c.in) task.prepare_verify();
  const int64_t rows = c.h0.dtype == KDA_F32 ? kStripRows : kConvertedRows;
  const int64_t strip = c.layout == KDA_STATE_V_FIRST ? rows : kStripColumns;
  for (int64_t v = v0; v < v0 + V; v += strip) task.run_strip(v, std::min(strip, v0 + V - v));
  if (c.in && r.slot >= 0 && v0 == 0) task.record_keys();
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "convolution.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

int64_t entries_of(const kda_tensor& u) { return present(u) ? u.shape[u.ndim - 3] : 0; }

SpeculationSizes sizes_of(const VerifyProblem& p) {
  return {p.K, p.V, present(p.args.records.ring_count) ? entries_of(p.args.records.u) : 0, std::min(p.T, kMaxDrafts)};
}
SpeculationSizes sizes_of(const FlushProblem& p) { return {p.K, p.V, p.R, 0}; }
SpeculationSizes sizes_of(const FlushVerifyProblem& p) {
  return {p.K, p.V, entries_of(present(p.args.records.ring_count) ? p.args.records.u : p.args.last.u),
          std::min(p.T, kMaxDrafts)};
}

uint64_t convolved_bytes(const FlushProblem&) { return 0; }
template <class P>
uint64_t convolved_bytes(const P& p) {
  return present(p.args.conv.x) ? conv_front_bytes(p.args.conv) : 0;
}

// Shared: the convolved rows.
template <class P>
Workspace plan(const P& p) {
  return {convolved_bytes(p), KDA_ISA_CALL(speculation_scratch_bytes)(sizes_of(p))};
}

// Returns the inputs, with q, k and v convolved first where the call has raw rows.
template <class P>
kda_inputs convolved(const P& p) {
  kda_inputs in = p.args.in;
  if (!present(p.args.conv.x)) return in;
  plan(p).threads(p.args.exec, 1);  // refuses a workspace that is too small
  const kda_tensor z = conv_front_output(p.args.conv, p.args.exec.workspace);
  conv_front(p.args.conv, in.cu_seqlens, p.args.parents, z, p.args.exec);
  slice_convolved(in, z.data);
  return in;
}

void zero_head(const kda_tensor& o, int64_t b, int64_t t0, int64_t count, int64_t hv) {
  for (int64_t t = t0; t < t0 + count; ++t)
    std::memset(
        static_cast<char*>(o.data) + (b * o.stride[0] + t * o.stride[1] + hv * o.stride[2]) * dtype_size(o.dtype), 0,
        o.shape[3] * dtype_size(o.dtype));
}

int64_t layers_of(const FlushProblem& p) { return p.layers; }
template <class P>
int64_t layers_of(const P&) {
  return 1;
}

// The work in units of 100,000 multiply-adds. A team of threads costs about one unit, a few microseconds.
template <class P>
int64_t tasks_of(const P& p) {
  return layers_of(p) * p.N * p.HV * p.K * p.V * (2 * sizes_of(p).drafts + 2) / 100000 + 1;
}

// Runs request_of(n) for every request, head and layer.
template <class P, class CallOf, class RequestOf>
void run(const P& p, const kda_exec& exec, const CallOf& call_of, const RequestOf& request_of) {
  const SpeculationSizes sizes = sizes_of(p);
  const Workspace workspace = plan(p);
  const int64_t heads = layers_of(p) * p.N * p.HV;
  const int threads = workspace.threads(exec, tasks_of(p));
  const int64_t parts = std::clamp<int64_t>(threads / std::max<int64_t>(1, heads), 1, (p.V + 63) / 64);
  const int64_t part = (p.V / parts + 63) / 64 * 64, tiles = (p.V + part - 1) / part;
  const auto task_fn = KDA_ISA_CALL(speculation_task);
  const auto one = [&](int64_t task, int thread) {
    const int64_t v0 = task % tiles * part, hv = task / tiles % p.HV, n = task / tiles / p.HV % p.N;
    const SpeculationCall call = call_of(task / tiles / p.HV / p.N);
    const Request r = request_of(n);
    if (r.s.live) task_fn(call, r, hv, v0, std::min(part, p.V - v0), sizes, workspace.of_thread(exec, thread));
    else if (call.o && v0 == 0) zero_head(*call.o, r.s.b, r.s.t0, r.s.length, hv);
  };
  parallel_for(heads * tiles, threads, one, short_run(heads * tiles, threads));
}

template <class P>
void zero_rest(const P& p) {
  if (!p.varlen) return;
  const int64_t end = int_at(p.args.in.cu_seqlens, p.N);
  for (int64_t hv = 0; hv < p.HV; ++hv) zero_head(p.args.o, 0, end, p.T - end, hv);
}

}  // namespace

uint64_t verify_workspace(const VerifyProblem& p) { return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p))); }
uint64_t flush_workspace(const FlushProblem& p) { return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p))); }
uint64_t flush_verify_workspace(const FlushVerifyProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, tasks_of(p)));
}

void verify(const VerifyProblem& p) {
  const kda_verify_args& a = p.args;
  const kda_inputs in = convolved(p);
  const SpeculationCall call{p, in.state_layout, a.states.h0, {}, &in, &a.o, a.records, {}};
  run(
      p, a.exec, [&](int64_t) { return call; }, [&](int64_t n) { return request_of(p, n); });
  zero_rest(p);
}

void flush(const FlushProblem& p) {
  const kda_flush_args& a = p.args;
  const bool layered = a.state.ndim == 5;
  run(
      p, a.exec,
      [&](int64_t layer) {
        SpeculationCall call{p, a.state_layout, a.state, {}, nullptr, nullptr, {}, a.records};
        if (layered)
          for (kda_tensor* t : {&call.h0, &call.last.u, &call.last.k, &call.last.alpha}) *t = layer_of(*t, layer);
        call.hT = call.h0;
        return call;
      },
      [&](int64_t n) { return request_of(p, n); });
  for (int64_t i = 0; present(a.conv_x) && i < p.layers * p.N; ++i) {
    const int64_t layer = i / p.N, n = i % p.N;
    const Sequence s = roll_of(p, n);
    conv_roll(layered ? layer_of(a.conv_state, layer) : a.conv_state, s.slot,
              layered ? layer_of(a.conv_x, layer) : a.conv_x, a.parents, n, s.b, s.t0, s.length);
  }
}

void flush_verify(const FlushVerifyProblem& p) {
  const kda_flush_verify_args& a = p.args;
  const bool ring = present(a.records.ring_count);
  plan(p).threads(a.exec, 1);  // refuses a workspace that is too small, before conv.state is written
  for (int64_t n = 0; present(a.last_conv_x) && n < p.N; ++n) {
    const Sequence s = roll_of(p, n);
    conv_roll(a.conv.state, s.slot, a.last_conv_x, a.last_parents, n, s.b, s.t0, s.length);
  }
  const kda_inputs in = convolved(p);
  const SpeculationCall call{p,         in.state_layout,          a.states.h0, a.states.hT, &in, &a.o,
                             a.records, ring ? a.records : a.last};
  run(
      p, a.exec, [&](int64_t) { return call; }, [&](int64_t n) { return request_of(p, n); });
  for (int64_t n = 0; ring && n < p.N; ++n) {  // after all heads have read them
    const Sequence s = sequence_at(p, a.in, a.states, n);
    if (s.live) store_cursors(a.records, slot_of(a.records.indices, n), commit_of(p, n, s.length).next);
  }
  zero_rest(p);
}

}  // namespace kda::cpu
#endif
