// Backward token by token (math.md 3), for sm_80 and newer: any K and V, everything in f32. It is for what the
// kernels on tensor cores do not take, and for f32 inputs, whose gradients these would round. It is slow, because
// each token reads and writes whole states.
//
// A block takes a value head of a sequence. First it goes forward and keeps the state before every 64 tokens. Then it
// takes 16 tokens at a time, from the last to the first: it goes forward again from a kept state, and then back. S is
// the state before a token, in memory, S' = Diag(alpha) S, and dS the gradient of the state after the token:
//   e = v - S'^T k    u = beta e    dS += q dO^T    dq = scale (S' + k u^T) dO
//   du = dS^T k    dv = beta du    dbeta = du . e
//   dS' = dS - k dv^T    dk = dS u - S' dv    dg = alpha rowsum(dS' S)    dS <- Diag(alpha) dS'
// q has the scale inside.
//
// A warp has every eighth channel, and its lanes have value columns. Sums over channels meet in shared memory.
//
// The kernel leaves dq, dk and dg in f32 for each value head. Two more kernels add heads up and go through norms and
// gates, and a last one adds up the gradients of A_log and dt_bias, all in a fixed order.
#include "cuda/backward/declarations.h"
#include "cuda/backward/sums.h"
#include "cuda/call/states.h"
#include "cuda/call/workspace.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kAgain = 16;  // tokens of which all states are kept

struct RecurrentPlaces {
  TypedView h0, dhT, dh0, d_o, dv, dbeta;
  bool v_first;
  float* kept;          // [rows][HV][K][V]: states before every 64 tokens
  float* scratch;       // [block][kAgain + 2][K][V]: states before kAgain tokens, one more, dS
  float *dq, *dk, *dg;  // [B][T][HV][K]
  bool only_dh0;        // which needs no states: neither kept nor scratch has any, but for dS
};

struct RecurrentMemory {
  float q[kMaxSize], k[kMaxSize], alpha[kMaxSize];
  float e[kAgain][kMaxSize], beta[kAgain];
  float d_o[kMaxSize], u[kMaxSize], dv[kMaxSize];
  float of_warps[kWarps][kMaxSize];  // sums over a warp's channels, by column
  Products sums[kWarps];
};

// A value head of a sequence, as a thread sees it.
class RecurrentHead {
 public:
  __device__ RecurrentHead(const ForwardProblem& p, const Tokens& x, const RecurrentPlaces& places, RecurrentMemory& m,
                           const Sequence& s, unsigned h, unsigned hv)
      : x_(x),
        places_(places),
        m_(m),
        K_(static_cast<int>(p.K)),
        V_(static_cast<int>(p.V)),
        b_(s.b),
        t0_(s.t0),
        length_(static_cast<int>(s.length)),
        n_(s.n),
        T_(p.T),
        HV_(p.HV),
        h_(h),
        hv_(hv) {
    const int64_t state = int64_t{K_} * V_;
    dS_ = places.scratch + blockIdx.x * state;
    if (places.only_dh0) return;
    states_ = places.scratch + blockIdx.x * state * (kAgain + 2);
    current_ = states_ + kAgain * state, dS_ = current_ + state;
    // From row t0 / 64 + n on, as there are T / 64 + N rows, also where lengths in cu_seqlens are garbage.
    const auto t0 = static_cast<unsigned>(s.t0), n = static_cast<unsigned>(s.n);
    const unsigned first_row = p.varlen ? t0 / unsigned{kChunk} + n : n * static_cast<unsigned>(h_rows(p.T, 1));
    kept_ = places.kept + (int64_t{first_row} * HV_ + hv) * state;
  }

  __device__ void run() {
    const int64_t state = int64_t{K_} * V_;
    if (places_.only_dh0) return retreat_alone();
    load(places_.h0, current_);
    for (int t = 0; t < length_; ++t) {
      if (t % kChunk == 0) copy(kept_ + t / kChunk * HV_ * state, current_);
      advance(t, 0, current_, current_);
    }
    load(places_.dhT, dS_);
    for (int end = length_; end > 0;) {
      const int first = (end - 1) / kAgain * kAgain;
      const float* from = kept_ + first / kChunk * HV_ * state;
      for (int t = first / kChunk * kChunk; t < end; ++t) {
        const int i = t - first;
        if (i >= 0) copy(states_ + i * state, from);
        if (t + 1 < end || i >= 0) advance(t, i < 0 ? 0 : i, from, current_);
        from = current_;
      }
      for (int t = end; t-- > first;) retreat(t, t - first);
      end = first;
    }
    store(places_.dh0, dS_);
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Calls work(k, v, place in a state) for all elements; a thread has the same ones each time.
  template <class Work>
  __device__ void each(const Work& work) const {
    for (int k = warp(); k < K_; k += kWarps)
      for (int v = lane(); v < V_; v += 32) work(k, v, k * V_ + v);
  }
  __device__ void copy(float* to, const float* from) const {
    each([&](int, int, int i) { to[i] = from[i]; });
  }
  __device__ char* at(const TypedView& t, int k, int v) const {
    const auto n = static_cast<unsigned>(n_);
    const unsigned row = places_.v_first ? v : k, own = places_.v_first ? k : v;
    return t.at(n, hv_, row) + own * size_of(t.dtype);
  }
  __device__ void load(const TypedView& t, float* to) const {
    each(
        [&](int k, int v, int i) { to[i] = t.data ? value_of(t.dtype, load_raw<false>(at(t, k, v), t.dtype)) : 0.0f; });
  }
  __device__ void store(const TypedView& t, const float* from) const {
    if (t.data) each([&](int k, int v, int i) { store_element(at(t, k, v), t.dtype, from[i]); });
  }
  __device__ float value(const View& t, int32_t dtype, int token, int v) const {
    const char* from = t.at(static_cast<unsigned>(b_), static_cast<unsigned>(t0_ + token), hv_) + v * size_of(dtype);
    return value_of(dtype, load_raw<false>(from, dtype));
  }
  __device__ float* row_of(float* rows, int token) const { return rows + ((b_ * T_ + t0_ + token) * HV_ + hv_) * K_; }
  __device__ Products sum(const Products& mine) const {
    __syncthreads();  // all reads of the sums before are done
    const Products all[1] = {mine};
    return block_sums<kThreads>(all, m_.sums);
  }

  // Computes keys, decays and beta of a token, for all threads.
  __device__ void activate(int token, int i) {
    TokenKeys<1, kThreads> keys;
    keys.locate(x_, static_cast<unsigned>(b_), static_cast<unsigned>(t0_ + token), hv_, h_);
    keys.fetch<false>(x_);
    keys.activate(x_, [this](const Products(&mine)[1], bool) { return sum(mine[0]); });
    const int c = static_cast<int>(threadIdx.x);
    if (c < K_) m_.q[c] = keys.q[0], m_.k[c] = keys.k[0], m_.alpha[c] = keys.alpha[0];
    if (c == 0) m_.beta[i] = keys.beta;
    if (c < V_) m_.d_o[c] = value(places_.d_o, places_.d_o.dtype, token, c);
    __syncthreads();  // everything is there
  }

  // Returns the sum over k of f(k, v, place) of each column to the thread of that column.
  template <class F>
  __device__ float column_sums(const F& f) {
    for (int v = lane(); v < V_; v += 32) {
      float sum = 0;
      for (int k = warp(); k < K_; k += kWarps) sum += f(k, v, k * V_ + v);
      m_.of_warps[warp()][v] = sum;
    }
    __syncthreads();  // the sums of all warps are there
    float sum = 0;
    const int v = static_cast<int>(threadIdx.x);
    if (v < V_)
      for (int w = 0; w < kWarps; ++w) sum += m_.of_warps[w][v];
    return sum;
  }

  // Goes from the state before a token to that after it, and leaves e and beta in place i.
  __device__ void advance(int token, int i, const float* from, float* to) {
    activate(token, i);
    const float Sk = column_sums([&](int k, int, int at) { return m_.alpha[k] * from[at] * m_.k[k]; });
    const int v = static_cast<int>(threadIdx.x);
    if (v < V_) m_.e[i][v] = value(x_.v, x_.qkv_dtype, token, v) - Sk, m_.u[v] = m_.beta[i] * m_.e[i][v];
    __syncthreads();  // u is there
    each([&](int k, int v, int at) { to[at] = m_.alpha[k] * from[at] + m_.k[k] * m_.u[v]; });
  }

  // Takes dS from the last token to the first, without S, in the arithmetic of retreat().
  __device__ void retreat_alone() {
    load(places_.dhT, dS_);
    for (int t = length_; t-- > 0;) {
      activate(t, 0);
      each([&](int k, int v, int at) { dS_[at] += m_.q[k] * m_.d_o[v]; });
      const float du = column_sums([&](int k, int, int at) { return dS_[at] * m_.k[k]; });
      const int own = static_cast<int>(threadIdx.x);
      if (own < V_) m_.dv[own] = m_.beta[0] * du;
      __syncthreads();  // dv is there
      each([&](int k, int v, int at) { dS_[at] = m_.alpha[k] * (dS_[at] - m_.k[k] * m_.dv[v]); });
      __syncthreads();  // all reads of the token's rows are done
    }
    store(places_.dh0, dS_);
  }

  // Takes dS from after a token to before it, and writes the token's gradients.
  __device__ void retreat(int token, int i) {
    const float* S = states_ + i * int64_t{K_} * V_;
    activate(token, i);
    const int own = static_cast<int>(threadIdx.x);
    if (own < V_) m_.u[own] = m_.beta[i] * m_.e[i][own];
    each([&](int k, int v, int at) { dS_[at] += m_.q[k] * m_.d_o[v]; });
    const float du = column_sums([&](int k, int, int at) { return dS_[at] * m_.k[k]; });
    const float dbeta = sum({own < V_ ? du * m_.e[i][own] : 0.0f, 0, 0}).qq;
    if (own < V_) m_.dv[own] = m_.beta[i] * du;
    __syncthreads();  // u and dv are there
    const auto b = static_cast<unsigned>(b_), t = static_cast<unsigned>(t0_ + token);
    if (own < V_ && places_.dv.data)
      store_element(places_.dv.at(b, t, hv_) + own * size_of(places_.dv.dtype), places_.dv.dtype, m_.dv[own]);
    if (own == 0 && places_.dbeta.data) {
      const float z = value_of(x_.beta_dtype, load_raw<false>(x_.beta.at(b, t, hv_), x_.beta_dtype));
      store_element(places_.dbeta.at(b, t, hv_), places_.dbeta.dtype, dbeta * beta_slope(x_.beta_form, z));
    }
    for (int k = warp(); k < K_; k += kWarps) retreat_channel(k, S, token);
    __syncthreads();  // all reads of the token's rows are done
  }
  __device__ void retreat_channel(int k, const float* S, int token) {
    float dq = 0, dk = 0, dalpha = 0;
    for (int v = lane(); v < V_; v += 32) {
      const int at = k * V_ + v;
      const float decayed = m_.alpha[k] * S[at], dS = dS_[at], before = dS - m_.k[k] * m_.dv[v];
      dq = fmaf(decayed + m_.k[k] * m_.u[v], m_.d_o[v], dq);
      dk = fmaf(dS, m_.u[v], fmaf(-decayed, m_.dv[v], dk));
      dalpha = fmaf(before, S[at], dalpha);
      dS_[at] = m_.alpha[k] * before;
    }
    dq = sum_over<32>(dq), dk = sum_over<32>(dk), dalpha = sum_over<32>(dalpha);
    if (lane()) return;
    if (places_.dq) row_of(places_.dq, token)[k] = x_.scale * dq;
    if (places_.dk) row_of(places_.dk, token)[k] = dk;
    if (places_.dg) row_of(places_.dg, token)[k] = m_.alpha[k] == 0 ? 0.0f : m_.alpha[k] * dalpha;
  }

  const Tokens& x_;
  const RecurrentPlaces& places_;
  RecurrentMemory& m_;
  const int K_, V_;
  const int64_t b_, t0_;
  const int length_;
  const int64_t n_, T_, HV_;
  const unsigned h_, hv_;
  float *states_ = nullptr, *current_ = nullptr, *dS_, *kept_ = nullptr;
};

__global__ void __launch_bounds__(kThreads)
    recurrent_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x,
                     const __grid_constant__ RecurrentPlaces places, const Divisor by_HV, const Divisor by_group) {
  __shared__ RecurrentMemory memory;
  wait_for_stream();
  for (unsigned item = blockIdx.x; item < p.N * p.HV; item += gridDim.x) {
    const unsigned n = by_HV.quotient(item), hv = item - n * by_HV.divisor;
    __syncthreads();  // all reads of what the item before left are done
    RecurrentHead(p, x, places, memory, sequence_at(p, p.args.in, n), by_group.quotient(hv), hv).run();
  }
}

// dq and dk of a token and q/k head: adds those of the value heads in their order, and takes the sums through the
// norm. A warp has one token and head.
__global__ void __launch_bounds__(128)
    keys_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x, const float* dq,
                const float* dk, const __grid_constant__ TypedView to_q, const __grid_constant__ TypedView to_k) {
  wait_for_stream();
  const int64_t item = blockIdx.x * int64_t{4} + threadIdx.x / 32, H = p.H, group = p.group();
  if (item >= p.B * p.T * H) return;
  const int64_t row = item / H, h = item % H;
  const auto b = static_cast<unsigned>(row / p.T), t = static_cast<unsigned>(row % p.T);
  const bool real = !p.varlen || t < end_of_sequences(p.args.in.cu_seqlens, p.N, p.T);
  const auto K = static_cast<int>(p.K), lane = static_cast<int>(threadIdx.x) % 32;
  const auto through = [&](const View& raw, const float* gradients, const TypedView& to) {
    if (!to.data) return;
    constexpr int kMost = kMaxSize / 32;
    float y[kMost], dy[kMost], squares = 0, dot = 0;
    const auto channels = [&](const auto& work) {
#pragma unroll
      for (int i = 0; i < kMost; ++i)
        if (lane + 32 * i < K) work(i, lane + 32 * i);
    };
    channels([&](int i, int c) {
      y[i] = value_of(x.qkv_dtype,
                      load_raw<false>(raw.at(b, t, static_cast<unsigned>(h)) + c * size_of(x.qkv_dtype), x.qkv_dtype));
      squares = fmaf(y[i], y[i], squares), dy[i] = 0;
      for (int64_t g = 0; real && g < group; ++g) dy[i] += gradients[((row * H + h) * group + g) * K + c];
    });
    squares = sum_over<32>(squares);
    if (x.qk_l2norm && real) {
      const bool huge = is_huge(squares);
      if (huge) {
        squares = 0;
        channels([&](int i, int) { y[i] *= kShrink, squares = fmaf(y[i], y[i], squares); });
        squares = sum_over<32>(squares);
      }
      const float r = inverse_norm(squares, huge), back = huge ? kShrink : 1.0f;
      channels([&](int i, int) { y[i] *= r, dot = fmaf(y[i], dy[i], dot); });
      dot = sum_over<32>(dot);
      channels([&](int i, int) { dy[i] = r * back * fmaf(-y[i], dot, dy[i]); });
    }
    channels([&](int i, int c) {
      store_element(to.at(b, t, static_cast<unsigned>(h)) + c * size_of(to.dtype), to.dtype, dy[i]);
    });
  };
  through(x.q, dq, to_q), through(x.k, dk, to_k);
}

// Takes dg through the gate and adds it up: a block has 64 tokens of a head, a thread a channel.
__global__ void __launch_bounds__(kThreads)
    gates_kernel(const __grid_constant__ ForwardProblem p, const __grid_constant__ Tokens x, const float* dg,
                 const __grid_constant__ TypedView to, float* sums) {
  __shared__ float of_warps[kWarps];
  wait_for_stream();
  const auto K = static_cast<unsigned>(p.K), hv = blockIdx.y, c = threadIdx.x;
  const int64_t first = blockIdx.x * int64_t{kChunk}, last = min(first + kChunk, p.B * p.T);
  const int64_t end = p.varlen ? end_of_sequences(p.args.in.cu_seqlens, p.N, p.T) : p.B * p.T;
  float of_bias = 0, of_A = 0;
  if (c < K) {
    const HeadGate gate(x, hv, c, c);
    for (int64_t row = first; row < last; ++row) {
      const auto b = static_cast<unsigned>(row / p.T), t = static_cast<unsigned>(row % p.T);
      Gradients d{0, 0};
      if (row < end) {
        const float z = value_of(x.g_dtype, load_raw<false>(x.g.at(b, t, hv) + c * size_of(x.g_dtype), x.g_dtype));
        d = gate.gradient(z, dg[(row * p.HV + hv) * K + c], 0);
      }
      of_bias += d.dx, of_A += d.dA_log;
      if (to.data) store_element(to.at(b, t, hv) + c * size_of(to.dtype), to.dtype, d.dx);
    }
  }
  if (!sums) return;
  float* own = sums + (blockIdx.x * p.HV + hv) * (K + 1);
  if (c < K) own[c] = of_bias;
  of_A = sum_over<32>(of_A);
  if (c % 32 == 0) of_warps[c / 32] = of_A;
  __syncthreads();  // the sums of all warps are there
  if (c) return;
  of_A = 0;
  for (const float one : of_warps) of_A += one;
  own[K] = of_A;
}

// What a call does, and the layout of its workspace.
struct RecurrentPlan {
  ForwardProblem forward{};
  bool keys, gates, sums, only_dh0;
  int64_t blocks, rows;  // rows: of sums, 64 tokens each
  uint64_t kept, scratch, dq, dk, dg, partial, bytes = 0;

  RecurrentPlan(const BackwardProblem& p, int SMs) {
    const kda_backward_args& a = p.args;
    static_cast<Dims&>(forward) = p;
    forward.args.exec = a.exec, forward.args.in = a.in, forward.args.h_every = 1;
    sums = present(a.dA_log) || present(a.d_dt_bias), gates = sums || present(a.dg);
    keys = present(a.dq) || present(a.dk);
    only_dh0 = !keys && !gates && !present(a.dv) && !present(a.dbeta);
    blocks = std::min<int64_t>(p.N * p.HV, SMs), rows = (p.B * p.T + kChunk - 1) / kChunk;
    const auto place = [&](int64_t floats) {
      const uint64_t at = bytes;
      bytes += align_up(static_cast<uint64_t>(floats) * sizeof(float));
      return at;
    };
    const int64_t state = p.K * p.V, tokens = p.B * p.T * p.HV * p.K;
    kept = place(only_dh0 ? 0 : (p.varlen ? p.T / kChunk + p.N : p.N * p.max_chunks()) * p.HV * state);
    scratch = place(blocks * (only_dh0 ? 1 : kAgain + 2) * state);
    dq = place(keys ? tokens : 0), dk = place(keys ? tokens : 0), dg = place(gates ? tokens : 0);
    partial = place(sums ? rows * p.HV * (p.K + 1) : 0);
  }
};

}  // namespace

const char* backward_recurrent_why_not(const BackwardProblem& p) {
  const kda_backward_args& a = p.args;
  if (const char* reason = device_why_not(a.exec)) return reason;
  if (has_f64(p)) return "float64 runs on `reference` only";
  if (const char* reason = Tokens::why_not(a.in, {})) return reason;
  if (const char* reason = view_why_not({&a.h0, &a.d_o, &a.dhT, &a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta, &a.dh0}))
    return reason;
  if (p.HV > 65535) return "takes at most 65535 heads";
  if (p.B * p.T * p.H > INT32_MAX || p.N * p.HV > INT32_MAX || p.T > INT32_MAX)
    return "takes at most 2^31 tokens and heads";
  return nullptr;
}

uint64_t backward_recurrent_workspace(const BackwardProblem& p) {
  return RecurrentPlan(p, multiprocessors(p.args.exec.device_id)).bytes;
}

void backward_recurrent(const BackwardProblem& p) {
  if (p.HV == 0) return;
  const kda_backward_args& a = p.args;
  const DeviceGuard device(a.exec.device_id);
  if (p.N + p.varlen == 0) return launch_gate_sums(p, nullptr, 0, 0);
  const RecurrentPlan plan(p, multiprocessors(a.exec.device_id));
  const Tokens tokens(p, a.in, {});
  const auto memory = [&](bool is_there, uint64_t at) {
    return is_there ? reinterpret_cast<float*>(static_cast<char*>(a.exec.workspace) + at) : nullptr;
  };
  const RecurrentPlaces places{view_of(a.h0),
                               view_of(a.dhT),
                               view_of(a.dh0),
                               view_of(a.d_o),
                               view_of(a.dv),
                               view_of(a.dbeta),
                               a.in.state_layout == KDA_STATE_V_FIRST,
                               memory(true, plan.kept),
                               memory(true, plan.scratch),
                               memory(plan.keys, plan.dq),
                               memory(plan.keys, plan.dk),
                               memory(plan.gates, plan.dg),
                               plan.only_dh0};
  if (plan.blocks)
    launch<recurrent_kernel>(a.exec, dim3(static_cast<unsigned>(plan.blocks)), kThreads, 0, plan.forward, tokens,
                             places, Divisor(p.HV), Divisor(p.group()));
  if (p.varlen) launch_zero_tails(plan.forward, {{}, {}, places.dv, {}, places.dbeta});
  if (plan.keys && plan.rows)
    launch<keys_kernel>(a.exec, dim3(static_cast<unsigned>((p.B * p.T * p.H + 3) / 4)), 128, 0, plan.forward, tokens,
                        static_cast<const float*>(places.dq), static_cast<const float*>(places.dk), view_of(a.dq),
                        view_of(a.dk));
  float* partial = memory(plan.sums, plan.partial);
  if (plan.gates && plan.rows)
    launch<gates_kernel>(a.exec, dim3(static_cast<unsigned>(plan.rows), static_cast<unsigned>(p.HV)), kThreads, 0,
                         plan.forward, tokens, static_cast<const float*>(places.dg), view_of(a.dg), partial);
  if (plan.sums) launch_gate_sums(p, partial, plan.rows, 1);
}

}  // namespace kda::cuda
