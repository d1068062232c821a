// The consumer: a warpgroup that carries 64 value columns of a head's state from chunk to chunk, in registers.
//
// It works on transposes: S^T is 64 columns x 128 channels, so every left operand is in registers and every right one
// in a stage. The accumulators of 16 columns, rounded and packed in pairs, are the left operand of the next product.
//   [R^T | O^T] = S^T [kG; qG]^T     R^T = V^T - R^T
//   U^T = R^T (T diag(beta))^T       S^T = S^T diag(ell) + U^T kg       O^T += U^T Aqk^T
// Columns of (v, S) have scales of their own: column_scale.h.
#pragma once
#include "cuda/engine/outputs.h"

namespace kda::cuda::engine {

// Scans chunks and stores their outputs. It has 64 of the columns; the consumer of the pair's other CTA has the
// others. kValues_: if false, v is 0, whatever is in the stage. kWarpsOfEach: for how many warps each warp releases
// chunks of scan(). kTraining: states before chunks, or U, may be kept. (That code stands in the inner loop, so other
// calls have kernels without it.)
template <class T, bool kTraining, bool kValues_ = true, unsigned kWarpsOfEach = 1>
class Consumer : public Outputs<T, kTraining, kValues_> {
  using Base = Outputs<T, kTraining, kValues_>;

 public:
  static constexpr bool kValues = kValues_, kReversed = false;
  static constexpr bool kOpens = !kTraining;  // may segments begin with an opening? (It would cost registers.)
  __device__ Consumer(const Call& call, unsigned memory) : Base(call, memory) {}

 protected:
  using Base::has_columns, Base::place;
  using Base::load_values, Base::clear_values, Base::keep_within, Base::sends_U, Base::stage_U;
  using Base::prepared, Base::prepare, Base::spoil, Base::fits, Base::pack, Base::inverse;
  using Base::release_values, Base::store_corrections, Base::stores, Base::stage_outputs, Base::store_outputs,
      Base::store_last, Base::vote;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_;
  using typename Base::Place;
  struct Nothing {};
  // Scans tokens first .. end - 1 of a value head, in chunks `number` and on of the ring. begun() is called once,
  // while the first products run.
  __device__ __forceinline__ void scan(const Item& item, unsigned first, unsigned end, unsigned& number) {
    scan(item, first, end, number, Nothing{});
  }
  template <class Begun>
  __device__ __forceinline__ void scan(const Item& item, unsigned first, unsigned end, unsigned& number,
                                       const Begun& begun) {
    // What a forward for training keeps is stored within the inner loop; other states are rare.
    const bool eights = kTraining && Base::befores_have_room(first, end) && Base::befores_in_eights();
    char* before = eights ? Base::before_at(first) : nullptr;
    const bool keeps = has_columns() && (call_.states.kept[kCheckpoint].data ||
                                         (kTraining && call_.states.kept[kBefore].data && !eights));
    unsigned out[2][4];      // outputs of the chunk before
    unsigned kept = number;  // the first chunk whose v is not released, because U may not have left
    const unsigned begin =
        first - number * kRows;  // the token of chunk 0: what follows from a chunk's number is uniform
    // Rare work stays out of the inner loop, so that its code fits the instruction cache.
    for (unsigned t = first; t < end;) {
      const bool again = prepared();
      unsigned stop = end / kRows * kRows;
      if (t == stop) ring_.wait_full(number), clear_values(ring_.stage(number), end - t), stop = end;
      if (keeps && t % kChunk == 0 && !again) keep_within(item, t, eights);
      if (keeps) stop = min(stop, (t / unsigned{kChunk} + 1) * unsigned{kChunk});
      const bool plain = Base::is_plain();
      if (kTraining && eights && !plain) {
        if (t % kChunk == 0) Base::template store_before<true>(before);
        stop = min(stop, (t / unsigned{kChunk} + 1) * unsigned{kChunk});
      }
      // Uniform: otherwise the compiler makes products wait for each other.
      const bool stores_before = kTraining && __all_sync(kAll, eights && plain);
      const unsigned odd = kTraining ? uniform(begin / kRows % 2) : 0;
      if (again) stop = min(stop, t + kRows);
      const Place at = place();
      const Place to{uniform(at.b), uniform(at.t0 + begin - kRows), uniform(at.hv)};
      bool went, full = false;
      do {
        lane_ = opaque(lane_);  // addresses are computed again: there are no registers to keep them
        const unsigned n = uniform(number), stage = ring_.stage(n);
        if (!full) ring_.wait_full(number);
        Chunk<true> x;
        start_state_products(stage, x);
        if constexpr (!std::is_same_v<Begun, Nothing>) {
          if (t == first && !again) [[unlikely]]
            begun();
        }
        // TMA has read the output tile. All warps know that after the vote, and may write to it.
        if (stores()) ptx::wait_for_bulk_reads<0>();
        went = vote(x.left, x.v, t % kChunk == 0, again);
        if (!went) break;
        if (stores_before && n % 2 == odd) Base::template store_before<false>(before);
        if (sends_U() && number - kept == 2) release_values(kept++);
        start_corrections(stage, x);
        if (t > first) stage_outputs(out);
        ptx::wait_for_products<0>();
        if (kTraining && !sends_U() && call_.v_new.data) store_corrections(t, end, x.U);
        start_update(stage, x);
        if (sends_U()) stage_U(stage, x.U, plain);
        if (t > first) store_outputs(to, n * kRows, ring_.stage(n - 1));
        full = ring_.is_full(number + 1);
        ptx::wait_for_products<0>();
        __syncwarp();  // all lanes have read the stage
        if (lane_ == 0) ring_.release(number, kWarpsOfEach);
        round_outputs(x, out);
        if (kTraining && t % kChunk == 0) before += call_.states.kept[kBefore].stride0;
        t += kRows, ++number;
      } while (t < stop);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), t % kChunk == 0);
      else if (again) spoil(out);
    }
    if (end <= first) return;
    const unsigned last = (end - first - 1) / kRows * kRows + first;
    store_last(out, last, end - last, ring_.stage(number - 1));
    if (!sends_U()) return;
    ptx::wait_for_bulk_reads<0>();
    __syncwarp();  // all lanes know it
    for (; kept < number; ++kept) release_values(kept);
  }
  // Scans the ring's chunks from `number` to `chunks`, for the state alone. v of tokens behind a sequence must have
  // been cleared. The last kHeld chunks are not released.
  template <unsigned kHeld>
  __device__ __forceinline__ void scan_state(unsigned chunks, unsigned number = 0, unsigned = 0) {
    while (number < chunks) {
      const bool again = prepared();
      unsigned none[2][4];
      bool went, full = false;
      do {
        lane_ = opaque(lane_);
        const unsigned stage = uniform(ring_.stage(number));
        if (!full) ring_.wait_full(number);
        Chunk<false> x;
        start_state_products(stage, x);
        went = vote(x.left, x.v, number * kRows % kChunk == 0, again);
        if (!went) break;
        start_corrections(stage, x);
        ptx::wait_for_products<0>();
        start_update(stage, x);
        full = ring_.is_full(number + 1);
        ptx::wait_for_products<0>();
        __syncwarp();  // all lanes have read the stage
        if (lane_ == 0 && number + kHeld < chunks) Base::release(number);
        ++number;
      } while (!again && number < chunks);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), number * kRows % kChunk == 0);
      else if (again) spoil(none);
    }
  }

  // ---- a chunk: its steps in the order in which they run. Products that a step starts run under what follows it. ----

  template <bool kOutputs>
  struct Chunk {
    unsigned v[2][4], left[8][4];              // left: S^T in units, packed
    float both[kOutputs ? kRows : kRows / 2];  // S^T kG^T, then S^T qG^T
    float U[kRows / 2], O[kRows / 2];
    unsigned R[2][4];  // V - kG S; from start_update() on U, in fp16
  };

  template <bool kOutputs>
  __device__ __forceinline__ void start_state_products(unsigned stage, Chunk<kOutputs>& x) const {
    load_values(stage, x.v);
    pack(x.left);
    const uint64_t kG = ptx::matrix_at(stage + Stage::k, 16, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      ptx::wgmma<__half, false>(x.both, x.left[k], ptx::further(kG, k / 4 * kHalf + k % 4 * 32), k > 0);
    ptx::commit_products();
  }
  // Starts U = T R. The state decays meanwhile.
  template <bool kOutputs>
  __device__ __forceinline__ void start_corrections(unsigned stage, Chunk<kOutputs>& x) {
    float2 ell[16];
    Base::load_decays(stage, ell);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = floats_of<T>(x.v[j / 4][j % 4]);
      const float scale = inverse(unit_[j % 2]);
      x.R[j / 4][j % 4] =
          kValues ? ptx::pack<__half>(fmaf(two.x, scale, -x.both[2 * j]), fmaf(two.y, scale, -x.both[2 * j + 1]))
                  : ptx::pack<__half>(x.both[2 * j], x.both[2 * j + 1]) ^ 0x80008000;  // both signs
    }
    const uint64_t T_beta = ptx::matrix_at(stage + Stage::T, 16, 512, ptx::Swizzle::k64);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, false>(x.U, x.R[k], ptx::further(T_beta, 32 * k), k > 0);
    ptx::commit_products();
    Base::decay(ell);
  }
  // Starts S += kg^T U and, for outputs, Aqk U.
  template <bool kOutputs>
  __device__ __forceinline__ void start_update(unsigned stage, Chunk<kOutputs>& x) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x.R[j / 4][j % 4] = ptx::pack<__half>(x.U[2 * j], x.U[2 * j + 1]);
    const uint64_t kg = ptx::matrix_at(stage + Stage::kg, kHalf, 1024, ptx::Swizzle::k128);
    const uint64_t Aqk = ptx::matrix_at(stage + Stage::Aqk, 16, 512, ptx::Swizzle::k64);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, true>(S_, x.R[k], ptx::further(kg, k * 16 * kRowBytes), true);
    if constexpr (kOutputs)
#pragma unroll
      for (int k = 0; k < 2; ++k) ptx::wgmma<__half, false>(x.O, x.R[k], ptx::further(Aqk, 32 * k), k > 0);
    ptx::commit_products();
  }
  __device__ __forceinline__ void round_outputs(const Chunk<true>& x, unsigned (&out)[2][4]) const {
    const float scale[2] = {call_.x.scale * unit_[0], call_.x.scale * unit_[1]};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      out[j / 4][j % 4] = ptx::pack<T>((x.O[2 * j] + x.both[16 + 2 * j]) * scale[j % 2],
                                       (x.O[2 * j + 1] + x.both[16 + 2 * j + 1]) * scale[j % 2]);
  }
};

}  // namespace kda::cuda::engine
