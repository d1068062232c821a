// What this machine can do at best, as reference lines for the CPU kernels: f32 multiply-adds per second from
// registers, and memory bandwidth of reading and writing a buffer in place (what decode does to a state pool).
//   ceilings [threads]   prints one JSON object
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/ceilings.cc"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
// clang-format on
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 12 independent chains: latency 4 times 2 issues a cycle, and some to spare. Returns the FLOP done.
double multiply_adds(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999999f), b = hn::Set(d, 1e-7f);
  // Different starts, or the compiler finds one chain where twelve are meant.
  auto c0 = hn::Set(d, *sink), c1 = hn::Add(c0, c0), c2 = hn::Add(c1, c0), c3 = hn::Add(c2, c0), c4 = hn::Add(c3, c0),
       c5 = hn::Add(c4, c0), c6 = hn::Add(c5, c0), c7 = hn::Add(c6, c0), c8 = hn::Add(c7, c0), c9 = hn::Add(c8, c0),
       c10 = hn::Add(c9, c0), c11 = hn::Add(c10, c0);
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, a, b), c1 = hn::MulAdd(c1, a, b), c2 = hn::MulAdd(c2, a, b), c3 = hn::MulAdd(c3, a, b);
    c4 = hn::MulAdd(c4, a, b), c5 = hn::MulAdd(c5, a, b), c6 = hn::MulAdd(c6, a, b), c7 = hn::MulAdd(c7, a, b);
    c8 = hn::MulAdd(c8, a, b), c9 = hn::MulAdd(c9, a, b), c10 = hn::MulAdd(c10, a, b), c11 = hn::MulAdd(c11, a, b);
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)),
              hn::Add(hn::Add(c4, c5), hn::Add(hn::Add(c6, c7), hn::Add(hn::Add(c8, c9), hn::Add(c10, c11)))));
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return 2.0 * 12 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

// x <- 0.5 x: one read and one write of every byte.
void scale_in_place(float* x, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto half = hn::Set(d, 0.5f);
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(half, hn::LoadU(d, x + i)), d, x + i);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/isa.h"

namespace kda::cpu {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class F>
double best_of(int repeats, const F& run) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    run();
    best = std::min(best, seconds() - start);
  }
  return best;
}

}  // namespace
}  // namespace kda::cpu

int main(int argc, char** argv) {
  using namespace kda::cpu;
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_max_threads();
  const auto fma = KDA_ISA_CALL(multiply_adds);
  const auto scale = KDA_ISA_CALL(scale_in_place);
  double flop = 0;
  const double fma_time = best_of(7, [&] {
    flop = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flop)
    {
      float sink = 1;
      flop += fma(4000000, &sink);
      if (sink == 0.123f) std::puts("");  // keeps the loop alive
    }
  });
  std::vector<float> buffer(int64_t{1} << 28);  // 1 GiB, far beyond any cache
  const int64_t part = static_cast<int64_t>(buffer.size()) / threads / 64 * 64;
  const double copy_time = best_of(5, [&] {
#pragma omp parallel num_threads(threads)
    scale(buffer.data() + omp_get_thread_num() * part, part);
  });
  std::printf("{\"threads\": %d, \"fma_gflops\": %.2f, \"read_write_gbs\": %.2f}\n", threads, flop / fma_time * 1e-9,
              8.0 * static_cast<double>(part * threads) / copy_time * 1e-9);
  return 0;
}
#endif
