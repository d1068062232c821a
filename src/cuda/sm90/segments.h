// A call cut into segments: where they are, and what of them is in the workspace. (The scan over them: maps.h.)
//
// The state behind a segment is M S + b, S the state before it (math.md 6). Columns of the state are independent, so the
// ordinary scan makes both: b is the state from zeros, M the one from the identity where v is 0. The first segment of a
// sequence begins with the initial state: its b is the state behind it, and it needs no M.
#pragma once
#include "cuda/sm90/pair.h"

namespace kda::cuda::sm90 {

// Sequences cut behind `lead` tokens and then every `tokens` tokens, which are not more. Pieces of all sequences are numbered so
// that nobody has to count those of the sequences before: with cu_seqlens, pieces of sequence n from token t0 on have numbers
// from t0 / tokens + n on. Some numbers belong to nobody.
// With all that tells a pair its task: its first chunk waits for each 64 bytes of parameters, and for divisions.
struct Cut {
  unsigned lead, tokens;
  unsigned total;  // pieces
  unsigned N, T;
  bool varlen, one_pass;
  Divisor heads, group, each,
      length;  // HV; value heads of a key head; pieces of a sequence, without cu_seqlens; `tokens`
  Lengths cu_seqlens;
  StateSlots states;
  Flags has_initial;

  Cut(const ForwardProblem& p, unsigned lead, unsigned tokens, bool one_pass)
      : lead(lead),
        tokens(tokens),
        N(static_cast<unsigned>(p.N)),
        T(static_cast<unsigned>(p.T)),
        varlen(p.varlen),
        one_pass(one_pass),
        heads(p.HV),
        group(p.group()),
        each(1 + (std::max<int64_t>(p.T - lead, 0) + tokens - 1) / tokens),
        length(tokens),
        cu_seqlens(lengths_of(p.args.in.cu_seqlens)),
        states(slots_of(p.args.states)),
        has_initial(strided<const uint8_t>(p.args.states.has_initial_state)) {
    total = static_cast<unsigned>(p.varlen ? p.T / tokens + p.N : p.N * each.divisor);
  }
  // With cu_seqlens: where sequence n begins, or tokens of nobody.
  __device__ unsigned start(unsigned n) const { return static_cast<unsigned>(within(int_at(cu_seqlens, n), 0, T)); }
  // The number of the first piece of sequence n.
  __device__ unsigned first(unsigned n) const { return varlen ? length.quotient(start(n)) + n : n * each.divisor; }
  // The sequence whose pieces number i is among, if anybody's: by a warp.
  __device__ unsigned sequence(unsigned i) const {
    if (!varlen) return each.quotient(i);
    unsigned from = 0;
    for (unsigned count = N; count > 1;) {  // the last one that begins at i or before
      const unsigned step = (count + 31) / 32, offset = threadIdx.x % 32 * step;
      const bool before = offset < count && first(from + offset) <= i;
      const unsigned skipped = (31 - __clz(__ballot_sync(kAll, before) | 1)) * step;
      from += skipped, count = min(step, count - skipped);
    }
    return from;
  }
};

// ---- in the workspace ----

// M^T lies as the scan multiplies by it: two halves of 64 rows; of a half, leading bf16 and the rest of each number as tiles of
// 128 channels.
constexpr unsigned kMapBytes = kSize * kSize * 4, kRestOfMap = 2 * kHalf;
static_assert(kMapBytes / 2 <= Stage::bytes);

// In one pass, of two chunks each of a piece that is not its sequence's first, outputs of M and then of b: transposed, rows of 64
// tokens, swizzled like the stages, of M as the last products take them. Chunks lie behind each other in a row, and a chunk's
// tokens as a thread has them: 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, ..
constexpr unsigned kOutputsOfMap = kSize * kRowBytes, kOutputsOfTwo = 2 * kOutputsOfMap;

struct Segments {
  Cut cut;
  unsigned joints;  // of a head: pieces but one of each sequence, which those of sequence n come behind n of
  unsigned maps;    // of a head: of all pieces, in two passes but the last of each sequence
  char* M;          // [HV][maps]
  float4* b;        // [HV][maps][16][256 threads of a pair's scan]
  char* outputs;    // in one pass, of all pieces but the first of each sequence: [HV][joints][chunks / 2]
  unsigned* flags;  // [HV][pieces]: how many quarters of a map are there; then
  unsigned* taken;  // how many pairs have a number
  static constexpr unsigned kWhole = 4;  // of a map: two blocks, b and M

  static unsigned joints_of(const ForwardProblem& p, const Cut& cut) {
    return static_cast<unsigned>(p.varlen ? p.T / cut.tokens : p.N * (cut.each.divisor - 1));
  }
  static unsigned maps_of(const ForwardProblem& p, const Cut& cut) {
    return cut.one_pass ? cut.total : joints_of(p, cut);
  }
  static uint64_t map_bytes(const ForwardProblem& p, const Cut& cut) {
    return p.HV * uint64_t{maps_of(p, cut)} * 2 * kMapBytes;
  }
  static uint64_t output_bytes(const ForwardProblem& p, const Cut& cut) {
    return cut.one_pass ? p.HV * uint64_t{joints_of(p, cut)} * (cut.tokens / (2 * kRows)) * kOutputsOfTwo : 0;
  }
  static uint64_t flag_bytes(const ForwardProblem& p, const Cut& cut) {
    return (p.HV * uint64_t{cut.total} + 1) * sizeof(unsigned);
  }
  static uint64_t bytes(const ForwardProblem& p, const Cut& cut) {
    return map_bytes(p, cut) + output_bytes(p, cut) + flag_bytes(p, cut);
  }
  Segments(const ForwardProblem& p, const Cut& cut, void* workspace)
      : cut(cut), joints(joints_of(p, cut)), maps(maps_of(p, cut)), M(static_cast<char*>(workspace)) {
    b = reinterpret_cast<float4*>(M + map_bytes(p, cut) / 2);
    outputs = M + map_bytes(p, cut);
    flags = reinterpret_cast<unsigned*>(outputs + output_bytes(p, cut));
    taken = flags + p.HV * uint64_t{cut.total};
  }
  // Piece `number` is one of sequence n. (Garbage in cu_seqlens leads to maps of others, at worst.)
  __device__ uint64_t place(unsigned hv, unsigned n, unsigned number) const {
    return uint64_t{hv} * maps + min(cut.one_pass ? number : number - n, maps - 1);
  }
  __device__ char* map(unsigned hv, unsigned n, unsigned number) const { return M + place(hv, n, number) * kMapBytes; }
  // Where in `outputs` those of a piece are.
  __device__ unsigned first_outputs(unsigned hv, unsigned n, unsigned number) const {
    return (hv * joints + min(number - n - 1, joints - 1)) * (cut.tokens / (2 * kRows));
  }
  __device__ unsigned* flag(unsigned hv, unsigned number) const { return flags + uint64_t{hv} * cut.total + number; }
  // By one thread: the pair's number.
  __device__ unsigned number() const { return atomicAdd(taken, 1); }
  // States lie as the scan's threads have them: the first four elements of a thread, 4 kB to the next four.
  __device__ float4* offset(unsigned hv, unsigned n, unsigned number) const {
    return b + place(hv, n, number) * (kMapBytes / 16) + ptx::rank() * kGroup + threadIdx.x % kGroup;
  }
};

// What a pair works on, a piece of a sequence for one value head: found out by a warp, for all, in shared memory.
struct alignas(16) Task {
  unsigned number, index;     // of the piece: among all, among its sequence's
  unsigned n, hv, h, b;       // sequence, heads, row
  unsigned t0, length, slot;  // of the sequence
  unsigned first, end,
      then;  // tokens first .. end - 1 of the sequence; where the pair's chunks end: of the piece, or the one behind
  unsigned mapped;  // chunks of a map
  enum Kind : unsigned { kNothing, kZeros, kBegins, kMaps };
  unsigned kind;  // what there is to do; kZeros: outputs of nobody's state
  bool initial;

  __device__ Task(const Cut& cut, unsigned pair) : number(cut.heads.quotient(pair)) {
    hv = pair - number * cut.heads.divisor, h = cut.group.quotient(hv);
    if (number >= cut.total) {  // the rows behind the last sequence
      n = cut.N, t0 = cut.start(n), length = end = then = cut.T - t0;
      index = b = slot = first = mapped = 0, kind = kZeros, initial = false;
      return;
    }
    n = cut.sequence(number), index = number - cut.first(n);
    Sequence s = sequence_at(cut.varlen, cut.cu_seqlens, cut.T, n);
    find_states(s, cut.states, cut.has_initial, slot_of(cut.states.indices, n));
    b = static_cast<unsigned>(s.b), t0 = static_cast<unsigned>(s.t0), length = static_cast<unsigned>(s.length);
    slot = static_cast<unsigned>(s.slot), initial = s.initial;
    const int64_t behind = cut.lead + int64_t{index} * cut.tokens, begin = index ? behind - cut.tokens : 0;
    first = static_cast<unsigned>(begin), end = static_cast<unsigned>(min(behind, s.length));
    then = cut.one_pass ? end : static_cast<unsigned>(min(behind + cut.tokens, s.length));
    mapped = index ? cut.tokens / kRows : 0;
    if (index == 0) kind = s.live ? kBegins : kZeros;
    else if (begin >= s.length) kind = kNothing;  // nobody's number
    else kind = !s.live ? kZeros : behind >= s.length && !cut.one_pass ? kNothing : kMaps;
  }
  __device__ void share() const { shared() = *this; }
  __device__ static Task& shared() { return *reinterpret_cast<Task*>(shared_memory() + Shared::task); }
  __device__ static Task here() {
    Task x = shared();
    for (unsigned* of_all : {&x.number, &x.index, &x.n, &x.hv, &x.end, &x.then}) *of_all = uniform(*of_all);
    return x;
  }
  __device__ Item item() const { return {n, hv}; }
  __device__ Sequence sequence() const {
    Sequence s{};
    s.n = n, s.b = b, s.t0 = t0, s.length = length, s.slot = slot, s.live = true, s.initial = initial;
    return s;
  }
};
static_assert(sizeof(Task) <= Shared::kTaskBytes);

// The chunks of one preparer of a pair, of four one: those of a map, and in two passes of the piece behind it. What a plan needs
// follows from the chunk's number and the task.
template <bool kOnePass>
class TaskSource {
 public:
  static constexpr bool kMaps = !kOnePass, kBringsStates = false;
  __device__ explicit TaskSource(unsigned group) : number_(ptx::rank() + 2 * group) {}
  __device__ void next(const Call&, Plan& p) {
    const Task& task = Task::shared();
    const unsigned chunk = task.first / kRows + number_;
    if (chunk * kRows >= task.then) return;
    p.set(task.hv, task.h, task.b, task.t0, task.then, chunk);
    p.number = number_, p.queries = number_ >= task.mapped;
    number_ += kStages;
  }

 private:
  unsigned number_;  // of the next chunk in the ring
};

}  // namespace kda::cuda::sm90
