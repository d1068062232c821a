// A block of mma_kernel (mma.cu): its steps, in the order in which they run.
#pragma once
#include "cuda/drafts/mma_draft.h"

namespace kda::cuda::mma {

template <class Call, class P>
class MmaBlock {
  static constexpr Traits kCall = Call::kValue;
  static constexpr int kMaxDrafts = kCall.max_drafts, kSlices = kMaxDrafts / 8;
  static constexpr int kPerWarp = kMaxDrafts / kWarps;  // drafts of a warp
  using State = Element<kCall>;
  using Seen = decltype(fast_copy<kCall.fast, false, kCall.conv>(std::declval<const Parts<P>&>()));
  using Convolution = FrontDrafts<kThreads, kCall.fast ? kMostK : 0, kMaxDrafts>;

 public:
  // A call on the fast path has the layout of `memory`, but the compiler knows most of it.
  __device__ __forceinline__ MmaBlock(const Blocks& blocks, const Memory& memory, const Parts<P>& call, float4* dynamic)
      : blocks_(blocks),
        x_(fast_copy<kCall.fast, false, kCall.conv>(call)),
        m_(kCall.fast ? Memory(kMaxDrafts, memory.columns, x_.sizes) : memory),
        tile_(dynamic),
        shared_(reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + tile_.bytes(m_.columns))),
        at_(blocks),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / 32),
        lane_(thread_ % 32),
        v0_(at_.tile * static_cast<unsigned>(m_.columns)),
        own_v_(v0_ + threadIdx.x) {}

  __device__ __forceinline__ void run() {
    const bool varlen = x_.sizes.varlen, there = at_.n < blocks_.rows;
    if (!varlen) locate(at_.n, 0);
    if (!varlen && there && at_.is_among(blocks_.hints.blocks)) give_hints();
    wait_for_stream();
    if (!there) return;  // the grid's last rows
    const int64_t N = blocks_.rows - varlen;
    if (varlen && at_.n == N) return zero_outputs(0, end_of_sequences(x_.cu_seqlens, N, x_.sizes.T), x_.sizes.T);

    // Indices, drafts, entries and the state are requested before the first wait.
    Indices indices = indices_of(x_.requests, at_.n);
    pin(indices.state), pin(indices.records);
    const Sequence sequence = drafts_of(x_, at_.n);
    T_ = static_cast<int>(min(sequence.length, static_cast<int64_t>(room())));
    if (varlen) locate(0, static_cast<unsigned>(sequence.t0));
    x_.tokens.narrow ? fetch<true>() : fetch<false>();
    const Request r = request_of(x_.requests, sequence, indices);
    if (!r.s.live) return zero_outputs(r.s.b, r.s.t0, r.s.t0 + r.s.length);
    const Before before = before_drafts<P>(x_, at_, r, v0_);
    Convolution convolution(m_.front, K());
    const int entries = ask_state(r, before, convolution);

    if (front()) take_convolved(r, convolution);
    Entries record;
    if (r.slot >= 0) record = Entries(x_.records, at_, r.slot, v0_);
    prepare_drafts(r, record);
    Sums<kSlices> all{};
    entries ? multiply<true>(r, before, entries, all) : multiply<false>(r, before, entries, all);
    share_products(all);
    if (thread_ < m_.columns) write_outputs(r, record);
  }

 private:
  // What the fast path knows, loops are unrolled by.
  __device__ int K() const { return kCall.fast ? kMostK : x_.K; }
  __device__ int room() const { return kCall.fast ? kMaxDrafts : m_.drafts; }
  // Do q, k and v come from a convolution, which leaves them in shared memory?
  __device__ bool front() const { return kCall.fast ? kCall.conv : m_.front.given; }

  __device__ __forceinline__ void zero_outputs(int64_t b, int64_t t, int64_t end) const {
    if (thread_ >= m_.columns) return;
    const Tokens& tokens = x_.tokens;
    for (; t < end; ++t) {
      char* to =
          tokens.o.at(static_cast<unsigned>(b), static_cast<unsigned>(t), at_.hv) + own_v_ * size_of(tokens.o_dtype);
      store_element(to, tokens.o_dtype, 0);
    }
  }

  // ---- addresses and hints, while the kernel before still runs ----

  __device__ __forceinline__ void locate(unsigned b, unsigned t0) {
    const Tokens& tokens = x_.tokens;
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      drafts_[i].t = warp_ + i * kWarps;
      drafts_[i].key.locate(tokens, b, t0 + static_cast<unsigned>(drafts_[i].t), at_.hv, at_.h);
    }
    from_v_ = tokens.v.at(b, t0, at_.hv) + own_v_ * size_of(tokens.qkv_dtype);
    if (kCall.fast && !kCall.conv) {
#pragma unroll
      for (auto& draft : drafts_) draft.key.pin_addresses();
      pin(from_v_);
    }
  }
  __device__ __forceinline__ void give_hints() {
    const int most = static_cast<int>(x_.sizes.T);
    if (!front()) {
#pragma unroll
      for (int i = 0; i < kPerWarp; ++i)
        if (drafts_[i].t < most) drafts_[i].key.expect(x_.tokens);
      if (lane_ == 0 && warp_ < most) prefetch(from_v_ + warp_ * x_.tokens.v.stride1);
    }
    expect_states<P, kThreads>(x_, at_, blocks_.hints, static_cast<unsigned>(m_.columns), m_.entries.entries, K());
  }

  // ---- requests: drafts, entries and the state ----

  template <bool kNarrow>
  __device__ __forceinline__ void fetch() {
    const Tokens& tokens = x_.tokens;
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      // Blocks that also flush request the state only after the drafts have arrived, because entries must load first.
      constexpr bool kIf = !kFlushes<P>;
      const bool is_there = drafts_[i].t < T_;
      if (!kIf && !is_there) continue;
      drafts_[i].key.template fetch_gate<kNarrow, kIf>(tokens, is_there);
      if (!front()) drafts_[i].key.template fetch_keys<kNarrow, kIf>(tokens, is_there);
    }
    if (front()) return;
    const char* from = from_v_;
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t, from += tokens.v.stride1) {
      values_[t] = t < T_ && thread_ < m_.columns ? load_raw<kNarrow>(from, tokens.qkv_dtype) : 0;
      pin(values_[t]);
    }
  }
  __device__ __forceinline__ char* place_of(const View& t, const Request& r) const {
    return t.at(static_cast<unsigned>(r.s.slot), at_.hv, v0_);
  }
  // Requests entries, what a convolution needs, and the state. Prepares the entries, and returns how many there are.
  __device__ __forceinline__ int ask_state(const Request& r, const Before& before, Convolution& convolution) {
    // Entries are requested before the state, which takes longer and is not needed as soon.
    const int own_channel = thread_ - (kThreads - kMostK);  // the last threads: the first have drafts
    const bool has_channel = own_channel >= 0 && (kCall.fast || own_channel < K());
    EntryChannel entry_channel;
    int next = before.newest;
    if (has_channel) entry_channel.fetch(before, own_channel, next);
    int entries = 0;
    for (int w = before.newest; w >= 0 && entries < m_.entries.entries; w = before.window.before(w), ++entries)
      if (thread_ < m_.columns)
        copy_async(shared_ + m_.entries.u + entries * m_.columns + thread_,
                   &before.entries.u_at(before.window.entry(w), thread_));
    if (front()) convolution.fetch(x_.front, at_, r.s, T_, v0_);

    if constexpr (kCall.fast)
      tile_.template ask<kThreads>(place_of(x_.state, r), x_.state.stride2, m_.columns, r.s.initial);
    else
      tile_.template ask_any<kThreads>(place_of(x_.state, r), x_.state_dtype, x_.state.stride2, m_.columns, r.s.initial,
                                       K());
    let_next_start();
    if (entries && has_channel) prepare_entries(before, entry_channel, next, own_channel, m_.entries, shared_);
    return entries;
  }

  // ---- activation and the walk back: scores, and keys and queries as the state sees them ----

  __device__ __forceinline__ void take_convolved(const Request& r, const Convolution& convolution) {
    convolution.values(x_.front, at_, r.s, T_, v0_, shared_);
    __syncthreads();  // q, k and v of all drafts are in shared memory
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts_[i].t < T_) drafts_[i].take(m_, shared_, K());
  }
  __device__ __forceinline__ void prepare_drafts(const Request& r, const Entries& record) {
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
      if (drafts_[i].t >= T_) continue;
      drafts_[i].activate(x_.tokens, m_, shared_);
      if (at_.tile == 0 && r.slot >= 0)
        drafts_[i].record(record, r.verify.entry(r.verify.token(drafts_[i].t)), at_.h * blocks_.group.divisor == at_.hv,
                          K());
    }
    __syncthreads();  // keys and decays of all drafts are in shared memory
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts_[i].t < T_) drafts_[i].walk(r.verify, m_, shared_);
    __syncthreads();  // keys and decays are read
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
      if (drafts_[i].t < T_) drafts_[i].store(m_, shared_);

    ptx::wait_for_all_copies();
    __syncthreads();  // the state, w, u, kG, qG and scores are in shared memory
  }

  // ---- products X and O: a warp has some columns, and K or a part of it ----

  // Powers of two: groups of columns, parts of K.
  __device__ int log_groups() const { return __ffs(m_.columns / kWarpColumns) - 1; }
  __device__ int parts() const { return kWarps >> log_groups(); }
  __device__ int part() const { return warp_ >> log_groups(); }
  __device__ int column0() const { return (warp_ - (part() << log_groups())) * kWarpColumns; }
  // This lane's place in fragments.
  __device__ int n() const { return lane_ / 4; }
  __device__ int j() const { return lane_ % 4; }

  static constexpr int kNear = 4;  // entries whose u stay in registers

  // The state's columns of a warp, and what is done with them on the way to the products.
  struct Columns {
    const State* first;
    const float *keys, *u;
    float near[kNear][kTiles];
    char* to;  // in memory, if entries are applied there, too
    int entries;
  };
  template <bool kApply>
  __device__ __forceinline__ Columns columns_of(const Request& r, int entries) const {
    const int row = kSlices == 1 ? min(n(), room() - 1) : n();  // rows beyond the drafts are not used
    Columns x{tile_.lane(column0() + n(), j()),
              shared_ + row * m_.keys_stride + 8 * j(),
              shared_ + m_.entries.u + column0(),
              {},
              nullptr,
              entries};
#pragma unroll
    for (int e = 0; kApply && e < kNear; ++e)
#pragma unroll
      for (int i = 0; i < kTiles; ++i) x.near[e][i] = e < entries ? x.u[e * m_.columns + 8 * i + n()] : 0.0f;
    if constexpr (kFlushes<P>)
      x.to = place_of(x_.state, r) + static_cast<uint64_t>(column0() + n()) * x_.state.stride2 +
             4 * j() * bytes_of_state<kCall>(x_.state_dtype);
    return x;
  }
  // Applies the entries to 16 channels of a warp's columns. stores: also to the state in memory.
  __device__ __forceinline__ void apply(const Columns& x, int step, bool stores, float4 (&S)[kTiles]) const {
    const int c = step * 16 + 4 * j();
    const float4 f = load_four(shared_ + m_.entries.f + c);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) S[i] = S[i] * f;
    for (int e = x.entries - 1; e >= kNear; --e) {
      const float4 w = load_four(shared_ + m_.entries.w + e * kMostK + c);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) S[i] = fma(x.u[e * m_.columns + 8 * i + n()], w, S[i]);
    }
#pragma unroll
    for (int e = kNear - 1; e >= 0; --e) {
      if (e >= x.entries) continue;
      const float4 w = load_four(shared_ + m_.entries.w + e * kMostK + c);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) S[i] = fma(x.near[e][i], w, S[i]);
    }
    if (kFlushes<P> && stores) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        S[i] = store_rounded<kCall>(x.to + static_cast<uint64_t>(8 * i) * x_.state.stride2, step * 16, x_.state_dtype,
                                    S[i]);
      }
    }
  }
  // Adds the products of 16 channels.
  template <bool kApply>
  __device__ __forceinline__ void add_products(const Columns& x, int step, const float4 (&S)[kTiles],
                                               Sums<kSlices>& sums) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int next = slice ? min(8, room() - 1 - n()) * m_.keys_stride : 0;
      const float4* pairs = reinterpret_cast<const float4*>(x.keys + next + step * 32);
      const Split low(pairs[0]), high(pairs[1]);  // channels 4 j and 4 j + 1, then the others
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const Split state(S[i]);
        const bool small = kApply || !holds_bf16<kCall>(x_.state_dtype);  // a bf16 state has no small part
        mma3(sums.sum[slice][i], low, state, 0, small), mma3(sums.sum[slice][i], high, state, 1, small);
      }
    }
  }
  // kApply: there are entries.
  template <bool kApply>
  __device__ __forceinline__ void multiply(const Request& r, const Before& before, int entries,
                                           Sums<kSlices>& all) const {
    const int steps = K() / kQuarters / 16, twist = tile_.twist(n());
    const Columns x = columns_of<kApply>(r, entries);
    const int quarters = parts() == kQuarters ? 1 : 2;  // quarters of a half that this warp does
    const int halves = parts() == 1 ? 2 : 1;
#pragma unroll 1
    for (int i = 0, quarter = part() * halves * quarters; i < halves; ++i, quarter += quarters) {
      Sums<kSlices> half{};
#pragma unroll 1
      for (int group = quarter * steps; group < (quarter + quarters) * steps; group += steps) {
        Sums<kSlices> one{};
#pragma unroll
        for (int step = group; step < group + steps; ++step) {
          float4 S[kTiles];  // of this lane: four channels of four columns
#pragma unroll
          for (int i = 0; i < kTiles; ++i) S[i] = load_four(x.first + i * 8 * kMostK + (step ^ twist) * 16);
          if constexpr (kApply) apply(x, step, before.apply, S);
          add_products<kApply>(x, step, S, one);
        }
        half += one;
      }
      all += half;
    }
  }

  // ---- outputs: a thread has a column ----

  // Products in shared memory: [parts][kG of all drafts, then qG][columns].
  __device__ float* product(int part, int row) const { return shared_ + (part * 2 * room() + row) * m_.columns; }

  __device__ __forceinline__ void share_products(const Sums<kSlices>& all) const {
    __syncthreads();  // kG and qG are read
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int t = slice * 8 + n();
      if (t >= T_) continue;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float(&sum)[4] = all.sum[slice][i];
        const int column = column0() + 8 * i + 2 * j();
        *reinterpret_cast<float2*>(product(part(), t) + column) = make_float2(sum[0], sum[1]);
        *reinterpret_cast<float2*>(product(part(), room() + t) + column) = make_float2(sum[2], sum[3]);
      }
    }
    __syncthreads();  // all parts of X and O are in shared memory
  }
  __device__ __forceinline__ void write_outputs(const Request& r, const Entries& record) const {
    const int parts = this->parts();
    const auto whole = [&](int row) {  // a product of all channels
      const auto at = [&](int part) { return product(part, row)[thread_]; };
      return parts == 1 ? at(0) : parts == 2 ? at(0) + at(1) : (at(0) + at(1)) + (at(2) + at(3));
    };
    const Tokens& tokens = x_.tokens;
    const float* scores = shared_ + m_.scores;
    const float* beta = scores + 2 * room() * room();
    char* to = tokens.o.at(static_cast<unsigned>(r.s.b), static_cast<unsigned>(r.s.t0), at_.hv) +
               own_v_ * size_of(tokens.o_dtype);
    float u[kMaxDrafts];
#pragma unroll
    for (int t = 0; t < kMaxDrafts; ++t) {
      if (t >= T_) break;
      const float *A = scores + t * room(), *P_ = A + room() * room();
      const unsigned ancestors = __float_as_uint(beta[room() + t]);
      const float v = front() ? shared_[m_.front.v + t * m_.columns + thread_] : value_of(tokens.qkv_dtype, values_[t]);
      float rest = v - whole(t), o = whole(room() + t);
#pragma unroll
      for (int i = 0; i < t; ++i) {
        if (!kCall.fast && !(ancestors >> i & 1)) continue;
        rest = fmaf(-A[i], u[i], rest), o = fmaf(P_[i], u[i], o);
      }
      u[t] = beta[t] * rest;
      store_element(to, tokens.o_dtype, fmaf(P_[t], u[t], o));
      to += tokens.o.stride1;
      if (r.slot >= 0) record.u_at(r.verify.entry(r.verify.token(t)), thread_) = u[t];
    }
  }

  const Blocks& blocks_;
  const Seen x_;  // a reference, or on the fast path a copy
  const Memory m_;
  const Tile<State, kMostK> tile_;
  float* const shared_;
  const Place at_;
  const int thread_, warp_, lane_;
  const unsigned v0_, own_v_;  // the first column of the block, and the thread's own

  Draft<kMaxDrafts> drafts_[kPerWarp];
  const char* from_v_ = nullptr;
  unsigned values_[kMaxDrafts];  // of the thread's column, if they are not in shared memory
  int T_ = 0;                    // drafts of the request
};

}  // namespace kda::cuda::mma
