// What a map of segments consists of: map.h.
#include "cuda/segment/map.h"

#include "cuda/call/launch.h"
#include "cuda/call/workspace.h"
#include "cuda/segment/pieces.h"

namespace kda::cuda {
namespace {

constexpr uint64_t kRow = kMaxSize * sizeof(float);  // bytes of a row of any dtype
constexpr int64_t kFewHeads = 32;                    // of which a GPU takes several pieces of a sequence at a time
constexpr unsigned kLongPieces = 8192;               // tokens, of more heads: in whole turns of CTA pairs

// Writes the identity, K x K, a row of zeros behind it, and where pieces begin, `numbers` of them and their end.
__global__ void __launch_bounds__(256)
    prepare_kernel(float* unit, unsigned K, int32_t* cuts, unsigned numbers, const __grid_constant__ Pieces pieces) {
  wait_for_stream();
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (unsigned i = first; i < K * K + unsigned{kMaxSize}; i += step) unit[i] = i < K * K && i % (K + 1) == 0 ? 1 : 0;
  for (unsigned i = first; cuts && i <= numbers; i += step) cuts[i] = static_cast<int32_t>(pieces.token(i));
}

// A tensor that is one row of n elements at every index. Its sizes are those of the row alone, so that the copy engine
// reads zeros at all other indices and writes nothing there.
kda_tensor row_at(char* data, int32_t dtype, int64_t n) {
  kda_tensor t{};
  t.data = data, t.dtype = dtype, t.ndim = 4;
  t.shape[0] = t.shape[1] = t.shape[2] = 1, t.shape[3] = n, t.stride[3] = 1;
  return t;
}

// What a call does, and the layout of its workspace: the identity, a row of zeros for v of M, a row for outputs that
// nobody reads; where pieces begin and their maps; what forward and backward need.
struct Plan {
  bool one_pass;    // for M and b
  unsigned tokens;  // of a piece
  bool cut;         // into pieces
  int64_t numbers;  // of pieces
  uint64_t zeros, nowhere, cuts, M, b, d, calls;

  Plan(const SegmentMapProblem& p, const SegmentKernels& kernels)
      : one_pass(kernels.maps != nullptr),
        tokens(p.HV <= kFewHeads ? Pieces::kTokens : kLongPieces),
        cut(p.T > tokens && (p.HV <= kFewHeads || one_pass)),
        numbers(cut ? Pieces::numbers(p, tokens) : 0) {
    uint64_t bytes = 0;
    const auto place = [&](int64_t size) {
      const uint64_t at = bytes;
      bytes += static_cast<uint64_t>(size);
      return at;
    };
    const auto floats = [&](int64_t count) { return place(static_cast<int64_t>(align_up(count * sizeof(float)))); };
    place(p.K * p.K * static_cast<int64_t>(sizeof(float)));
    zeros = place(kRow), nowhere = place(kRow);
    bytes = align_up(bytes);
    cuts = floats(cut ? numbers + 1 : 0), M = floats(numbers * p.HV * p.K * p.K);
    const int64_t states = numbers * p.HV * p.K * p.V;
    b = floats(present(p.args.b) ? states : 0), d = floats(present(p.args.d) ? states : 0);
    calls = bytes;
  }
};

// Row b of a tensor, as a tensor of one row.
kda_tensor row_of(kda_tensor t, int64_t b) {
  if (!present(t)) return t;
  t.data = static_cast<char*>(t.data) + b * t.stride[0] * dtype_size(t.dtype), t.shape[0] = 1;
  return t;
}

// The same call for the sequences of row b alone, which are one if there are no cu_seqlens.
SegmentMapProblem only_row(SegmentMapProblem p, int64_t b) {
  kda_segment_map_args& a = p.args;
  if (p.varlen) return p;
  p.B = p.N = 1;
  for (kda_tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.g, &a.in.beta, &a.d_o, &a.M, &a.b, &a.d}) *t = row_of(*t, b);
  return p;
}

// The maps of all pieces as a call of its own, in which each is a packed sequence. M is needed to merge them.
SegmentMapProblem pieces_of(SegmentMapProblem p, const Plan& plan) {
  kda_segment_map_args& a = p.args;
  char* const memory = static_cast<char*>(a.exec.workspace);
  const auto states = [&](uint64_t at) {
    return a.in.state_layout == KDA_STATE_V_FIRST ? dense(memory + at, KDA_F32, {plan.numbers, p.HV, p.V, p.K})
                                                  : dense(memory + at, KDA_F32, {plan.numbers, p.HV, p.K, p.V});
  };
  p.N = plan.numbers, p.varlen = true;
  a.in.cu_seqlens = dense(memory + plan.cuts, KDA_I32, {plan.numbers + 1});
  a.M = dense(memory + plan.M, KDA_F32, {plan.numbers, p.HV, p.K, p.K});
  if (present(a.b)) a.b = states(plan.b);
  if (present(a.d)) a.d = states(plan.d);
  return p;
}

// The calls that maps of sequences, or of pieces, consist of.
class Calls {
 public:
  Calls(const SegmentMapProblem& p, const Plan& plan, const SegmentKernels& kernels) : kernels_(kernels) {
    const kda_segment_map_args& a = p.args;
    char* const memory = static_cast<char*>(a.exec.workspace);
    const int32_t dtype = a.in.q.dtype;

    static_cast<Dims&>(b_) = p;
    b_.args.exec = a.exec, b_.args.exec.workspace = memory + plan.calls;
    b_.args.exec.flags |= KDA_BATCH_INVARIANT;  // nothing but pieces is cut
    b_.args.in = a.in, b_.args.states.hT = a.b, b_.args.h_every = 1;
    M_ = b_;
    M_.V = p.K, M_.args.in.v = row_at(memory + plan.zeros, dtype, p.K);
    M_.args.in.state_layout = KDA_STATE_K_FIRST;  // rows of M are channels of the state
    M_.args.states.hT = a.M;
    kda_tensor& h0 = M_.args.states.h0;  // the identity, for every sequence and head
    h0 = row_at(memory, KDA_F32, p.K);
    h0.shape[0] = p.N, h0.shape[1] = p.HV, h0.shape[2] = p.K, h0.stride[2] = p.K;

    static_cast<Dims&>(d_) = p;
    d_.args.exec = b_.args.exec, d_.args.in = a.in, d_.args.d_o = a.d_o, d_.args.dh0 = a.d;
    if (kernels.writes_outputs) {
      M_.args.o = row_at(memory + plan.nowhere, dtype, p.K), b_.args.o = row_at(memory + plan.nowhere, dtype, p.V);
      d_.args.dv = row_at(memory + plan.nowhere, KDA_BF16, p.V);
    }
    if (plan.cut) pieces_ = a.M;
    reverse_maps_ = present(a.d) && kernels.reverse_maps && kernels.takes_reverse_maps(d_);
  }

  // Calls f(call) for what M and b consist of, and for what d consists of. M of pieces whose d is wanted alone is left
  // to the latter, if that can make it.
  template <class F>
  void forward(const F& f) const {
    const kda_tensor &M = M_.args.states.hT, &b = b_.args.states.hT;
    if (kernels_.maps) return f(Maps<ForwardProblem>{b_, M});
    if (present(M)) f(M_);
    if (present(b)) f(b_);
  }
  template <class F>
  void reverse(const F& f) const {
    if (reverse_maps_) f(Maps<BackwardProblem>{d_, pieces_});
    else if (present(d_.args.dh0)) f(d_);
  }
  bool reverse_has_maps() const { return reverse_maps_; }

 private:
  const SegmentKernels& kernels_;
  ForwardProblem M_{}, b_{};
  BackwardProblem d_{};
  kda_tensor pieces_{};  // M of pieces, which d needs
  bool reverse_maps_;
};

// Which calls of `parts` are there, if p is what is wanted?
bool wants_forward(const SegmentMapProblem& p, const Plan& plan, const Calls& calls) {
  return present(p.args.M) || present(p.args.b) || (plan.cut && !calls.reverse_has_maps());
}

// Calls f(call) for all calls of the first row, or of all of them if they are not cut.
template <class F>
void each_call(const SegmentMapProblem& p, const SegmentKernels& kernels, const F& f) {
  const Plan plan(p, kernels);
  const Calls calls(plan.cut ? pieces_of(only_row(p, 0), plan) : p, plan, kernels);
  if (wants_forward(p, plan, calls)) calls.forward(f);
  calls.reverse(f);
}

// (M^T of the reverse pass takes the place of M of the forward one, which is merged by then.)
void run_pieces(const SegmentMapProblem& p, const Plan& plan, const SegmentKernels& kernels) {
  const kda_segment_map_args& a = p.args;
  const SegmentMapProblem parts = pieces_of(p, plan);
  const Calls calls(parts, plan, kernels);
  const auto run = [&](const auto& call) { kernels.run(call); };
  const Pieces pieces(p, a.in, plan.tokens);
  if (wants_forward(p, plan, calls)) calls.forward(run);
  if (present(a.M)) merge_pieces(p, pieces, {parts.args.M, {}, a.M, KDA_STATE_K_FIRST, false, false});
  if (present(a.b)) merge_pieces(p, pieces, {parts.args.M, parts.args.b, a.b, a.in.state_layout, false, false});
  if (!present(a.d)) return;
  calls.reverse(run);
  const bool transposed = !calls.reverse_has_maps();  // those are M^T already
  merge_pieces(p, pieces, {parts.args.M, parts.args.d, a.d, a.in.state_layout, true, transposed});
}

}  // namespace

const char* segment_why_not(const SegmentMapProblem& p, const SegmentKernels& kernels) {
  const char* reason = device_why_not(p.args.exec);
  if (!reason && has_f64(p)) reason = "float64 runs on `reference` only";
  if (!reason && p.T > INT32_MAX) reason = "takes at most 2^31 - 1 tokens a row";
  if (!reason && p.N * p.HV * divide_up(kMaxSize, 16) > INT32_MAX) reason = "takes at most 2^27 sequences and heads";
  each_call(p, kernels, [&](const auto& call) {
    if (!reason) reason = kernels.why_not(call);
  });
  return reason;
}

uint64_t segment_workspace(const SegmentMapProblem& p, const SegmentKernels& kernels) {
  uint64_t most = 0;  // one call after the other has it
  each_call(p, kernels, [&](const auto& call) { most = std::max(most, kernels.workspace(call)); });
  return Plan(p, kernels).calls + most;
}

void run_segment(const SegmentMapProblem& p, const SegmentKernels& kernels) {
  const kda_exec& exec = p.args.exec;
  const DeviceGuard device(exec.device_id);
  const Plan plan(p, kernels);
  auto* const memory = static_cast<char*>(exec.workspace);
  const auto blocks = static_cast<unsigned>(divide_up(p.K * p.K + kMaxSize, 1024));
  if (plan.cut || (present(p.args.M) && !plan.one_pass))
    launch<prepare_kernel>(exec, dim3(blocks), 256, 0, reinterpret_cast<float*>(memory), static_cast<unsigned>(p.K),
                           plan.cut ? reinterpret_cast<int32_t*>(memory + plan.cuts) : nullptr,
                           static_cast<unsigned>(plan.numbers), Pieces(p, p.args.in, plan.tokens));
  if (!plan.cut) return each_call(p, kernels, [&](const auto& call) { kernels.run(call); });
  for (int64_t b = 0; b < (p.varlen ? 1 : p.B); ++b) run_pieces(only_row(p, b), plan, kernels);
}

std::string segment_form(const SegmentMapProblem& p, const SegmentKernels& kernels) {
  const Plan plan(p, kernels);
  return plan.cut ? str("in pieces of ", plan.tokens, " tokens") : "in one piece";
}

}  // namespace kda::cuda
