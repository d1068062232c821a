// The tasks of the convolution: blocks of tokens, of all sequences one after the other, and tiles of channels.
#pragma once
#include <algorithm>
#include <type_traits>

#include "contract/conv.h"
#include "cpu/parallel.h"

namespace kda::cpu {

constexpr int64_t kConvTile = 512;   // channels of a task: its rows and weights stay in L1
constexpr int64_t kConvBlock = 128;  // tokens of a task

// Calls f(first channel, channels, tiles) for x, x1 and x2. No tile has channels of two.
template <class F>
void for_parts(const Conv& c, const F& f) {
  int64_t first = 0;
  for (const int64_t end : {c.x_end, c.x1_end, c.channels()}) {
    const int64_t n = std::min(end, c.channels()) - first;
    f(first, n, divide_up(n, kConvTile));
    first += n;
  }
}
inline int64_t tiles_of(const Conv& c) {
  int64_t all = 0;
  for_parts(c, [&](int64_t, int64_t, int64_t tiles) { all += tiles; });
  return all;
}
struct ConvTile {
  int64_t c0, n;
};
inline ConvTile tile_of(const Conv& c, int64_t i) {
  ConvTile tile{};
  for_parts(c, [&](int64_t first, int64_t n, int64_t tiles) {
    if (i >= 0 && i < tiles) tile = {first + i * kConvTile, std::min(kConvTile, n - i * kConvTile)};
    i -= tiles;
  });
  return tile;
}

// Small calls stay on one thread: starting a team costs more than the work on 16384 elements.
inline int threads_of(const Conv& c, const kda_exec& exec, int64_t tasks, int64_t rows) {
  return wanted_threads(exec, std::min(tasks, rows * c.channels() / 16384 + 1));
}

// Calls f(n, first channel, channels) for every sequence and tile, with the thread as fourth argument if f takes it.
template <class F>
void for_tiles(const Conv& c, int64_t N, int threads, const F& f) {
  const int64_t tiles = tiles_of(c);
  parallel_for(N * tiles, threads, [&](int64_t task, int thread) {
    const ConvTile tile = tile_of(c, task % tiles);
    if constexpr (std::is_invocable_v<F, int64_t, int64_t, int64_t, int>) f(task / tiles, tile.c0, tile.n, thread);
    else f(task / tiles, tile.c0, tile.n);
  });
}

}  // namespace kda::cpu
