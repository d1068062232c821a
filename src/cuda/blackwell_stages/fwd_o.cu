// F5 on Blackwell (sm_100a), for K and V of 128 and 64 in bf16: o = scale q E S + Aqk v_new. It has been emulated, and
// has never run on a GPU. A block has a chunk of a value head. All that it reads in bulk comes at once, by TMA; two
// blocks share an SM, so that one multiplies and stores while the other waits for its tiles.
//
//   wait for the tiles; q becomes scale q E; Aqk loses what is above its diagonal     barrier: operands are there
//   tcgen05.mma: O = (scale q E) S, O += Aqk v_new; commit; wait
//   O, rounded, to the place of q                                                     barrier: o is there
//   o to memory
#include "contract/stages.h"
#include "cuda/blackwell_stages/declarations.h"
#include "cuda/blackwell_stages/tiles.h"
#include "cuda/stages/boxes.h"
#include "cuda/stages/declarations.h"

namespace kda::cuda {
namespace sm100 {

// Tiles are swizzled (tiles.h).
struct alignas(1024) OutputShared {
  WideTile q;  // then scale q E, then o
  WideTile v_new;
  WideState S;          // V-first: a line for each column. K-first: a line for each channel
  WideHalf G[4];        // f32: 32 channels each
  WideHalf Aqk;         // 64 columns
  uint64_t full, done;  // mbarriers: all tiles are there; products are done
  unsigned tensors;     // the address of tensor memory
};
static_assert(2 * (sizeof(OutputShared) + 1024) <= 228 * 1024, "two blocks share an SM");
struct OutputAt {
  static constexpr unsigned tensors = offsetof(OutputShared, tensors), done = offsetof(OutputShared, done);
  static constexpr unsigned full = offsetof(OutputShared, full), v_new = offsetof(OutputShared, v_new);
  static constexpr unsigned q = offsetof(OutputShared, q), G = offsetof(OutputShared, G);
  static constexpr unsigned S = offsetof(OutputShared, S), Aqk = offsetof(OutputShared, Aqk);
};
constexpr unsigned kOutputColumns = 128;  // of tensor memory: o in f32. Row 16 w + i is in lane 32 w + i

struct OutputMaps {
  CUtensorMap q, v_new, G, Aqk, h;
};
struct OutputCall {
  Chunks chunks;
  Rows o;
  int64_t h_rows;
  unsigned HV, group, K, V;
  float scale;
  bool v_first;
};

// What a thread does with its block's chunk.
class OutputChunk {
 public:
  __device__ OutputChunk(const OutputCall& call, const OutputMaps& maps, const ChunkAt& at, unsigned hv)
      : c_(call), maps_(maps), at_(at), hv_(hv), base_(ptx::shared_address(shared_memory())) {}

  __device__ void run(int64_t state) const {
    if (Tensors::is_issuer()) fetch(static_cast<unsigned>(state));
    Tensors tensors(base_ + OutputAt::tensors, base_ + OutputAt::done, kOutputColumns);
    ptx::wait_barrier(base_ + OutputAt::full, 0);
    decay_queries();
    mask_scores();
    if (at_.rows < static_cast<int>(kChunk)) clear_tail(base_ + OutputAt::v_new, rows(), c_.V);
    ptx::fence_shared_for_async();  // products read what was written
    __syncthreads();                // operands are there
    if (Tensors::is_issuer() && ptx::elect()) start_products(tensors);
    tensors.wait();
    for (unsigned part = 0; part < c_.V / kPartSize; ++part) {
      float O[32];
      ptx::load_tmem_fragments(O, tensors.own(part * kPartSize)), ptx::wait_for_tmem_loads();
      put_rows(base_ + OutputAt::q + part * kWideHalf, threadIdx.x / 32 * 16, O);
    }
    __syncthreads();  // o is there
    store_rows(base_ + OutputAt::q, c_.o.at(at_.b, at_.t0, hv_), c_.o.token, rows(), c_.V);
  }

 private:
  __device__ unsigned rows() const { return static_cast<unsigned>(at_.rows); }

  // Starts all copies. By the first warp.
  __device__ void fetch(unsigned state) const {
    if (!ptx::elect()) return;
    const unsigned full = base_ + OutputAt::full, K = c_.K, V = c_.V;
    ptx::init_barrier(full, 1);
    ptx::fence_barriers();
    ptx::arrive_expecting(full, kChunk * (6 * K + 2 * V + 2 * kChunk) + 2 * K * V);
#pragma unroll 1
    for (unsigned i = 0; i < K / 64; ++i) fetch_tile(OutputAt::q + i * kWideHalf, maps_.q, 64 * i, hv_ / c_.group);
#pragma unroll 1
    for (unsigned i = 0; i < K / 32; ++i) fetch_tile(OutputAt::G + i * kWideHalf, maps_.G, 32 * i, hv_);
    const unsigned parts = (c_.v_first ? K : V) / 64;
#pragma unroll 1
    for (unsigned i = 0; i < parts; ++i)
      ptx::copy_tile(base_ + OutputAt::S + i * kStateHalf, maps_.h, 64 * i, 0, hv_, state, full);
    fetch_tile(OutputAt::Aqk, maps_.Aqk, 0, hv_);
#pragma unroll 1
    for (unsigned i = 0; i < V / 64; ++i) fetch_tile(OutputAt::v_new + i * kWideHalf, maps_.v_new, 64 * i, hv_);
  }
  __device__ void fetch_tile(unsigned to, const CUtensorMap& map, unsigned first, unsigned head) const {
    ptx::copy_tile(base_ + to, map, first, head, static_cast<unsigned>(at_.t0), static_cast<unsigned>(at_.b),
                   base_ + OutputAt::full);
  }

  __device__ float factor(unsigned G) const { return c_.scale * ptx::exp2(__uint_as_float(G)); }
  __device__ static unsigned scaled(unsigned two, float x, float y) {
    return ptx::pack<bf16>(__uint_as_float(two << 16) * x, __uint_as_float(two & 0xffff0000u) * y);
  }
  // q becomes scale q E: eight channels of a token at a time. Neighbouring lanes have neighbouring tokens, and no two
  // of eight the same banks.
  __device__ void decay_queries() const {
    for (unsigned i = threadIdx.x; i < kChunk * c_.K / 8; i += kGroup) {
      const unsigned row = i % kChunk, piece = i / kChunk, at = base_ + OutputAt::q + swizzled(row, piece, kWideHalf);
      const unsigned G = base_ + OutputAt::G;
      const uint4 q = ptx::load_shared4(at), low = ptx::load_shared4(G + swizzled(row, 2 * piece, kWideHalf)),
                  high = ptx::load_shared4(G + swizzled(row, 2 * piece + 1, kWideHalf));
      ptx::store_shared4(
          at, make_uint4(scaled(q.x, factor(low.x), factor(low.y)), scaled(q.y, factor(low.z), factor(low.w)),
                         scaled(q.z, factor(high.x), factor(high.y)), scaled(q.w, factor(high.z), factor(high.w))));
    }
  }
  // Aqk above its diagonal may hold anything.
  __device__ void mask_scores() const {
    for (unsigned i = threadIdx.x; i < kChunk * kChunk / 8; i += kGroup) {
      const unsigned row = i % kChunk, piece = i / kChunk, at = base_ + OutputAt::Aqk + swizzled(row, piece, 0);
      if (8 * piece + 7 <= row) continue;
      const uint4 x = ptx::load_shared4(at);
      const auto kept = [&](unsigned two, unsigned column) {
        return column > row ? 0 : column == row ? two & 0xffff : two;
      };
      ptx::store_shared4(at, make_uint4(kept(x.x, 8 * piece), kept(x.y, 8 * piece + 2), kept(x.z, 8 * piece + 4),
                                        kept(x.w, 8 * piece + 6)));
    }
  }
  __device__ void start_products(const Tensors& tensors) const {
    const unsigned S = base_ + OutputAt::S;
    tensors.multiply(0, Operand::of_rows(base_ + OutputAt::q, kWideHalf),
                     c_.v_first ? Operand::of_rows(S, kStateHalf) : Operand::of_lines(S, kStateHalf), kChunk, c_.V,
                     c_.K / kStepSize, false);
    tensors.multiply(0, Operand::of_rows(base_ + OutputAt::Aqk, 0),
                     Operand::of_lines(base_ + OutputAt::v_new, kWideHalf), kChunk, c_.V, kChunk / kStepSize, true);
    tensors.commit();
  }

  const OutputCall& c_;
  const OutputMaps& maps_;
  const ChunkAt& at_;
  const unsigned hv_, base_;
};

}  // namespace sm100

namespace {

using Problem = StageProblem<kda_stage_fwd_o_args>;

__global__ void __launch_bounds__(sm100::kGroup, 2)
    output_kernel(const __grid_constant__ sm100::OutputCall call, const __grid_constant__ sm100::OutputMaps maps) {
  wait_for_stream();
  stages::ChunkAt at;
  const unsigned hv = blockIdx.x % call.HV;
  if (!call.chunks.find(blockIdx.x / call.HV, at)) return;
  if (!at.owned) return stages::zero_rows(call.o, at, hv, static_cast<int>(call.V));
  const int64_t state = call.chunks.first_row(at.n) + at.index;
  if (state >= call.h_rows) return;  // cu_seqlens are not checked
  sm100::OutputChunk(call, maps, at, hv).run(state);
}

}  // namespace

const char* blackwell_stages_fwd_o_why_not(const Problem& p) {
  const kda_stage_fwd_o_args& a = p.args;
  if (const char* reason = stage_why_not(p)) return reason;
  if (const char* reason = blackwell_why_not(a.exec.device_id)) return reason;
  if (!sm100::is_stage_size(p.K) || !sm100::is_stage_size(p.V)) return "takes K and V of 64 and 128";
  for (const kda_tensor* t : {&a.q, &a.v_new, &a.Aqk, &a.h, &a.o})
    if (t->dtype != KDA_BF16) return "takes q, v_new, Aqk, h and o in bf16";
  if (p.B * p.T * p.HV == 0) return nullptr;
  for (const kda_tensor* t : {&a.q, &a.v_new, &a.G, &a.Aqk, &a.h})
    if (!stages::takes_boxes(*t)) return "takes inputs with rows at multiples of 16 bytes";
  return stages::rows_of(a.o).wide ? nullptr : "takes o with rows at multiples of 16 bytes";
}

void blackwell_stages_fwd_o(const Problem& p) {
  const kda_stage_fwd_o_args& a = p.args;
  if (p.B * p.T * p.HV == 0) return;
  const DeviceGuard device(a.exec.device_id);
  sm100::OutputCall c{.chunks = stages::Chunks(p, p.in.cu_seqlens), .o = stages::rows_of(a.o), .h_rows = a.h.shape[0]};
  c.HV = static_cast<unsigned>(p.HV), c.group = static_cast<unsigned>(p.group());
  c.K = static_cast<unsigned>(p.K), c.V = static_cast<unsigned>(p.V);
  c.scale = p.in.scale, c.v_first = p.in.state_layout == KDA_STATE_V_FIRST;
  const int64_t lines = c.v_first ? p.V : p.K;
  const sm100::OutputMaps maps{stages::boxes_of_tokens(a.q), stages::boxes_of_tokens(a.v_new),
                               stages::boxes_of_tokens(a.G), stages::boxes_of_tokens(a.Aqk),
                               stages::boxes_of_states(a.h, lines)};
  launch<output_kernel>(a.exec, dim3(static_cast<unsigned>(c.chunks.count * p.HV)), sm100::kGroup,
                        sizeof(sm100::OutputShared), c, maps);
}

}  // namespace kda::cuda
