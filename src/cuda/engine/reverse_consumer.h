// The consumer of the reverse scan: a warpgroup that carries 64 value columns of dS, the gradient of a head's state,
// from the last chunk to the first, in registers.
//
// It is the consumer of the forward (consumer.h), mirrored: what the producer makes is the same, v is dO, outputs are
// dv, and all maps are transposed.
//   dU^T = (s dO)^T Aqk + dS^T kg^T     dv^T = dU^T T diag(beta)
//   dS^T = dS^T diag(ell) + (s dO)^T qG - dv^T kG
// s is the scale. Columns of (s dO, dS) have scales of their own, with the bounds of (v, S): the maps are transposed,
// so they have the same norms, and q is no longer than 1 (takes_reverse()).
//
// For the rest of backward it leaves dS behind every 64 tokens, as the forward leaves S before them.
#pragma once
#include "cuda/engine/outputs.h"

namespace kda::cuda::engine {

// Scans chunks and stores dv. It has 64 of the columns; the consumer of the pair's other CTA has the others. kValues_
// and kWarpsOfEach: as in Consumer.
template <class T, bool kValues_ = true, unsigned kWarpsOfEach = 1>
class ReverseConsumer : public Outputs<T, true, kValues_, true> {
  using Base = Outputs<T, true, kValues_, true>;

 public:
  static constexpr bool kValues = kValues_, kReversed = true, kOpens = false;
  __device__ ReverseConsumer(const Call& call, unsigned memory) : Base(call, memory) {}

 protected:
  using Base::load_values, Base::clear_values, Base::scale_values;
  using Base::place;
  using Base::prepared, Base::prepare, Base::spoil, Base::pack;
  using Base::S_, Base::unit_, Base::lane_, Base::ring_, Base::call_;
  using Base::stores, Base::stage_outputs, Base::store_outputs, Base::store_last, Base::vote;
  using typename Base::Place;

  struct Nothing {
    __device__ void operator()() const {}
  };

  // Scans tokens end - 1 .. first of a value head, in chunks `number` and on of the ring. first is a multiple of 64;
  // so is end, if it is not the sequence's. begun(): as in Consumer.
  template <class Begun = Nothing>
  __device__ __forceinline__ void scan(const Item&, unsigned first, unsigned end, unsigned& number,
                                       const Begun& begun = {}) {
    if (end <= first) return;
    const bool keeps = Base::befores_have_room(first, end);
    char* before = keeps ? Base::before_at(end - 1) : nullptr;
    unsigned out[2][4];  // outputs of the chunk before
    const unsigned last = (end - 1) / kRows * kRows;
    const unsigned begin = last + number * kRows;  // the token of chunk 0: see Consumer::scan()
    unsigned t = last, left = (end - first + kRows - 1) / kRows;
    const unsigned first_number = uniform(number);
    bool pending = false;  // are there outputs of the chunk before?
    if (end - last < kRows) ring_.wait_full(number), clear_values(ring_.stage(number), end - last);
    while (left > 0) {
      const bool again = prepared(), partial = end - t < kRows;
      const bool plain = Base::is_plain();
      unsigned stop = again || partial ? left - 1 : 0;
      if (keeps && !plain) {  // rare: as in Consumer
        if (is_span_end(t, last)) Base::template store_before<true>(before);
        stop = max(stop, left - (t % kChunk == 0 ? 1 : min(left, 2u)));
      }
      // Uniform: otherwise the compiler makes products wait for each other.
      const bool stores_before = __all_sync(kAll, keeps && plain);
      const unsigned odd = uniform(begin / kRows % 2);
      const Place at = place();
      const Place to{uniform(at.b), uniform(at.t0 + begin + kRows), uniform(at.hv)};
      bool went, full = false;
      do {
        lane_ = opaque(lane_);  // addresses are computed again: there are no registers to keep them
        const unsigned n = uniform(number), stage = ring_.stage(n);
        if (!full) ring_.wait_full(number);
        Chunk x;
        start_state_products<true>(stage, x);
        if (t == last && !again) [[unlikely]]
          begun();
        // TMA has read the output tile. All warps know that after the vote, and may write to it.
        if (stores()) ptx::wait_for_bulk_reads<0>();
        went = vote(x.left, x.D, is_span_end(t, last), again);
        if (!went) break;
        if (stores_before && (n % 2 != odd || n == first_number)) Base::template store_before<false>(before);
        start_values(stage, x);
        if (pending) stage_outputs(out);
        ptx::wait_for_products<0>();
        start_update(stage, x);
        if (pending) store_outputs(to, 0 - n * kRows, stage);
        full = ring_.is_full(number + 1);
        round_outputs(x, out);
        ptx::wait_for_products<0>();
        __syncwarp();  // all lanes have read the stage
        if (lane_ == 0) ring_.release(number, kWarpsOfEach);
        if (is_span_end(t, last)) before -= call_.states.kept[kBefore].stride0;
        pending = true;
        t -= kRows, ++number, --left;
      } while (left > stop);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), is_span_end(t, last));
      else if (again) spoil(out);
      if (went && partial) store_last(out, last, end - last, 0), pending = false;
    }
    if (pending) store_last(out, first, kRows, 0);
  }
  // Scans the first chunks of the ring, all of 32 tokens, for dS alone: as in Consumer. odd: 1 if their
  // last token is not the last one of 64.
  template <unsigned kHeld>
  __device__ __forceinline__ void scan_state(unsigned chunks, unsigned number = 0, unsigned odd = 0) {
    while (number < chunks) {
      const bool again = prepared();
      unsigned none[2][4];
      bool went, full = false;
      do {
        lane_ = opaque(lane_);
        const unsigned stage = uniform(ring_.stage(number));
        if (!full) ring_.wait_full(number);
        Chunk x;
        start_state_products<false>(stage, x);
        went = vote(x.left, x.D, begins_span(number, odd), again);
        if (!went) break;
        if (kValues) add_scores(stage, x);
        start_values(stage, x);
        load_operand(opaque(stage), x.D);  // again: there are no registers to keep it
        ptx::wait_for_products<0>();
        start_update(stage, x);
        full = ring_.is_full(number + 1);
        ptx::wait_for_products<0>();
        __syncwarp();  // all lanes have read the stage
        if (lane_ == 0 && number + kHeld < chunks) ring_.release(number);
        ++number;
      } while (!again && number < chunks);
      lane_ = opaque(lane_);
      if (!went) prepare(opaque(ring_.stage(number)), begins_span(number, odd));
      else if (again) spoil(none);
    }
  }

 private:
  // Is the chunk from token t on the last one of 64 tokens?
  __device__ static bool is_span_end(unsigned t, unsigned last) { return t % kChunk == kRows || t == last; }
  // The same of the ring's chunk `number`; odd: 1 if there are an odd number of them.
  __device__ static bool begins_span(unsigned number, unsigned odd) {
    return (number + odd) * kRows % kChunk == 0 || (odd && number == 0);
  }

  // ---- a chunk: its steps in the order in which they run. Products that a step starts run under what follows it. ----

  struct Chunk {
    unsigned left[8][4], D[2][4];  // dS^T and (s dO)^T in units, packed
    float dU[kRows / 2], dv[kRows / 2];
  };

  __device__ __forceinline__ void load_operand(unsigned stage, unsigned (&D)[2][4]) const {
    unsigned v[2][4];
    load_values(stage, v);
    if constexpr (kValues) scale_values(v, D);
    else
      for (int j = 0; j < 8; ++j) D[j / 4][j % 4] = 0;
  }
  // kScores: dO Aqk is in this product, too; otherwise add_scores() comes behind it.
  template <bool kScores>
  __device__ __forceinline__ void start_state_products(unsigned stage, Chunk& x) const {
    load_operand(stage, x.D);
    pack(x.left);
    const uint64_t kg = ptx::matrix_at(stage + Stage::kg, 16, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
    if constexpr (kScores) multiply_by_scores(stage, x, false);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      ptx::wgmma<__half, false>(x.dU, x.left[k], ptx::further(kg, k / 4 * kHalf + k % 4 * 32), kScores || k > 0);
    ptx::commit_products();
  }
  __device__ __forceinline__ void multiply_by_scores(unsigned stage, Chunk& x, bool accumulate) const {
    const uint64_t Aqk = ptx::matrix_at(stage + Stage::Aqk, 64, 512, ptx::Swizzle::k64);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      ptx::wgmma<__half, true>(x.dU, x.D[k], ptx::further(Aqk, k * 16 * 64), accumulate || k > 0);
  }
  // Where maps are made there are no registers for this product beside those of the state.
  __device__ __forceinline__ void add_scores(unsigned stage, Chunk& x) const {
    load_operand(opaque(stage), x.D);
    ptx::fence_products();
    multiply_by_scores(stage, x, true);
    ptx::commit_products();
    ptx::wait_for_products<0>();
  }
  // Starts dv = T^T dU. dS decays meanwhile.
  __device__ __forceinline__ void start_values(unsigned stage, Chunk& x) {
    float2 ell[16];
    Base::load_decays(stage, ell);
    unsigned R[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) R[j / 4][j % 4] = ptx::pack<__half>(x.dU[2 * j], x.dU[2 * j + 1]);
    const uint64_t T_beta = ptx::matrix_at(stage + Stage::T, 64, 512, ptx::Swizzle::k64);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, true>(x.dv, R[k], ptx::further(T_beta, k * 16 * 64), k > 0);
    ptx::commit_products();
    Base::decay(ell);
  }
  // Starts dS += qG^T s dO - kG^T dv.
  __device__ __forceinline__ void start_update(unsigned stage, Chunk& x) {
    unsigned R[2][4];  // -dv
#pragma unroll
    for (int j = 0; j < 8; ++j) R[j / 4][j % 4] = ptx::pack<__half>(x.dv[2 * j], x.dv[2 * j + 1]) ^ 0x80008000;
    const uint64_t kG = ptx::matrix_at(stage + Stage::k, kHalf, 1024, ptx::Swizzle::k128);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; kValues && k < 2; ++k)
      ptx::wgmma<__half, true>(S_, x.D[k], ptx::further(kG, Stage::q - Stage::k + k * 16 * kRowBytes), true);
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::wgmma<__half, true>(S_, R[k], ptx::further(kG, k * 16 * kRowBytes), true);
    ptx::commit_products();
  }
  __device__ __forceinline__ void round_outputs(const Chunk& x, unsigned (&out)[2][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      out[j / 4][j % 4] = ptx::pack<T>(x.dv[2 * j] * unit_[j % 2], x.dv[2 * j + 1] * unit_[j % 2]);
  }
};

}  // namespace kda::cuda::engine
