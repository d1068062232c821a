// Speculative decoding (math.md 7) with tensor cores, for sm_80 and newer, K = 64 or 128, V-first.
//
// Bytes: verify reads a state; a flush reads and writes it; both in one pass also read and write it once. Records are
// 1.5 KB a token and head at K = V = 128. Everything else must hide behind that. A block takes 32 to 128 value
// columns of a head and prepares what does not depend on the column (drafts' keys, decays, scores) once, while its
// part of the state comes to shared memory asynchronously. The blocks of an SM are in different phases and keep the
// memory busy for one another.
//
//   kG_t, qG_t   k_t, q_t decayed from the drafts' start through t, products of alpha walking back over the path
//   A[t,i], P[t,i]   k_t, q_t decayed from i through t, times k_i: the same walk stopped at i
//   X = kG S, O = qG S   [T,V]: products of 16 rows (8 drafts' kG, then their qG) with the state: m16n8k8 in tf32
//   u_t = beta_t (v_t - X_t - sum_i A[t,i] u_i)    o_t = O_t + (k_t . q_t) u_t + sum_i P[t,i] u_i
//
// A number is the sum of two in tf32, big + small; three products (small * small is left out) give 21 bits. A bf16
// state is one tf32 number and needs two products. Sums over K are made in four quarters, each with its own
// accumulator, added in one order: the bits of a column are the same whether one warp adds up all its quarters or
// each quarter has a warp. They depend on nothing else.
//
// Recorded tokens are applied first (entries.h): those of the last round also to the state in memory, those that a
// ring holds committed but not applied in registers only. The bits are those of a separate flush before.
//
// Threads: first, a warp has a draft or two; then 16 columns and K or a part of it; in the end a thread has a column.
// On its fast path verify has few enough registers for three blocks of eight warps.
#include "cuda/drafts/mma_block.h"

namespace kda::cuda {
namespace mma {
namespace {

// Blocks that an SM has registers for.
template <class P>
constexpr int blocks_of_SM(Traits call) {
  return call.fast && !kFlushes<P> ? 3 : call.max_drafts == 8 ? 2 : 1;
}

template <class Call, class P>
__global__ void __launch_bounds__(kThreads, blocks_of_SM<P>(Call::kValue))
    mma_kernel(const __grid_constant__ Blocks blocks, const __grid_constant__ Memory memory,
               const __grid_constant__ Parts<P> call) {
  extern __shared__ float4 dynamic[];
  MmaBlock<Call, P>(blocks, memory, call, dynamic).run();
}

// Shared memory of a block with so many columns.
template <class State>
int bytes_of(const Memory& m) {
  return Tile<State, kMostK>::bytes(m.columns) + m.floats * static_cast<int>(sizeof(float));
}

template <class P>
MmaPlan plan_of(const P& p, const Parts<P>& x) {
  MmaCall call{p.N * p.HV, p.V, room_of(p), fast_path_of(x)};
  // Kernels on rings are those of few drafts; a bf16 state with a convolution has none.
  const bool known = call.fast == FastPath::kPlain || (call.fast == FastPath::kConv && x.state_dtype == KDA_F32);
  if (!known || call.room > 8) call.fast = FastPath::kNone;
  const int device = p.args.exec.device_id, most = shared_memory_of_block(device);
  return mma_plan(call, multiprocessors(device), [&](int64_t columns) {
    const bool general = call.fast == FastPath::kNone, two_bytes = !general && x.state_dtype == KDA_BF16;
    const Memory m(general ? static_cast<int>(call.room) : 8, static_cast<int>(columns), x.sizes);
    return (two_bytes ? bytes_of<__nv_bfloat16>(m) : bytes_of<float>(m)) <= most;
  });
}

template <Traits kCall, class P>
void launch_kernel(const P& p, const Parts<P>& x, const MmaPlan& plan) {
  const int64_t tiles = p.V / plan.columns;
  const Memory m(kCall.fast ? kCall.max_drafts : static_cast<int>(room_of(p)), static_cast<int>(plan.columns), x.sizes);
  constexpr int kHinting = kFlushes<P> ? 1000 : 2;  // blocks of an SM that give hints: all of them for entries
  const Hints hints = hints_of(p, 1, x.state_dtype, tiles, kHinting, plan.hinted, p.args.exec.device_id);
  launch<mma_kernel<TypeOf<kCall>, P>>(p.args.exec, Blocks::grid(p, tiles, 1), kThreads, bytes_of<Element<kCall>>(m),
                                       Blocks(p, tiles, hints), m, x);
}

template <class P>
void launch_mma(const P& p) {
  if ((p.N + p.varlen) * p.HV == 0) return;
  const DeviceGuard device(p.args.exec.device_id);
  const Parts<P> x(p);
  const MmaPlan plan = plan_of(p, x);
  const bool f32 = x.state_dtype == KDA_F32;
  if (plan.max_drafts == 16) return launch_kernel<general(16)>(p, x, plan);
  if (plan.path == FastPath::kNone) return launch_kernel<general(8)>(p, x, plan);
  if constexpr (!kFlushes<P>)
    if (plan.path == FastPath::kConv) return launch_kernel<Traits{true, KDA_F32, 8, true}>(p, x, plan);
  f32 ? launch_kernel<Traits{true, KDA_F32, 8}>(p, x, plan) : launch_kernel<Traits{true, KDA_BF16, 8}>(p, x, plan);
}

}  // namespace
}  // namespace mma

const char* drafts_mma_why_not(const VerifyProblem& p) { return wide_why_not(p); }
const char* drafts_mma_why_not(const FlushVerifyProblem& p) { return wide_why_not(p); }

std::string drafts_mma_form(const VerifyProblem& p) { return text(mma::plan_of(p, Parts<VerifyProblem>(p))); }
std::string drafts_mma_form(const FlushVerifyProblem& p) { return text(mma::plan_of(p, Parts<FlushVerifyProblem>(p))); }

void drafts_mma(const VerifyProblem& p) { mma::launch_mma(p); }
void drafts_mma(const FlushVerifyProblem& p) {
  roll_convolution(p);
  mma::launch_mma(p);
  store_cursors(p);
}

}  // namespace kda::cuda
