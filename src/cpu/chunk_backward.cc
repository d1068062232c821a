// Chunked backward on the CPU (math.md 5, simplified wide stage). One task = one sequence and value head.
//
// A sequence is cut into segments of h_every chunks, each of which begins with a state that forward left in h
// (without h there is one segment). Segments are done last to first, each in two passes:
// Pass 1 (skipped when forward saved v_new, Aqk, Akk too): the forward without its output, keeping every chunk of the
//   segment (KeptChunk) in this thread's share of the workspace. With h_every = 8 that is 2 MB, which stays in cache.
// Pass 2, last chunk to first, with D = d_o, S the state before the chunk, dS the gradient of the state after it:
//   dv_new = Aqk^T D + kg dS        x = (I + Akk)^-T dv_new
//   dAqk = tril(D v_new^T)          dAkk = -strict_tril(x v_new^T)
//   dq = (D S^T) E                  dk = (v_new dS^T) F - beta (x S^T) E
//   dv = beta x                     dbeta = x.v - kG.(x S^T)
//   dS <- Diag(ell) dS + qG^T D - kG^T (beta x)
// then the pairs inside the chunk (math.md B4) on the forward's blocks, the reverse sum of dG, and the activations.
// q carries scale throughout: with q' = scale q the formulas need no factor, and at the end dq = scale dq'.
//
// Each pair term of dG appears once with + at row i and once with - at row j. Both come from the same tiles
// (math.md 5.2), so that they cancel in the reverse sum.
//
// Memory beyond inputs, gradients and h: 4.2 KB per token of the longest segment and thread at K = V = 128, and with
// HV > H another 8 K bytes per token and value head for dq and dk before their sum.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/chunk_backward.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include "cpu/gradients-inl.h"
// clang-format on

#ifndef KDA_CPU_CHUNK_BACKWARD_TYPES
#define KDA_CPU_CHUNK_BACKWARD_TYPES
namespace kda::cpu {
// Results of each sequence and head that a second step adds up, and dq and dk of each value head where HV > H. They
// lie in the shared workspace.
struct BackwardPartials {
  float* dA_log;  // [N][HV], or nullptr if not wanted
  float* d_bias;  // [N][HV][K], or nullptr
  float* dq;      // [B][T][HV][K], or nullptr if HV == H
  float* dk;
};
}  // namespace kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// What pass 1 keeps of a chunk: all that costs more to compute or to gather again than to read.
struct KeptChunk {
  Matrix S;                       // [K][V] state before it
  Matrix v_new;                   // [C][V]
  Matrix Aqk, Akk;                // [C][C]
  Matrix q, k, alpha;             // [C][K]
  float *beta, *q_norm, *k_norm;  // [C]

  KeptChunk(Arena& arena, int64_t K, int64_t V) {
    S = take(arena, padded(K), V);
    v_new = take(arena, kChunk, V);
    for (Matrix* m : {&Aqk, &Akk}) *m = take(arena, kChunk, kChunk);
    for (Matrix* m : {&q, &k, &alpha}) *m = take(arena, kChunk, K);
    for (float** p : {&beta, &q_norm, &k_norm}) *p = arena.floats(kChunk);
  }
  static uint64_t bytes(int64_t K, int64_t V) {
    Arena measure;
    KeptChunk(measure, K, V);
    return measure.bytes();
  }
};

struct BackwardScratch : Gradients {
  Chunk chunk;          // its matrices are those of the kept chunk at hand, except v
  Matrix v;             // [C][V]  its own
  Matrix dS;            // [K][V]
  float *raw, *d_bias;  // [K]     a row of g; the running sum of its gradient
  char* kept;           // the KeptChunks of the segment, one after the other

  BackwardScratch(Arena arena, int64_t K, int64_t V, char* memory, uint64_t* bytes) : chunk(arena, K, V), v(chunk.v) {
    dS = take(arena, padded(K), V);
    take_from(arena, K, V);
    for (float** p : {&raw, &d_bias}) *p = arena.floats(padded(K));
    kept = memory ? memory + arena.bytes() : nullptr;
    if (bytes) *bytes = arena.bytes();
  }
  // Makes the i-th chunk of the segment the chunk at hand.
  KeptChunk use(int64_t i) {
    Arena arena(kept + i * KeptChunk::bytes(chunk.K, chunk.V));
    const KeptChunk here(arena, chunk.K, chunk.V);
    chunk.q = here.q, chunk.k = here.k, chunk.alpha = here.alpha, chunk.Aqk = here.Aqk, chunk.Akk = here.Akk;
    chunk.beta = here.beta, chunk.q_norm = here.q_norm, chunk.k_norm = here.k_norm;
    return here;
  }
};

// Did forward keep all that pass 1 computes? (Without scores v_new is of no use here.)
inline bool all_saved(const BackwardProblem& p) { return present(p.args.Aqk); }

// The chunks of a segment. Where forward saved everything, nothing is computed again and segments have one chunk.
inline int64_t segment_chunks(const BackwardProblem& p) {
  return present(p.args.h) ? std::min<int64_t>(p.args.h_every, p.max_chunks()) : p.max_chunks();
}

// The size of a thread's share: scratch and the chunks of the longest segment.
uint64_t backward_scratch_bytes(const BackwardProblem& p) {
  uint64_t bytes;
  BackwardScratch(Arena(), p.K, p.V, nullptr, &bytes);
  return bytes + segment_chunks(p) * KeptChunk::bytes(p.K, p.V);
}

struct BackwardTask {
  const BackwardProblem& p;
  Sequence seq;
  int64_t hv, first_h;
  Gate gate;
  BackwardScratch& s;
  BackwardPartials partials;

  void load_inputs(int64_t t) {
    load_chunk(s.chunk, p.args.in, gate, seq.b, seq.t0 + t, std::min(kChunk, seq.length - t), hv / p.group(), hv, 0);
  }

  // ---- pass 1, tokens first .. end-1 ----
  void recompute(int64_t first, int64_t end) {
    Chunk& c = s.chunk;
    for (int64_t t = first; t < end; t += kChunk) {
      const KeptChunk here = s.use((t - first) / kChunk);
      c.v = here.v_new;  // computed where it is kept
      if (t == first) load_first_state(first, here.S);
      load_inputs(t);
      decayed_operands(c);
      scores(c);
      corrections(c, here.S);
      if (t + kChunk >= end) break;
      const KeptChunk next = s.use((t - first) / kChunk + 1);
      advance_state(c, here.S, next.S);
      for (int64_t k = p.K; k < padded(p.K); ++k) zero(next.S.row(k), padded(p.V));
    }
    c.v = s.v;
  }

  void load_first_state(int64_t t, Matrix S) {
    const kda_backward_args& a = p.args;
    zero(S.data, padded(p.K) * S.pitch);
    if (present(a.h)) load_state(s.chunk, a.h, h_layout(a), first_h + t / (kChunk * a.h_every), hv, 0, S);
    else if (present(a.h0)) load_state(s.chunk, a.h0, a.in.state_layout, seq.n, hv, 0, S);
  }

  // Restores the inputs of the chunk at t, and what pass 1 or the caller kept of it.
  KeptChunk restore(int64_t first, int64_t t) {
    const kda_backward_args& a = p.args;
    const KeptChunk here = s.use((t - first) / kChunk);
    const int64_t L = std::min(kChunk, seq.length - t);
    if (all_saved(p)) {
      load_first_state(t, here.S);
      load_inputs(t);
    }
    s.chunk.L = L;
    for (int64_t i = 0; i < L; ++i) {
      const int64_t token = seq.t0 + t + i;
      prefetch_row(a.d_o, seq.b, token, hv);
      load_row(a.d_o.dtype, at(a.d_o, seq.b, token, hv), p.V, s.D.row(i));
      if (all_saved(p)) {
        load_row(a.v_new.dtype, at(a.v_new, seq.b, token, hv), p.V, here.v_new.row(i));
        load_row(KDA_F32, at(a.Aqk, seq.b, token, hv), kChunk, here.Aqk.row(i));
        load_row(KDA_F32, at(a.Akk, seq.b, token, hv), kChunk, here.Akk.row(i));
      } else {
        load_row(a.in.v.dtype, at(a.in.v, seq.b, token, hv), p.V, s.v.row(i));
      }
    }
    decayed_operands(s.chunk);
    return here;
  }

  // ---- pass 2: products with the states (math.md B1..B3) ----
  void wide_stage(const KeptChunk& kept, float* dbeta) {
    const Chunk& c = s.chunk;
    const int64_t L = c.L, K = c.K, V = c.V, Kp = padded(K), Vp = padded(V);
    transpose(kept.S, Kp, Vp, s.ST);  // padding included: it is zero, and must be zero there too
    transpose(s.dS, Kp, Vp, s.dST);
    transpose(kept.v_new, L, Vp, s.v_newT);

    gemm<Acc::kSet>(L, V, K, c.kg.rows(), s.dS, s.x);
    add_triangle<Triangle::kUpper>(L, V, kept.Aqk.columns(), s.D, s.x);
    solve_triangle<Triangle::kUpper>(L, V, kept.Akk.columns(), s.x);
    gemm_lower(L, V, s.D.rows(), s.v_newT, s.dAqk);
    GradientSteps{c, s}.wide_stage(kept.v_new, dbeta);

    gemm<Acc::kDecay>(K, V, L, c.qG.columns(), s.D, s.dS, {c.ell, s.dS});
    gemm<Acc::kSub>(K, V, L, c.kG.columns(), s.x, s.dS);
  }

  // ---- pass 2: activations (math.md B5..B7) ----
  // dg_t = sum of dG from t to the end of the chunk, then the gate's backward.
  void store_gate(int64_t t) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    const int64_t Kp = padded(c.K);
    for (int64_t i = c.L - 2; i >= 0; --i)
      for (int64_t d = 0; d < Kp; d += lanes())
        store(hn::Add(load(s.dG.row(i) + d), load(s.dG.row(i + 1) + d)), s.dG.row(i) + d);
    const KeepSubnormals keep(gate.is_wide());
    Vec A_sum = hn::Zero(kF32);
    for (int64_t i = 0; i < c.L; ++i) {
      float *dG = s.dG.row(i), *raw = s.raw, *d_bias = s.d_bias;
      // Where alpha is 0, the gradient is 0 too. The sum above leaves its rounding error there, and dA_log would
      // multiply that by a gate of hundreds.
      for (int64_t d = 0; d < Kp; d += lanes())
        store(hn::IfThenZeroElse(hn::Eq(load(c.alpha.row(i) + d), splat(0)), load(dG + d)), dG + d);
      if (!is_given(form_of(a.in))) {
        load_row(a.in.g.dtype, at(a.in.g, seq.b, seq.t0 + t + i, hv), c.K, raw);
        for (int64_t d = 0; d < Kp; d += lanes()) {
          Vec dx, dA;
          gate.backward(gate.z(raw, d), load(dG + d), dx, dA);
          A_sum = hn::Add(A_sum, dA);
          if (partials.d_bias) store(hn::Add(load(d_bias + d), dx), d_bias + d);
          store(dx, dG + d);
        }
      }
      if (present(a.dg)) store_row(a.dg.dtype, dG, c.K, at(a.dg, seq.b, seq.t0 + t + i, hv));
    }
    if (partials.dA_log) partials.dA_log[seq.n * p.HV + hv] += sum_lanes(A_sum);
  }

  void store_beta(int64_t t, const float* dbeta) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    if (!present(a.dbeta)) return;
    for (int64_t i = 0; i < c.L; ++i) {
      const int64_t token = seq.t0 + t + i;
      const float b = load_scalar(a.in.beta.dtype, at(a.in.beta, seq.b, token, hv));
      store_scalar(a.dbeta.dtype, dbeta[i] * beta_slope(a.in.beta_form, b), at(a.dbeta, seq.b, token, hv));
    }
  }

  void store_qkv(int64_t t) {
    const Chunk& c = s.chunk;
    const kda_backward_args& a = p.args;
    for (int64_t i = 0; i < c.L; ++i) {
      const int64_t token = seq.t0 + t + i;
      if (present(a.dv)) store_row(a.dv.dtype, s.x.row(i), c.V, at(a.dv, seq.b, token, hv));
      if (partials.dq) {
        const int64_t row = ((seq.b * p.T + token) * p.HV + hv) * c.K;
        std::memcpy(partials.dq + row, s.dq.row(i), c.K * sizeof(float));
        std::memcpy(partials.dk + row, s.dk.row(i), c.K * sizeof(float));
        continue;
      }
      store_qk(a.dq, s.dq.row(i), c.q.row(i), c.q_norm[i], a.in.scale, a.in.qk_l2norm, seq.b, token, hv, c.K);
      store_qk(a.dk, s.dk.row(i), c.k.row(i), c.k_norm[i], 1, a.in.qk_l2norm, seq.b, token, hv, c.K);
    }
  }

  // Stores the gradient of the raw row x, given y = scale r x and the gradient dy of y:
  // r (scale dy - y (y . dy) / scale). Overwrites dy.
  static void store_qk(const kda_tensor& out, float* dy, const float* y, float r, float scale, bool normalised,
                       int64_t b, int64_t token, int64_t h, int64_t K) {
    if (!present(out)) return;
    const Vec direct = splat(r * scale), along = splat(normalised ? -r * dot(y, dy, padded(K)) / scale : 0);
    for (int64_t d = 0; d < padded(K); d += lanes())
      store(hn::MulAdd(along, load(y + d), hn::Mul(direct, load(dy + d))), dy + d);
    store_row(out.dtype, dy, K, at(out, b, token, h));
  }

  void chunk_backward(int64_t first, int64_t t) {
    float dbeta[kChunk];
    const KeptChunk kept = restore(first, t);
    wide_stage(kept, dbeta);
    GradientSteps{s.chunk, s}.pairs(dbeta);
    store_gate(t);
    store_beta(t, dbeta);
    store_qkv(t);
  }

  void run() {
    const kda_backward_args& a = p.args;
    const int32_t layout = a.in.state_layout;
    zero(s.dS.data, padded(p.K) * s.dS.pitch);
    zero(s.d_bias, padded(p.K));
    if (partials.dA_log) partials.dA_log[seq.n * p.HV + hv] = 0;
    if (present(a.dhT)) load_state(s.chunk, a.dhT, layout, seq.n, hv, 0, s.dS);
    const int64_t segment = segment_chunks(p) * kChunk;
    for (int64_t end = seq.length; end > 0;) {
      const int64_t first = (end - 1) / segment * segment;
      if (!all_saved(p)) recompute(first, end);
      for (int64_t t = (end - 1) / kChunk * kChunk; t >= first; t -= kChunk) chunk_backward(first, t);
      end = first;
    }
    if (present(a.dh0)) store_state(s.chunk, a.dh0, layout, seq.n, hv, 0, s.dS);
    if (partials.d_bias) std::memcpy(partials.d_bias + (seq.n * p.HV + hv) * p.K, s.d_bias, p.K * sizeof(float));
  }
};

void backward_task(const BackwardProblem& p, const Sequence& seq, int64_t hv, int64_t first_h,
                   const BackwardPartials& partials, char* memory) {
  BackwardScratch s(Arena(memory), p.K, p.V, memory, nullptr);
  const kda_inputs& in = p.args.in;
  const Gate gate = head_gate(form_of(in), in.lower_bound, in.A_log, in.dt_bias, hv, p.K, s.chunk.dt_bias);
  BackwardTask{p, seq, hv, first_h, gate, s, partials}.run();
}

// Computes dq and dk of query/key head h for tokens t0 .. t0+count-1 of row b: first the sums over its value heads in
// ascending order, then the gradient of the norm.
void sum_value_heads(const BackwardProblem& p, int64_t b, int64_t t0, int64_t count, int64_t h,
                     const BackwardPartials& partials) {
  const kda_inputs& in = p.args.in;
  alignas(64) float sum[kMaxSize], y[kMaxSize];
  const struct {
    const kda_tensor &out, &x;
    const float* partial;
    float scale;
  } operands[] = {{p.args.dq, in.q, partials.dq, in.scale}, {p.args.dk, in.k, partials.dk, 1.0f}};
  for (const auto& operand : operands) {
    if (!present(operand.out)) continue;
    for (int64_t t = t0; t < t0 + count; ++t) {
      for (int64_t d = 0; d < padded(p.K); ++d) sum[d] = 0;
      for (int64_t g = 0; g < p.group(); ++g) {
        const float* part = operand.partial + ((b * p.T + t) * p.HV + h * p.group() + g) * p.K;
        for (int64_t d = 0; d < p.K; ++d) sum[d] += part[d];
      }
      load_row(operand.x.dtype, at(operand.x, b, t, h), p.K, y);
      const float r = normalise_row(y, p.K, in.qk_l2norm, operand.scale);
      BackwardTask::store_qk(operand.out, sum, y, r, operand.scale, in.qk_l2norm, b, t, h, p.K);
    }
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace kda::cpu {
namespace {

struct Shared {
  BackwardPartials partials{};
  int64_t* first_h;  // [N] rows of h before those of each sequence
  uint64_t bytes;

  Shared(const BackwardProblem& p, char* base) {
    const kda_backward_args& a = p.args;
    Arena arena(base);
    first_h = reinterpret_cast<int64_t*>(arena.floats(2 * p.N));
    if (present(a.dA_log)) partials.dA_log = arena.floats(p.N * p.HV);
    if (present(a.d_dt_bias)) partials.d_bias = arena.floats(p.N * p.HV * p.K);
    if (p.HV > p.H && (present(a.dq) || present(a.dk))) {
      partials.dq = arena.floats(p.tokens() * p.HV * p.K);
      partials.dk = arena.floats(p.tokens() * p.HV * p.K);
    }
    bytes = arena.bytes();
  }
};

Workspace plan(const BackwardProblem& p) { return {Shared(p, nullptr).bytes, KDA_ISA_CALL(backward_scratch_bytes)(p)}; }

}  // namespace

uint64_t chunk_backward_workspace(const BackwardProblem& p) {
  return plan(p).bytes(wanted_threads(p.args.exec, p.N * p.HV));
}

void chunk_backward(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  const Workspace workspace = plan(p);
  const int threads = workspace.threads(a.exec, p.N * p.HV);
  const Shared shared(p, static_cast<char*>(a.exec.workspace));
  first_h_rows(p, a.in, a.h_every, shared.first_h);
  const auto task_fn = KDA_ISA_CALL(backward_task);
  parallel_for(p.N * p.HV, threads, [&](int64_t task, int thread) {
    const int64_t n = task / p.HV, hv = task % p.HV;
    task_fn(p, sequence_at(p, a.in, n), hv, shared.first_h[n], shared.partials, workspace.of_thread(a.exec, thread));
  });

  const int64_t end = p.varlen ? int_at(a.in.cu_seqlens, p.N) : p.T;
  if (shared.partials.dq) {
    const auto sum = KDA_ISA_CALL(sum_value_heads);
    const int64_t blocks = (end + kChunk - 1) / kChunk;
    parallel_for(p.B * p.H * blocks, threads, [&](int64_t task, int) {
      const int64_t t0 = task % blocks * kChunk, h = task / blocks % p.H, b = task / blocks / p.H;
      sum(p, b, t0, std::min(kChunk, end - t0), h, shared.partials);
    });
  }
  for (const kda_tensor* t : {&a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta})
    if (p.varlen && present(*t)) KDA_ISA_CALL(zero_tail)(*t, end, p.T - end);

  for (int64_t hv = 0; hv < p.HV; ++hv)
    for (int64_t i = 0; i <= p.K; ++i) {  // sequences in order; i = K stands for dA_log
      if (!(i < p.K ? present(a.d_dt_bias) : present(a.dA_log))) continue;
      float sum = 0;
      for (int64_t n = 0; n < p.N; ++n)
        sum += i < p.K ? shared.partials.d_bias[(n * p.HV + hv) * p.K + i] : shared.partials.dA_log[n * p.HV + hv];
      (i < p.K ? static_cast<float*>(a.d_dt_bias.data)[hv * a.d_dt_bias.stride[0] + i]
               : static_cast<float*>(a.dA_log.data)[hv * a.dA_log.stride[0]]) = sum;
    }
}

}  // namespace kda::cpu
#endif
