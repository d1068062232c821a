// Scores for any gate, exact: every factor is a product of alphas and at most 1, so that nothing is divided and -inf is a
// decay to 0 (math.md 4.4 c). An entry's two factors meet at the end of a row between i and j, the coarsest there is:
//   rows 16..31 x columns 0..15                        end of row 15      far tiles    on tensor cores
//   the upper eight rows x the lower eight of 16       end of the eighth  near tiles   on tensor cores
//   the upper four rows x the lower four of a warp's   end of the fourth  near tiles before they are that; likewise
//   pairs of four rows, and the diagonal                                               in f32, by lanes
#pragma once
#include "cuda/sm90/scores.h"

namespace kda::cuda::sm90 {

class ExactScores {
 public:
  static constexpr bool kTakesDiagonal = true;
  // alpha of the lane's channels.
  struct Gate {
    int32_t form;
    float a, bound, bias[4];
    __device__ Gate(const Tokens& x, const Bench& at) : form(x.gate_form), a(at.gate_rate()), bound(x.lower_bound) {
      at.gate_bias(bias);
    }
    __device__ float operator()(int e, float x, bool real) const {
      if (form == KDA_GATE_SOFTPLUS) x = -a * softplus(x + bias[e]);
      if (form == KDA_GATE_LOWER_BOUND) x = bound * sigmoid(a * (x + bias[e]));
      return ptx::exp2(x * (real ? kLog2e : 0));
    }
  };

  __device__ ExactScores(Bench& at, unsigned stage) : at_(at), stage_(stage) {}

  __device__ void decay(int i, const Gate& gate, const float (&x)[4], bool real) {
#pragma unroll
    for (int e = 0; e < 4; ++e) alpha_[i][e] = gate(e, x[e], real);
  }
  __device__ bool is_fine(int i) const {
    bool fine = true;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float sum = (alpha_[r][0] + alpha_[r][1]) + (alpha_[r][2] + alpha_[r][3]);
      fine = fine && (r > i || sum == sum);
    }
    return fine;
  }
  __device__ void share_totals() const {
    float total[4] = {1, 1, 1, 1};
#pragma unroll
    for (int i = 0; i < 8; ++i) times(total, alpha_[i]);
    ptx::store_shared_f32x4(at_.totals() + (at_.warp * kSize + at_.lane * 4) * 4,
                            make_float4(total[0], total[1], total[2], total[3]));
  }

  template <class T>
  __device__ void tiles() {
    // Aqk is zero where nothing else comes.
    ptx::store_shared4(stage_ + Stage::Aqk + at_.warp * 512 + at_.lane * 16, make_uint4(0, 0, 0, 0));
    __syncwarp();  // before the entries come
    diagonal<T>();
    at_.forget();
    float total[4][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) load_four(at_.totals() + (w * kSize + at_.lane * 4) * 4, total[w]);
    at_.forget();
    keys_to_the_end<T>(total);
    at_.forget();
    rows_from_the_start<T>(total);
    if (at_.warp == 0) {
#pragma unroll
      for (int w = 1; w < 4; ++w) times(total[0], total[w]);
      ptx::store_shared_f32x4(stage_ + Stage::ell + at_.lane * 16,
                              make_float4(total[0][0], total[0][1], total[0][2], total[0][3]));
    }
  }

  // The warp's rows against those of each warp before it.
  __device__ void run(unsigned) {
    at_.forget();
#pragma unroll 1
    for (unsigned other = 0; other < at_.warp; ++other) {
      const bool far = at_.warp / 2 != other / 2;
      float d[4] = {};
      multiply(d, far ? q_far() : q_near(), far ? k_far() : k_near(), other);
      store(d, other, true);
    }
  }

 private:
  __device__ static void times(float (&x)[4], const float (&y)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= y[e];
  }
  // Row i of the warp, normalised.
  template <class T>
  __device__ void load(unsigned from, Bench::Factor norm, int i, float (&x)[4]) const {
    four_of<T>(ptx::load_shared2(at_.own(stage_)[i] + from), x);
    const float factor = at_.factor(norm, 8 * at_.warp + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= factor;
  }
  __device__ void store_scaled(unsigned to, const float (&x)[4], const float (&by)[4]) const {
    const float y[4] = {x[0] * by[0], x[1] * by[1], x[2] * by[2], x[3] * by[3]};
    store_four<__half>(to, y);
  }

  // Addresses of tiles. Of q, near rows are those of warps 1 and 3, far ones those of warps 2 and 3.
  __device__ unsigned k_near() const { return at_.rows() + Stage::k; }
  __device__ unsigned k_far() const { return at_.rows() + Stage::q; }
  __device__ unsigned q_near() const { return at_.columns() - (at_.warp + 1) / 2 * 8 * kRowBytes; }
  __device__ unsigned q_far() const { return at_.columns(); }
  __device__ unsigned q_diagonal() const { return k_far(); }

  // d = [q; k] of the warp's rows times k of eight others', transposed.
  __device__ void multiply(float (&d)[4], unsigned q, unsigned k, unsigned other) const {
    const unsigned r = at_.lane % 8, m = at_.lane / 8;
    const unsigned left = (m % 2 ? k : q) + (8 * at_.warp + r) * kRowBytes, right = k + (8 * other + r) * kRowBytes;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      unsigned a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::load_matrices(a[i], left + j / 4 * kHalf + (((j + i) % 4 * 2 + m / 2 ^ r) << 4));
      ptx::load_matrices(b, right + j / 4 * kHalf + ((j % 4 * 2 + m ^ r) << 4));
      ptx::mma<__half>(d, a[0], b[0], b[1]);
      ptx::mma<__half>(d, a[1], b[2], b[3]);
    }
  }
  // Entries of Aqk and Akk in columns of warp `other`: all, or the upper four rows of the lower four columns.
  __device__ void store(const float (&d)[4], unsigned other, bool all) const {
    const unsigned i = at_.lane / 4, j = at_.lane % 4 * 2, row = 8 * at_.warp + i, c = 8 * other + j;
    if (!all && (i < 4 || j >= 4)) return;
    ptx::store_shared(stage_ + Stage::Aqk + Bench::square(row, c), ptx::pack<__half>(d[0], d[1]));
    const float beta = at_.factor(Bench::kBeta, row);
    ptx::store_shared_f32x2(at_.A() + (row * kStrideA + c) * 4, make_float2(d[2] * beta, d[3] * beta));
  }

  // The warp's own rows against each other.
  template <class T>
  __device__ void diagonal() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float decayed[4][4], since[4] = {1, 1, 1, 1};  // k of the rows so far, as of this one; decay since the fourth row
      float first[8], last[4];                       // q k and k k of pairs (1,0), (2,0), (2,1), (3,0); (3,1), (3,2)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * half + i;
        float q[4];
        load<T>(Stage::q, Bench::kQuery, row, q), load<T>(Stage::k, Bench::kKey, row, decayed[i]);
        const float(&k)[4] = decayed[i];
#pragma unroll
        for (int j = 0; j < i; ++j) {
          times(decayed[j], alpha_[row]);
          float qk = q[0] * decayed[j][0], kk = k[0] * decayed[j][0];
#pragma unroll
          for (int e = 1; e < 4; ++e) qk = fmaf(q[e], decayed[j][e], qk), kk = fmaf(k[e], decayed[j][e], kk);
          const int pair = i * (i - 1) / 2 + j;
          (pair < 4 ? first[2 * pair % 8] : last[2 * pair % 4]) = qk;
          (pair < 4 ? first[2 * pair % 8 + 1] : last[2 * pair % 4 + 1]) = kk;
        }
        if (half == 1) {
          times(since, alpha_[row]);
          store_scaled(at_.own(q_diagonal())[row], q, since), store_scaled(at_.own(k_near())[row], k, since);
        }
      }
      if (half == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) store_four<__half>(at_.own(k_near())[i], decayed[i]);
      store_sum(half, at_.lane / 4, spread_sums(first), at_.lane % 4 == 0);
      store_sum(half, 8 + at_.lane / 8, spread_sums(last), at_.lane % 8 == 0);
    }
    if (at_.lane < 8) {
      const unsigned row = 8 * at_.warp + at_.lane;
      store_entry(row, row, at_.factor(Bench::kDiagonal, row));
    }
    __syncwarp();  // the tiles are there
    float d[4] = {};
    multiply(d, q_diagonal(), k_near(), at_.warp);
    __syncwarp();  // and may be overwritten
    store(d, at_.warp, false);
  }
  __device__ void store_entry(unsigned i, unsigned j, float qk) const {
    ptx::store_shared16(stage_ + Stage::Aqk + Bench::square(i, j), __half_as_ushort(__float2half_rn(qk)));
  }
  __device__ void store_sum(int half, unsigned number, float sum, bool mine) const {
    const unsigned pair = number / 2, i = pair == 0 ? 1 : pair < 3 ? 2 : 3, j = pair - i * (i - 1) / 2;
    const unsigned first = 8 * at_.warp + 4 * half, row = first + i;
    if (!mine) return;
    if (number % 2 == 0) store_entry(row, first + j, sum);
    else ptx::store_shared_f32(at_.A() + (row * kStrideA + first + j) * 4, sum * at_.factor(Bench::kBeta, row));
  }

  // k decayed to the end of the warp's rows: from there to the chunk's end for the scan, and to where scores meet.
  template <class T>
  __device__ void keys_to_the_end(const float (&total)[4][4]) {
    float after[4] = {1, 1, 1, 1}, decay[4] = {1, 1, 1, 1};
#pragma unroll
    for (unsigned w = 1; w < 4; ++w)
      if (w > at_.warp) times(after, total[w]);
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      float k[4];
      load<T>(Stage::k, Bench::kKey, i, k);
      times(k, decay);
      if (at_.warp % 2 == 0) store_four<__half>(at_.own(k_near())[i], k);
      if (at_.warp == 0) store_scaled(at_.own(k_far())[i], k, total[1]);
      if (at_.warp == 1) store_four<__half>(at_.own(k_far())[i], k);
      store_scaled(at_.own(stage_)[i] + Stage::kg, k, after);
      times(decay, alpha_[i]);
    }
  }
  // q and k decayed from the start of the warp's rows.
  template <class T>
  __device__ void rows_from_the_start(const float (&total)[4][4]) {
    float before[4] = {1, 1, 1, 1}, decay[4] = {1, 1, 1, 1};
#pragma unroll
    for (unsigned w = 0; w < 3; ++w)
      if (w < at_.warp) times(before, total[w]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float q[4], k[4];
      load<T>(Stage::q, Bench::kQuery, i, q), load<T>(Stage::k, Bench::kKey, i, k);
      times(decay, alpha_[i]);
      times(q, decay), times(k, decay);
      if (at_.warp % 2) store_four<__half>(at_.own(q_near())[i], q), store_four<__half>(at_.own(k_near())[i], k);
      if (at_.warp == 2) store_four<__half>(at_.own(q_far())[i], q), store_four<__half>(at_.own(k_far())[i], k);
      if (at_.warp == 3) store_scaled(at_.own(q_far())[i], q, total[2]), store_scaled(at_.own(k_far())[i], k, total[2]);
      store_scaled(at_.own(stage_)[i] + Stage::q, q, before);
      store_scaled(at_.own(stage_)[i] + Stage::k, k, before);
    }
  }

  Bench& at_;
  const unsigned stage_;
  float alpha_[8][4];
};

}  // namespace kda::cuda::sm90
