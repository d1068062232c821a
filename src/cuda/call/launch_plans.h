// How decode and drafts are launched, as data: host functions of a call's sizes and the number of SMs, which know
// nothing of CUDA. `explain` prints the plans. Times are microseconds on an H200 at K = V = 128 with 32 heads, and B is
// the number of requests; docs/experiments/cuda_decode.md has them all.
#pragma once
#include <cstdint>
#include <string>

#include "error.h"
#include "kda/kda.h"

namespace kda::cuda {

constexpr int kWarpLanes = 32, kColumnLanes = 8;  // threads of a warp, and those that share a value column

// How much of the states gets hints before the kernel before has ended, in KiB an SM: all of them if they have at most
// `all`, otherwise `some`. That keeps memory busy while that kernel ends. More would take time from it, as it still
// writes.
struct HintedStates {
  int all, some;
};

// The fast path is a set of kernels for the most common calls, which know these calls' dtypes and forms. Others take
// general kernels. Which form of it a call has: none; the plain one; with a convolution in front; on a ring; a decode
// with snapshots.
enum class FastPath { kNone, kPlain, kConv, kRing, kSnapshots };

inline std::string text(FastPath path) {
  switch (path) {
    case FastPath::kPlain: return "fast path";
    case FastPath::kConv: return "fast path with a convolution";
    case FastPath::kRing: return "fast path on a ring";
    case FastPath::kSnapshots: return "fast path with snapshots";
    default: return "general kernel";
  }
}
inline std::string text(FastPath path, int64_t columns, int warps, HintedStates hinted) {
  return str(text(path), ", blocks of ", columns, " columns and ", warps, " warps, hints for ", hinted.some,
             " KiB of states an SM (", hinted.all, " if that is all)");
}

// ---- decode ----

struct DecodeCall {
  int64_t heads, K, V;  // heads: value heads of all requests
  FastPath fast;        // kNone, kPlain or kSnapshots
  bool bf16, k_first;   // the states
};
struct DecodePlan {
  FastPath path;
  int warps, rows;  // rows: value columns of a thread
  // B = 8: 10.0 without hints, 9.2 with 28 KiB an SM, 9.5 with 64, 11.3 with all.
  HintedStates hinted{28, 28};
  bool apart = true;  // with snapshots: half of a block's warps activate tokens, `warps` apply them

  constexpr int columns() const { return warps * kWarpLanes / kColumnLanes * rows; }
};

// Few columns a thread spread a small call over all SMs, as long as all blocks run at once, two an SM (B = 1, T = 8:
// 10.1 us, not 11.9). In large calls with states in bf16 too few warps would apply tokens, so all warps do both. At
// T = 4 this takes 19.5 us instead of 18.3 with B = 8, but 56.3 instead of 57.7 with B = 32, and 190 instead of 205
// with B = 128.
inline DecodePlan snapshots_plan(const DecodeCall& c, int64_t SMs) {
  const DecodePlan few{c.fast, 4, 2}, many{c.fast, 4, 4};
  const auto blocks = [&](const DecodePlan& plan) { return c.heads * (c.V / plan.columns()); };
  if (blocks(few) <= 2 * SMs) return few;
  return {.path = c.fast, .warps = 4, .rows = 4, .apart = !c.bf16 || blocks(many) <= 4 * SMs};
}

// On the fast path few columns a thread spread a small call over all SMs, and many share reads of keys: the fewest as
// long as all blocks run at once, five an SM. From 1,920 columns an SM on blocks of an f32 state have 4 KB, as memory
// is fastest when all that is on its way lies close together (B = 128: x 0.99; larger calls: x 0.98).
inline DecodePlan decode_plan(const DecodeCall& c, int64_t SMs) {
  if (c.fast == FastPath::kNone) return {c.fast, 4, c.K > 128 ? 1 : 2};
  if (c.fast == FastPath::kSnapshots) return snapshots_plan(c, SMs);
  if (!c.k_first && !c.bf16 && c.heads * c.V >= 1920 * SMs) return {c.fast, 2, 1};
  const DecodePlan few{c.fast, 4, c.k_first ? 2 : 1}, many{c.fast, 4, 2 * few.rows};
  const int64_t blocks = c.heads * ((c.V + few.columns() - 1) / few.columns());
  return blocks <= 5 * SMs ? few : many;
}
inline std::string text(const DecodePlan& p) { return text(p.path, p.columns(), p.warps, p.hinted); }

// ---- few drafts, and a flush, in registers ----

// A block: `warps`, of which each has a draft; `rows`, the value columns of a thread; `steps`, in which its columns
// come to registers. `crowded`: there are so many blocks that each had better request its entries before its state.
struct Shape {
  int warps, rows, steps = 1;
  bool crowded = false;

  constexpr int threads() const { return warps * kWarpLanes; }
  constexpr int tile() const { return threads() / kColumnLanes * rows; }  // value columns in registers
  constexpr int columns() const { return tile() * steps; }
};

struct DraftCall {
  int64_t columns, V;  // columns: value columns of all states
  int64_t T;           // drafts of a request; 0: a flush alone
  bool flushes;
  FastPath fast;
};
struct DraftPlan {
  FastPath path;
  Shape shape;
  HintedStates hinted;
};

// What a general kernel has: room for all drafts that it may get, in blocks that suit any V.
constexpr Shape kGeneralVerify{4, 4}, kGeneralFlushVerify{8, 2}, kGeneralFlush{4, 4};

inline Shape draft_shape(const DraftCall& c, int64_t SMs) {
  const bool halves = c.V % 128 == 0;  // blocks may have 128 columns
  if (c.fast == FastPath::kNone) return !c.T ? kGeneralFlush : c.flushes ? kGeneralFlushVerify : kGeneralVerify;
  // More drafts on a ring: so that all blocks run at once, two an SM, if they can.
  if (c.T > 4) return {8, c.columns <= 64 * SMs ? 1 : c.columns <= 128 * SMs || !halves ? 2 : 4};
  // So many that all SMs have work for several rounds: one step, with entries first (flush_verify, B = 128: x 0.96;
  // B = 8: x 1.05, so not sooner).
  const bool crowded = c.T && c.flushes && c.fast != FastPath::kRing && c.columns >= 1600 * SMs;
  if (crowded) return {4, 4, 1, true};
  // About as many as run at once with 128 columns, four an SM: drafts are prepared once for two steps (verify, T = 4,
  // B = 128: 111 -> 96; flush_verify in one step, B = 32: x 1.02 to 1.05). A flush alone has nothing to prepare (two
  // steps: x 1.03).
  if (c.T && halves && c.columns >= 480 * SMs) return {4, 4, 2};
  // Fewer than one and a half blocks of 64 columns an SM: half as many columns, so that no SM is idle.
  return {4, c.columns < 96 * SMs ? 2 : 4};
}
inline DraftPlan draft_plan(const DraftCall& c, int64_t SMs) {
  const Shape shape = draft_shape(c, SMs);
  // Verify, T = 4, B = 8: 7.9 -> 7.3. More hints beside the loads of two steps, or in a flush, gain nothing.
  return {c.fast, shape, {64, !c.T || (c.flushes && shape.steps == 2) ? 0 : 32}};
}
inline std::string text(const DraftPlan& p) { return text(p.path, p.shape.columns(), p.shape.warps, p.hinted); }

// ---- more drafts, on tensor cores ----

struct MmaCall {
  int64_t heads, V;  // heads: value heads of all requests
  int64_t room;      // drafts of a request, at most
  FastPath fast;
};
struct MmaPlan {
  static constexpr int kWarps = 8;
  FastPath path;
  int max_drafts;
  int64_t columns;
  HintedStates hinted;
};

// A block has as many columns as leave one and a half blocks for each SM and fit shared memory: does_fit(columns).
template <class DoesFit>
MmaPlan mma_plan(const MmaCall& c, int64_t SMs, const DoesFit& does_fit) {
  int64_t columns = c.V % 128 ? 64 : 128;
  while (columns > 32 && (2 * c.heads * (c.V / columns) < 3 * SMs || !does_fit(columns))) columns /= 2;
  // If all blocks run at once, three an SM, those of the next kernel run beside them, and more hints would delay them.
  const int some = c.heads * (c.V / columns) > 3 * SMs ? 64 : 0;
  return {c.fast, c.room > 8 ? 16 : 8, columns, {64, some}};
}
inline std::string text(const MmaPlan& p) {
  return str(text(p.path, p.columns, p.kWarps, p.hinted), ", room for ", p.max_drafts, " drafts");
}

}  // namespace kda::cuda
