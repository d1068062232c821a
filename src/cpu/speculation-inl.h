// Speculative decoding on the CPU (math.md 7), a value head of a request: verify, flush, and both in one pass over the
// state. Bound by memory: the state is read once and, where a flush applies something, written once; tokens and
// records stay in L1 and L2.
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
#if defined(KDA_CPU_SPECULATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SPECULATION_INL_H_
#undef KDA_CPU_SPECULATION_INL_H_
#else
#define KDA_CPU_SPECULATION_INL_H_
#endif

#include "contract/drafts.h"
#include "cpu/arena.h"
#include "cpu/gemm-inl.h"

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
    const Gate gate = head_gate(form_of(in), in.lower_bound, in.A_log, in.dt_bias, hv, K, x.bias);
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

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
