// The consumer on Blackwell: a warpgroup that carries 64 value columns of a head's state from chunk to chunk.
//
// It works on transposes, as the consumer on Hopper does: S^T is 64 columns x 128 channels. Left operands and sums of
// its products are in tensor memory (products.h), right operands in a stage of the ring.
//   [R^T | O^T] = S^T [kG; qG]^T     R^T = V^T - R^T
//   U^T = R^T (T diag(beta))^T       S^T = S^T diag(ell) + U^T kg       O^T += U^T Aqk^T
// A state waits in registers while a chunk begins: it is rounded there, decays, and goes to tensor memory, where the
// last product adds to it. Columns of (v, S) have scales of their own: engine/column_scale.h.
#pragma once
#include "cuda/engine/blackwell_products.h"
#include "cuda/engine/outputs.h"

namespace kda::cuda::sm100 {

using engine::Item, engine::kGroup, engine::kRowBytes, engine::kRows, engine::opaque, engine::Stage, engine::uniform;

// Scans chunks and stores their outputs. It has 64 of the columns; the consumer of the pair's other CTA has the
// others. kValues_: if false, v is 0, whatever is in the stage: then it is a kernel's second consumer, and scans for
// the state alone. Others can keep states before chunks, and U. kWarpsOfEach: for how many warps each warp releases
// chunks of scan().
template <class T, bool kValues_ = true, unsigned kWarpsOfEach = 1>
class Consumer : public engine::Outputs<T, kValues_, kValues_> {
  using Base = engine::Outputs<T, kValues_, kValues_>;

 public:
  static constexpr bool kValues = kValues_, kReversed = false, kOpens = true;
  __device__ Consumer(const engine::Call& call, unsigned memory) : Base(call, memory), products_(memory) {}

 protected:
  using Base::call_, Base::lane_, Base::ring_, Base::S_, Base::unit_;
  using Base::has_columns, Base::place, Base::release_values, Base::sends_U, Base::store_corrections, Base::stores;
  using typename Base::Place;
  static constexpr bool kInTensorMemory = true;

  // Scans tokens first .. end - 1 of a value head, in chunks `number` and on of the ring. (PairConsumer also gives a
  // function for states that come by TMA. Here none do.)
  template <class Begun = int>
  __device__ __forceinline__ void scan(const Item& item, unsigned first, unsigned end, unsigned& number,
                                       const Begun& = {}) {
    const bool keeps = has_columns() && (call_.states.kept[kCheckpoint].data || call_.states.kept[kBefore].data);
    Course x{};
    x.kept = number, x.begin = first - number * kRows;
    for (unsigned t = first; t < end;) {
      const bool again = Base::prepared();
      if (end - t < kRows) ring_.wait_full(number), Base::clear_values(ring_.stage(number), end - t);
      if (keeps && t % kChunk == 0 && !again) Base::keep_within(item, t, false);
      if (!scan_chunk(t, end, number, again, t > first, x)) {
        Base::prepare(opaque(ring_.stage(number)), t % kChunk == 0);
        continue;
      }
      if (again) Base::spoil(x.out);
      t += kRows, ++number;
    }
    if (end <= first) return;
    const unsigned last = (end - first - 1) / kRows * kRows + first;
    Base::store_last(x.out, last, end - last, ring_.stage(number - 1));
    if (!sends_U()) return;
    ptx::wait_for_bulk_reads<0>();
    __syncwarp();  // all lanes know it
    for (; x.kept < number; ++x.kept) release_values(x.kept);
  }
  // Scans the ring's chunks below `chunks`, for the state alone. The last kHeld chunks are not released.
  template <unsigned kHeld>
  __device__ __forceinline__ void scan_state(unsigned chunks) {
    for (unsigned number = 0; number < chunks;) {
      const bool again = Base::prepared(), first = number * kRows % kChunk == 0;
      if (!scan_chunk_of_map(number, first, again)) {
        Base::prepare(opaque(ring_.stage(number)), first);
        continue;
      }
      unsigned none[2][4];
      if (again) Base::spoil(none);
      if (lane_ == 0 && number + kHeld < chunks) Base::release(number);
      ++number;
    }
  }
  // Makes S^T M^T of a state whose numbers are sums of two bf16, as those of the map are: see SegmentConsumer::pass().
  // halves: where those of M^T are.
  __device__ __forceinline__ void multiply_by_map(const unsigned (&leading)[8][4], const unsigned (&rest)[8][4],
                                                  const unsigned (&halves)[2]) {
    products_.start_map(leading, rest, halves);
    products_.wait();
    products_.load_state(S_);
  }

 private:
  // What goes on from chunk to chunk.
  struct Course {
    unsigned out[2][4];  // outputs of the chunk before
    unsigned kept;       // the first chunk whose v is not released, because U may not have left
    unsigned begin;      // the token of chunk 0: what follows from a chunk's number is uniform
  };

  // Scans the chunk of tokens t and on. has_outputs: there is a chunk before, whose outputs are in x.out. Returns
  // false if scales do not fit: then nothing has changed.
  __device__ __forceinline__ bool scan_chunk(unsigned t, unsigned end, unsigned number, bool again, bool has_outputs,
                                             Course& x) {
    unsigned v[2][4];
    const unsigned n = uniform(number), stage = ring_.stage(n);
    if (!begin_chunk<true>(number, stage, t % kChunk == 0, again, v)) return false;
    if (sends_U() && number - x.kept == 2) release_values(x.kept++);
    const bool spoilt = decay(stage);
    products_.store_state(S_);
    if (has_outputs) Base::stage_outputs(x.out);
    products_.wait();
    start_corrections(stage, v);
    products_.wait();
    float U[kRows / 2];
    start_update<true>(stage, U);
    if (again || spoilt) [[unlikely]]
      spoil_corrections(stage, again, U);
    if (sends_U()) Base::stage_U(stage, U, Base::is_plain());
    else if (call_.v_new.data) store_corrections(t, end, U);
    const Place at = place();
    const Place to{uniform(at.b), uniform(at.t0 + x.begin - kRows), uniform(at.hv)};
    if (has_outputs) Base::store_outputs(to, n * kRows, ring_.stage(n - 1));
    products_.wait();
    products_.load_state(S_);
    round_outputs(x.out);
    if (lane_ == 0) ring_.release(number, kWarpsOfEach);  // all lanes have read the stage: before the last barrier
    return true;
  }
  // The same for the state alone, without outputs and without qG and Aqk, which may not be there.
  __device__ __forceinline__ bool scan_chunk_of_map(unsigned number, bool first, bool again) {
    unsigned v[2][4];
    const unsigned stage = uniform(ring_.stage(number));
    if (!begin_chunk<false>(number, stage, first, again, v)) return false;
    decay(stage);
    products_.store_state(S_);
    products_.wait();
    start_corrections(stage, v);
    products_.wait();
    float U[kRows / 2];
    start_update<false>(stage, U);
    products_.wait();
    products_.load_state(S_);
    return true;
  }
  // Starts the state's products with a chunk, and loads v. Returns false if scales do not fit.
  template <bool kOutputs>
  __device__ __forceinline__ bool begin_chunk(unsigned number, unsigned stage, bool first, bool again,
                                              unsigned (&v)[2][4]) {
    lane_ = opaque(lane_);  // addresses are computed again: there are no registers to keep them
    ring_.wait_full(number);
    Base::load_values(stage, v);
    unsigned left[8][4];
    Base::pack(left);
    products_.store_state_operand(left);
    // TMA has read the output tile. All warps know that after the vote, and may write to it.
    if (kOutputs && stores()) ptx::wait_for_bulk_reads<0>();
    if (!vote(left, v, first, again)) return false;
    products_.template start_state_products<kOutputs>(stage);
    return true;
  }

  // Do the units fit in all warps? Afterwards their operands are there, too.
  __device__ bool vote(const unsigned (&packed)[8][4], const unsigned (&v)[2][4], bool first, bool again) const {
    products_.before_sync();
    const bool fine = ptx::all_threads(Base::kBarrier, kGroup, again || Base::fits(packed, v, first));
    products_.after_sync();
    return fine;
  }
  // The state decays while the first products run. Returns whether the producer has made ell NaN, and rows of qG.
  __device__ __forceinline__ bool decay(unsigned stage) {
    float2 ell[16];
    Base::load_decays(stage, ell), Base::decay(ell);
    return ell[0].x != ell[0].x;
  }
  // Starts U = T R, with R = V - kG S.
  __device__ __forceinline__ void start_corrections(unsigned stage, const unsigned (&v)[2][4]) const {
    float predicted[kRows / 2];
    products_.load_predictions(predicted);
    unsigned R[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = engine::floats_of<T>(v[j / 4][j % 4]);
      const float scale = Base::inverse(unit_[j % 2]);
      R[j / 4][j % 4] =
          ptx::pack<__half>(fmaf(two.x, scale, -predicted[2 * j]), fmaf(two.y, scale, -predicted[2 * j + 1]));
    }
    products_.start_corrections(stage, R);
  }
  // Starts S += kg^T U and, for outputs, O += Aqk U. Returns U.
  template <bool kOutputs>
  __device__ __forceinline__ void start_update(unsigned stage, float (&U)[kRows / 2]) const {
    products_.load_corrections(U);
    unsigned packed[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) packed[j / 4][j % 4] = ptx::pack<__half>(U[2 * j], U[2 * j + 1]);
    products_.template start_update<kOutputs>(stage, packed);
  }
  // Makes U NaN from the first token on whose inputs were not finite. The producer has put zeros in the place of such
  // rows, and NaN in their rows of qG; again: prepare() has put zeros in the place of such a v.
  __device__ void spoil_corrections(unsigned stage, bool again, float (&U)[kRows / 2]) const {
    const unsigned q = ptx::load_shared16(stage + Stage::q + lane_ * kRowBytes) & 0x7fff;
    const unsigned rows = __ballot_sync(kAll, q > 0x7c00), first = rows ? __ffs(static_cast<int>(rows)) - 1u : kRows;
    const unsigned bad = again ? Base::bad() : kRows << 8 | kRows;
#pragma unroll
    for (unsigned j = 0; j < 16; ++j) {
      const unsigned token = j / 4 * 8 + lane_ % 4 * 2 + j % 2, from = bad >> 8 * (j / 2 % 2) & 0x7f;
      if (token >= min(from, first)) U[j] = __int_as_float(0x7fffffff);
    }
    __syncwarp();  // all lanes have read the rows
  }
  __device__ __forceinline__ void round_outputs(unsigned (&out)[2][4]) const {
    float O[kRows / 2];
    products_.load_outputs(O);
    const float scale[2] = {call_.x.scale * unit_[0], call_.x.scale * unit_[1]};
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j / 4][j % 4] = ptx::pack<T>(O[2 * j] * scale[j % 2], O[2 * j + 1] * scale[j % 2]);
  }

  Products<!kValues> products_;
};

}  // namespace kda::cuda::sm100
