// The stages of the backward, B1 to B5 (math.md 5.1), in f32 and for any size: each tensor may have any of its dtypes,
// and nothing is rounded on the way. A block has a chunk of a value head; the scan (B2) a head of a sequence and 64 of
// its columns. Products are of tiles of 64 x 64, 4 x 4 a thread, with operands in shared memory 16 deep.
#include "contract/stages.h"
#include "cuda/gate/gate.h"
#include "cuda/stages/backward_call.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {
namespace stages {
namespace {

// ---- B1: dAqk = scale tril(d_o v_new^T), dv_local = Aqk^T d_o ----

__global__ void __launch_bounds__(kThreads) local_kernel(const __grid_constant__ BackwardCall p) {
  __shared__ Operands operands;
  wait_for_stream();
  ChunkAt at;
  int hv;
  if (!find(p, {{&p.dAqk, kRows}, {&p.dv_local, p.V}}, at, hv)) return;
  const TokenRows d_o = p.values(p.d_o, at, hv), v_new = p.values(p.v_new, at, hv);
  const Place own;
  Part scores = {};
  multiply(
      operands, scores, p.V, [&](int i, int v) { return d_o(i, v); }, [&](int v, int j) { return v_new(j, v); });
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int i = own.y + e / 4, j = own.x + e % 4;
    p.scores(p.dAqk, at, hv).store(i, j, j <= i && j < at.rows ? p.scale * scores[e / 4][e % 4] : 0.0f);
  }
  const TokenRows A = p.scores(p.Aqk, at, hv);
  for (int v0 = 0; v0 < p.V; v0 += kTile) {
    Part sum = {};
    multiply(
        operands, sum, at.rows, [&](int j, int i) { return i >= j ? A(i, j) : 0.0f; },
        [&](int i, int v) { return d_o(i, v0 + v); });
#pragma unroll
    for (int e = 0; e < 16; ++e)
      p.values(p.dv_local, at, hv).store(own.y + e / 4, v0 + own.x + e % 4, sum[e / 4][e % 4]);
  }
}

// ---- B2: dv_new = dv_local + kg dS, then dS <- Diag(ell) dS + scale qG^T d_o - w^T dv_new, last chunk first ----

struct ScanMemory {
  Operands operands;
  float dv_new[kRows][kLine];
  float dS[kMaxSize][kLine];  // [K][columns]
};

__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ BackwardCall p) {
  extern __shared__ float4 dynamic[];
  auto& m = *reinterpret_cast<ScanMemory*>(dynamic);
  wait_for_stream();
  const auto tiles = static_cast<unsigned>(slices(p.V, kTile)), HV = static_cast<unsigned>(p.HV);
  const int v0 = static_cast<int>(blockIdx.x % tiles) * kTile, hv = static_cast<int>(blockIdx.x / tiles % HV);
  const int64_t n = blockIdx.x / tiles / HV;
  const Sequence s = p.chunks.sequence(n);
  ChunkAt at{.n = n, .b = s.b, .t0 = s.t0, .index = 0, .rows = static_cast<int>(s.length), .owned = s.live};
  if (!s.live) return v0 ? void() : zero_rows(p.dv_new, at, hv, p.V);
  const int64_t first_row = p.chunks.first_row(n);
  const auto each = [&](const auto& work) {
    for (int i = static_cast<int>(threadIdx.x); i < p.K * kTile; i += kThreads) work(i / kTile, i % kTile);
  };
  const StateRows dhT = p.state(p.dhT, n, hv), dh0 = p.state(p.dh0, n, hv);
  each([&](int k, int v) { m.dS[k][v] = dhT(k, v0 + v); });
  const Place own;
  for (int64_t c = (s.length + kRows - 1) / kRows; c-- > 0;) {
    at.t0 = s.t0 + c * kRows, at.index = c, at.rows = static_cast<int>(min(s.length - c * kRows, kChunk));
    const StateRows dh = p.state(p.dh, first_row + c, hv);
    if (first_row + c < p.h_rows) each([&](int k, int v) { dh.store(k, v0 + v, m.dS[k][v]); });
    const TokenRows kg = p.gates(p.kg, at, hv), qG = p.gates(p.qG, at, hv), w = p.gates(p.w, at, hv);
    const TokenRows d_o = p.values(p.d_o, at, hv), local = p.values(p.dv_local, at, hv);
    Part sum = {};
    multiply(
        m.operands, sum, p.K, [&](int i, int k) { return kg(i, k); }, [&](int k, int v) { return m.dS[k][v]; });
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int i = own.y + e / 4, v = own.x + e % 4;
      const float x = local(i, v0 + v) + sum[e / 4][e % 4];
      m.dv_new[i][v] = i < at.rows ? x : 0.0f;
      p.values(p.dv_new, at, hv).store(i, v0 + v, x);
    }
    for (int k0 = 0; k0 < p.K; k0 += kTile) {
      Part change = {};
      multiply(
          m.operands, change, at.rows, [&](int k, int i) { return p.scale * qG(i, k0 + k); },
          [&](int i, int v) { return d_o(i, v0 + v); });
      multiply(
          m.operands, change, at.rows, [&](int k, int i) { return -w(i, k0 + k); },
          [&](int i, int v) { return m.dv_new[i][v]; });
#pragma unroll
      for (int e = 0; e < 16; ++e)
        if (const int k = k0 + own.y + e / 4; k < p.K) {
          float& dS = m.dS[k][own.x + e % 4];
          dS = fmaf(ptx::exp2(p.gates(p.G, at, hv)(at.rows - 1, k)), dS, change[e / 4][e % 4]);
        }
    }
    __syncthreads();  // dS of the chunk before is there
  }
  __syncthreads();  // dS is there, also where there was no chunk
  each([&](int k, int v) { dh0.store(k, v0 + v, m.dS[k][v]); });
}

// ---- B3: everything that meets a state ----

struct WideMemory {
  Operands operands;
  float x[kRows][kMaxSize + 4];  // T^T dv_new
  float dbeta[kRows], SdS[kTile], written[16][kTile], last[kTile];
};

// A chunk of a head, as a thread sees it.
class StateProducts {
 public:
  __device__ StateProducts(const BackwardCall& p, WideMemory& m, const ChunkAt& at, int hv, int64_t row)
      : p_(p), m_(m), at_(at), hv_(hv), S_(p.state(p.h, row, hv)), dS_(p.state(p.dh, row, hv)) {}

  // Computes x, dv, and x's share of dbeta.
  __device__ void solve() {
    const TokenRows T = p_.scores(p_.Akk_inv, at_, hv_), dv_new = p_.values(p_.dv_new, at_, hv_);
    const TokenRows v = p_.values(p_.v, at_, hv_);
    float of_rows[4] = {};
    for (int v0 = 0; v0 < p_.V; v0 += kTile) {
      Part sum = {};
      multiply(
          m_.operands, sum, at_.rows, [&](int j, int i) { return i >= j ? T(i, j) : 0.0f; },
          [&](int i, int c) { return dv_new(i, v0 + c); });
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int i = own_.y + e / 4, c = v0 + own_.x + e % 4;
        const float x = sum[e / 4][e % 4];
        m_.x[i][c] = x;
        p_.values(p_.dv, at_, hv_).store(i, c, beta(i) * x);
        of_rows[e / 4] = fmaf(x, v(i, c), of_rows[e / 4]);
      }
    }
    add_to_rows(of_rows, 1, true);
  }

  __device__ void write_scores() {
    const TokenRows v_new = p_.values(p_.v_new, at_, hv_);
    Part sum = {};
    multiply(
        m_.operands, sum, p_.V, [&](int i, int v) { return m_.x[i][v]; }, [&](int v, int j) { return v_new(j, v); });
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int i = own_.y + e / 4, j = own_.x + e % 4;
      p_.scores(p_.dAkk, at_, hv_).store(i, j, j < i ? -sum[e / 4][e % 4] : 0.0f);
    }
  }

  // Channels k0 .. k0 + 63 of dq, dk and dG.
  __device__ void write_channels(int k0) {
    const TokenRows d_o = p_.values(p_.d_o, at_, hv_), v_new = p_.values(p_.v_new, at_, hv_);
    const auto S = [&](int v, int k) { return S_(k0 + k, v); };
    Part of_q = {}, y = {}, of_k = {};
    multiply(
        m_.operands, of_q, p_.V, [&](int i, int v) { return d_o(i, v); }, S);
    multiply(
        m_.operands, y, p_.V, [&](int i, int v) { return m_.x[i][v]; }, S);
    multiply(
        m_.operands, of_k, p_.V, [&](int i, int v) { return v_new(i, v); },
        [&](int v, int k) { return dS_(k0 + k, v); });
    multiply_states(k0);
    const TokenRows q = p_.keys(p_.q, at_, hv_), k = p_.keys(p_.k, at_, hv_), G = p_.gates(p_.G, at_, hv_);
    const int last = at_.rows - 1;
    float of_rows[4] = {}, of_columns[4] = {};
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int i = own_.y + e / 4, c = k0 + own_.x + e % 4;
      if (i >= at_.rows || c >= p_.K) continue;
      const float E = ptx::exp2(G(i, c)), F = ptx::exp2(G(last, c) - G(i, c)), key = k(i, c);
      const float dq = p_.scale * E * of_q[e / 4][e % 4], written = F * of_k[e / 4][e % 4];
      const float read = beta(i) * y[e / 4][e % 4], dG = q(i, c) * dq - key * written - key * E * read;
      p_.gates(p_.dq, at_, hv_).store(i, c, dq), p_.gates(p_.dk, at_, hv_).store(i, c, written - E * read);
      of_rows[e / 4] = fmaf(key * E, y[e / 4][e % 4], of_rows[e / 4]);
      of_columns[e % 4] = fmaf(key, written, of_columns[e % 4]);
      if (i < last) p_.gates(p_.dG, at_, hv_).store(i, c, dG);
      else m_.last[c - k0] = dG;
    }
    add_to_rows(of_rows, -1, false);
#pragma unroll
    for (int j = 0; j < 4; ++j) m_.written[own_.y / 4][own_.x + j] = of_columns[j];
    __syncthreads();  // sums of all rows, S dS and the last row are there
    const int own = static_cast<int>(threadIdx.x);
    if (own < kTile && k0 + own < p_.K) {
      float sum = 0;
      for (const auto& rows : m_.written) sum += rows[own];
      const float whole = fmaf(ptx::exp2(G(last, k0 + own)), m_.SdS[own], m_.last[own] + sum);
      p_.gates(p_.dG, at_, hv_).store(last, k0 + own, whole);
    }
    __syncthreads();  // they are read
  }

  __device__ void write_dbeta() const {
    const int i = static_cast<int>(threadIdx.x);
    if (i < at_.rows) p_.column(p_.dbeta, at_, hv_).store(i, 0, m_.dbeta[i]);
  }

 private:
  __device__ float beta(int i) const { return p_.column(p_.beta, at_, hv_)(i, 0); }

  // dbeta of the thread's rows gets sign times the sums over their 16 threads.
  __device__ void add_to_rows(const float (&of_rows)[4], float sign, bool first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = sum_over<16>(of_rows[i]);
      if (own_.x == 0) m_.dbeta[own_.y + i] = fmaf(sign, sum, first ? 0.0f : m_.dbeta[own_.y + i]);
    }
  }
  // sum over V of S dS: four threads a channel.
  __device__ void multiply_states(int k0) {
    const int k = static_cast<int>(threadIdx.x) / 4;
    float sum = 0;
    for (int v = static_cast<int>(threadIdx.x) % 4; v < p_.V; v += 4) sum = fmaf(S_(k0 + k, v), dS_(k0 + k, v), sum);
    sum = sum_over<4>(sum);
    if (threadIdx.x % 4 == 0) m_.SdS[k] = sum;
  }

  const BackwardCall& p_;
  WideMemory& m_;
  const ChunkAt at_;
  const int hv_;
  const StateRows S_, dS_;
  const Place own_;
};

__global__ void __launch_bounds__(kThreads) wide_kernel(const __grid_constant__ BackwardCall p) {
  extern __shared__ float4 dynamic[];
  wait_for_stream();
  ChunkAt at;
  int hv;
  if (!find(p, {{&p.dq, p.K}, {&p.dk, p.K}, {&p.dG, p.K}, {&p.dv, p.V}, {&p.dbeta, 1}, {&p.dAkk, kRows}}, at, hv))
    return;
  const int64_t row = p.chunks.first_row(at.n) + at.index;
  if (row >= p.h_rows) return;  // cu_seqlens are not checked
  StateProducts chunk(p, *reinterpret_cast<WideMemory*>(dynamic), at, hv, row);
  chunk.solve();
  chunk.write_scores();
  for (int k0 = 0; k0 < p.K; k0 += kTile) chunk.write_channels(k0);
  chunk.write_dbeta();
}

// ---- B4: the pairs inside the chunk; a thread has a channel of every fourth row ----

struct PairMemory {
  float q[kRows][kTile], k[kRows][kTile], G[kRows][kTile];
  float dAqk[kRows][kRows], dAkk[kRows][kRows], beta[kRows];
  float dbeta[kRows][2];  // of each half of the channels
};

__device__ void fetch_pairs(const BackwardCall& p, PairMemory& m, const ChunkAt& at, int hv, int k0) {
  const TokenRows q = p.keys(p.q, at, hv), k = p.keys(p.k, at, hv), G = p.gates(p.G, at, hv);
  __syncthreads();  // the channels before are read
  for (int e = static_cast<int>(threadIdx.x); e < kRows * kTile; e += kThreads) {
    const int i = e / kTile, c = e % kTile;
    m.q[i][c] = q(i, k0 + c), m.k[i][c] = k(i, k0 + c), m.G[i][c] = G(i, k0 + c);
  }
  __syncthreads();  // the channels are there
}

// Adds the share of row i of a channel to dq, dk and dG, and returns that of dbeta.
__device__ float add_pairs(const BackwardCall& p, const PairMemory& m, const ChunkAt& at, int hv, int i, int c,
                           int k0) {
  const float G = m.G[i][c], q = m.q[i][c], k = m.k[i][c];
  float pair = m.dAqk[i][i] * k, r = 0, column = m.dAqk[i][i] * q;
  for (int j = 0; j < i; ++j) {
    const float x = m.k[j][c] * ptx::exp2(G - m.G[j][c]);
    pair = fmaf(m.dAqk[i][j], x, pair), r = fmaf(m.dAkk[i][j], x, r);
  }
  for (int j = i + 1; j < at.rows; ++j) {
    const float R = ptx::exp2(m.G[j][c] - G);
    column = fmaf(m.dAqk[j][i] * m.q[j][c] + m.dAkk[j][i] * m.beta[j] * m.k[j][c], R, column);
  }
  const float beta_r = m.beta[i] * r;
  const auto add = [&](const Rows& x, float share) {
    const TokenRows rows = p.gates(x, at, hv);
    rows.store(i, k0 + c, rows(i, k0 + c) + share);
  };
  add(p.dq, pair), add(p.dk, beta_r + column), add(p.dG, fmaf(q, pair, k * (beta_r - column)));
  return k * r;
}

__global__ void __launch_bounds__(kThreads) pairs_kernel(const __grid_constant__ BackwardCall p) {
  extern __shared__ float4 dynamic[];
  auto& m = *reinterpret_cast<PairMemory*>(dynamic);
  wait_for_stream();
  ChunkAt at;
  int hv;
  if (!find(p, {{&p.dq, p.K}, {&p.dk, p.K}, {&p.dG, p.K}, {&p.dbeta, 1}}, at, hv)) return;
  const TokenRows dAqk = p.scores(p.dAqk, at, hv), dAkk = p.scores(p.dAkk, at, hv);
  const int own = static_cast<int>(threadIdx.x);
  for (int e = own; e < kRows * kRows; e += kThreads)
    m.dAqk[e / kRows][e % kRows] = dAqk(e / kRows, e % kRows),
                          m.dAkk[e / kRows][e % kRows] = dAkk(e / kRows, e % kRows);
  if (own < kRows) {
    m.beta[own] = p.column(p.beta, at, hv)(own, 0);
    m.dbeta[own][0] = m.dbeta[own][1] = 0;
  }
  for (int k0 = 0; k0 < p.K; k0 += kTile) {
    fetch_pairs(p, m, at, hv, k0);
    const int c = own % kTile;
    for (int i = own / kTile; i < at.rows; i += kThreads / kTile) {
      const float sum = sum_over<32>(k0 + c < p.K ? add_pairs(p, m, at, hv, i, c, k0) : 0.0f);
      if (c % 32 == 0) m.dbeta[i][c / 32] += sum;
    }
  }
  __syncthreads();  // the sums of all channels are there
  const TokenRows dbeta = p.column(p.dbeta, at, hv);
  if (own < at.rows) dbeta.store(own, 0, dbeta(own, 0) + m.dbeta[own][0] + m.dbeta[own][1]);
}

// ---- B5: dg_t = sum of dG from t to the end of its chunk, 0 where its decay is; a thread has a channel ----

__global__ void __launch_bounds__(kThreads) suffix_kernel(const __grid_constant__ BackwardCall p) {
  wait_for_stream();
  ChunkAt at;
  int hv;
  if (!find(p, {{&p.dg, p.K}}, at, hv)) return;
  const int c = static_cast<int>(threadIdx.x);
  const TokenRows dG = p.gates(p.dG, at, hv), g = p.gates(p.g, at, hv), dg = p.gates(p.dg, at, hv);
  float sum = 0;
  for (int i = at.rows; i-- > 0;) {
    sum += dG(i, c);
    const bool gone = p.g.data && g(i, c) <= kGone;
    dg.store(i, c, gone ? 0.0f : sum);
  }
}

template <auto kKernel>
void start(const kda_exec& exec, const BackwardCall& c, int64_t blocks, int bytes) {
  const DeviceGuard device(exec.device_id);
  if (blocks) launch<kKernel>(exec, dim3(static_cast<unsigned>(blocks)), kThreads, bytes, c);
}

// What all stages' calls have in common.
template <StageArgs Args>
BackwardCall call_of(const StageProblem<Args>& p) {
  BackwardCall c{.chunks = Chunks(p, p.in.cu_seqlens)};
  c.HV = static_cast<int>(p.HV), c.group = static_cast<int>(p.group());
  c.K = static_cast<int>(p.K), c.V = static_cast<int>(p.V);
  c.scale = p.in.scale, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  return c;
}
// [B,T,HV] as rows of one element.
Rows column_of(const kda_tensor& t) {
  kda_tensor wide = t;
  wide.ndim = 4, wide.shape[3] = 1, wide.stride[3] = 1;
  return rows_of(wide);
}
template <StageArgs Args>
int64_t blocks_of(const StageProblem<Args>& p) {
  return Chunks(p, p.in.cu_seqlens).count * p.HV;
}
int64_t scan_blocks(const Dims& d) { return (d.N + d.varlen) * d.HV * slices(static_cast<int>(d.V), kTile); }

}  // namespace
}  // namespace stages

const char* stage_why_not(const StageProblem<kda_stage_bwd_local_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::blocks_of(p));
}
const char* stage_why_not(const StageProblem<kda_stage_bwd_delta_h_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::scan_blocks(p));
}
const char* stage_why_not(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::blocks_of(p));
}
const char* stage_why_not(const StageProblem<kda_stage_bwd_intra_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::blocks_of(p));
}
const char* stage_why_not(const StageProblem<kda_stage_cumsum_backward_args>& p) {
  return stages::stage_why_not(p.args.exec, has_f64(p), stages::blocks_of(p));
}

void stage(const StageProblem<kda_stage_bwd_local_args>& p) {
  using namespace stages;
  const auto& a = p.args;
  BackwardCall c = call_of(p);
  c.v_new = rows_of(a.v_new), c.d_o = rows_of(a.d_o), c.Aqk = rows_of(a.Aqk);
  c.dAqk = rows_of(a.dAqk), c.dv_local = rows_of(a.dv_local);
  start<local_kernel>(a.exec, c, blocks_of(p), 0);
}

void stage(const StageProblem<kda_stage_bwd_delta_h_args>& p) {
  using namespace stages;
  const auto& a = p.args;
  BackwardCall c = call_of(p);
  c.qG = rows_of(a.qG), c.kg = rows_of(a.kg), c.w = rows_of(a.w), c.G = rows_of(a.G);
  c.d_o = rows_of(a.d_o), c.dv_local = rows_of(a.dv_local), c.dv_new = rows_of(a.dv_new);
  c.dhT = lines_of_states(a.dhT), c.dh = lines_of_states(a.dh), c.dh0 = lines_of_states(a.dh0);
  c.h_rows = a.dh.shape[0];
  start<scan_kernel>(a.exec, c, scan_blocks(p), sizeof(ScanMemory));
}

void stage(const StageProblem<kda_stage_bwd_wy_dqkg_args>& p) {
  using namespace stages;
  const auto& a = p.args;
  BackwardCall c = call_of(p);
  c.q = rows_of(a.q), c.k = rows_of(a.k), c.v = rows_of(a.v), c.v_new = rows_of(a.v_new), c.G = rows_of(a.G);
  c.beta = column_of(a.beta), c.Akk_inv = rows_of(a.Akk_inv), c.d_o = rows_of(a.d_o), c.dv_new = rows_of(a.dv_new);
  c.h = lines_of_states(a.h), c.dh = lines_of_states(a.dh), c.h_rows = std::min(a.h.shape[0], a.dh.shape[0]);
  c.dq = rows_of(a.dq), c.dk = rows_of(a.dk), c.dv = rows_of(a.dv), c.dG = rows_of(a.dG), c.dAkk = rows_of(a.dAkk);
  c.dbeta = column_of(a.dbeta);
  start<wide_kernel>(a.exec, c, blocks_of(p), sizeof(WideMemory));
}

void stage(const StageProblem<kda_stage_bwd_intra_args>& p) {
  using namespace stages;
  const auto& a = p.args;
  BackwardCall c = call_of(p);
  c.q = rows_of(a.q), c.k = rows_of(a.k), c.G = rows_of(a.G), c.beta = column_of(a.beta);
  c.dAqk = rows_of(a.dAqk), c.dAkk = rows_of(a.dAkk), c.dq = rows_of(a.dq), c.dk = rows_of(a.dk);
  c.dG = rows_of(a.dG), c.dbeta = column_of(a.dbeta);
  start<pairs_kernel>(a.exec, c, blocks_of(p), sizeof(PairMemory));
}

void stage(const StageProblem<kda_stage_cumsum_backward_args>& p) {
  using namespace stages;
  const auto& a = p.args;
  BackwardCall c = call_of(p);
  c.g = rows_of(a.g), c.dG = rows_of(a.dG), c.dg = rows_of(a.dg);
  start<suffix_kernel>(a.exec, c, blocks_of(p), 0);
}

}  // namespace kda::cuda
