// All-reduce and reduce-scatter of the ranks of one node. Loads start at the next rank, so that
// the ranks do not all pull on one peer's link; sums are made in rank order, so that every
// algorithm gives the same bits on every rank.

typedef RDK_OP Op;
typedef Sync<RDK_TEAMS> Teams;

// Reduce U units: unit u lies `u * step` bytes after `at` in each rank's memory. ONCE: it is not
// read again soon, as what is in a window is.
template <class P, u32 U, bool ONCE>
static __device__ __forceinline__ void reduce(const u64* base, u64 at, u64 step, P* out) {
  P in[U][RANKS];
#pragma unroll
  for (u32 u = 0; u < U; ++u) {
#pragma unroll
    for (u32 k = 0; k < RANKS; ++k) {
      const u32 p = (RANK + 1 + k) % RANKS;
      if (ONCE) in[u][p].load_once(base[p] + at + u * step);
      else in[u][p].load(base[p] + at + u * step);
    }
  }
#pragma unroll
  for (u32 u = 0; u < U; ++u) fold<T, Op>(in[u], out[u]);
}

// Store to every rank's memory, the own last, or to the own only.
template <class P, bool ALL>
static __device__ __forceinline__ void deliver(const P& v, const u64* to, u64 at) {
  if (ALL) {
#pragma unroll
    for (u32 k = 0; k < RANKS; ++k) v.store_once(to[(RANK + 1 + k) % RANKS] + at);
  } else {
    v.store_once(to[RANK] + at);
  }
}

// Reduce units [first, last) of registered memory. Offsets are in bytes and the same everywhere,
// but for `shift` bytes between input and output.
template <class P, bool ALL>
static __device__ __forceinline__ void reduce_range(
    const Args& a, u64 offset, i64 shift, u64 first, u64 last, u64 start, u64 step) {
  const u64 unit = P::N * SIZE;
  u64 i = first + start;
  for (; i + (RDK_UNROLL - 1) * step < last; i += RDK_UNROLL * step) {
    P out[RDK_UNROLL];
    reduce<P, RDK_UNROLL, true>(a.send, offset + i * unit, step * unit, out);
#pragma unroll
    for (u32 u = 0; u < RDK_UNROLL; ++u)
      deliver<P, ALL>(out[u], a.recv, offset + (i + u * step) * unit + shift);
  }
  for (; i < last; i += step) {
    P out[1];
    reduce<P, 1, true>(a.send, offset + i * unit, 0, out);
    deliver<P, ALL>(out[0], a.recv, offset + i * unit + shift);
  }
}

// The same for packs, dealt out to the warps as they finish: no two SMs are equally fast, and the
// slowest would be waited for. Tickets are counted in the window.
template <bool ALL>
static __device__ __forceinline__ void deal(
    const Args& a, u64 offset, i64 shift, u64 first, u64 last) {
  const u32 lane = threadIdx.x % 32;
  const u64 size = 32 * RDK_UNROLL * RDK_STEPS, warps = (u64)gridDim.x * (THREADS / 32);
  u32* const next = (u32*)(a.window[RANK] + RDK_TICKET);
  u64 i = ((u64)blockIdx.x * THREADS + threadIdx.x) / 32;
  while (first + i * size < last) {
    u32 ticket = 0;
    if (lane == 0) ticket = atomicAdd(next, 1);  // arrives while the packs are reduced
    const u64 from = first + i * size;
    reduce_range<Pack, ALL>(a, offset, shift, from, least(from + size, last), lane, 32);
    i = warps + __shfl_sync(0xffffffffu, ticket, 0);
  }
}

// The last block to come here makes the tickets start from 0 again.
static __device__ __forceinline__ void end_deal(const Args& a) {
  u32* const next = (u32*)(a.window[RANK] + RDK_TICKET);
  if (threadIdx.x == 0 && atomicInc(next + 1, gridDim.x - 1) == gridDim.x - 1) atomicExch(next, 0);
}

// Where this rank finds what rank r gave it for the sum, in bytes of an address: `at` is the region,
// `own` its own part of the input, and each slot of a window has `size` bytes. See Way.
template <bool PUSH>
static __device__ __forceinline__ u64 given_by(const Args& a, u64 at, u64 own, u64 size, u32 r) {
  if (!PUSH) return a.window[r] + at;
  return r == RANK ? own : a.window[RANK] + at + (r < RANK ? r : r - 1) * size;
}

// Reduce n elements that all ranks gave this one into its `to`, by one team.
template <bool PUSH>
static __device__ __forceinline__ void reduce_tile(
    const Args& a, u64 at, u64 own, u64 size, u64 to, u32 n, u32 tid) {
  u64 base[RANKS];
#pragma unroll
  for (u32 r = 0; r < RANKS; ++r) base[r] = given_by<PUSH>(a, at, own, size, r);
  u32 done = 0;
  if (aligned(PUSH ? to | own : to)) {
    const u32 packs = n / LANES;
    for (u32 i = tid; i < packs; i += Teams::SIZE) {
      Pack out;
      reduce<Pack, 1, false>(base, i * 16, 0, &out);
      out.store(to + i * 16);
    }
    done = packs * LANES;
  }
  for (u32 i = done + tid; i < n; i += Teams::SIZE) {
    One out;
    reduce<One, 1, false>(base, i * SIZE, 0, &out);
    out.store(to + i * SIZE);
  }
}

// Give n elements at `from` to rank p, by one team: the other side of given_by.
template <bool PUSH>
static __device__ __forceinline__ void give(
    const Args& a, u64 at, u64 from, u64 size, u32 n, u32 p, u32 tid) {
  const u64 to = PUSH ? a.window[p] + at + (RANK < p ? RANK : RANK - 1) * size : a.window[RANK] + at;
  copy<true, Teams::SIZE>(to, from, n, tid);
}

// Two-shot on registered memory: rank r reduces shard r and stores it into every rank's output.
// count: elements of the array. In place is right: one thread reads and writes an element.
#ifdef RDK_allreduce_direct
KERNEL allreduce_direct(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (!s.meet(0)) return;
  const u64 start = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  u64 share = (a.packs + RANKS - 1) / RANKS;
  deal<true>(a, a.head * SIZE, 0, least(RANK * share, a.packs), least((RANK + 1) * share, a.packs));
  share = (a.head + RANKS - 1) / RANKS;
  reduce_range<One, true>(a, 0, 0, least(RANK * share, a.head),
                          least((RANK + 1) * share, a.head), start, step);
  const u64 from = a.head + a.packs * LANES, tail = a.count - from;
  share = (tail + RANKS - 1) / RANKS;
  reduce_range<One, true>(a, from * SIZE, 0, least(RANK * share, tail),
                          least((RANK + 1) * share, tail), start, step);
  if (!s.meet(1)) return;
  s.done();
  end_deal(a);
}
#endif

// Reduce-scatter on registered inputs; the output may be any memory of this rank's.
// count: elements of the output. In place: only this rank reads block RANK of its input.
#ifdef RDK_reduce_scatter_direct
KERNEL reduce_scatter_direct(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (!s.meet(0)) return;
  const u64 start = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  const u64 block = RANK * a.count * SIZE;
  deal<false>(a, block + a.head * SIZE, -(i64)block, 0, a.packs);
  reduce_range<One, false>(a, block, -(i64)block, 0, a.head, start, step);
  const u64 from = a.head + a.packs * LANES;
  reduce_range<One, false>(a, block + from * SIZE, -(i64)block, 0, a.count - from,
                           start, step);
  if (!s.meet(1)) return;
  s.done();
  end_deal(a);
}
#endif

// One-shot: every rank gives its input to all, by its window or theirs, and reduces all of them. One
// meeting, any memory. count: elements of the array, at most one tile a team (PUSH: all slots of a
// team's region together).
#ifdef RDK_allreduce_oneshot
KERNEL allreduce_oneshot(const __grid_constant__ Args a) {
  Teams s(a);
  const u64 packs = (a.count + LANES - 1) / LANES, share = (packs + s.teams() - 1) / s.teams();
  const u64 first = least(s.team * share * LANES, a.count);
  const u32 n = (u32)least(share * LANES, a.count - first);
  const u64 tile = s.tile(), from = a.send[RANK] + first * SIZE, size = share * 16;
  if (RDK_PUSH) {
#pragma unroll
    for (u32 k = 0; k < RANKS - 1; ++k)
      give<RDK_PUSH>(a, tile, from, size, n, (RANK + 1 + k) % RANKS, s.tid);
  } else {
    give<RDK_PUSH>(a, tile, from, size, n, RANK, s.tid);
  }
  if (!s.meet(0)) return;
  reduce_tile<RDK_PUSH>(a, tile, from, size, a.recv[RANK] + first * SIZE, n, s.tid);
  s.done();
}
#endif

// Units [begin, end) of a tile, of which [p * share, (p + 1) * share) are rank p's to reduce.
template <class P>
struct Tile {
  static const u32 UNIT = P::N * SIZE;
  u32 begin, end, share, first, last;  // first, last: this rank's

  __device__ __forceinline__ Tile(u32 b, u32 e, u32 s) : begin(b), end(e), share(s) {
    first = clamp(RANK * share);
    last = clamp((RANK + 1) * share);
  }
  __device__ __forceinline__ u32 clamp(u32 i) const { return i < begin ? begin : i < end ? i : end; }
  // How many are not this rank's; the j-th of them, from the next rank's on.
  __device__ __forceinline__ u32 others() const { return end - begin - (last - first); }
  __device__ __forceinline__ u32 other(u32 j) const {
    return j < end - last ? last + j : begin + j - (end - last);
  }

};

// A tile of n elements: whole packs, where this rank's arrays allow it, and the rest. Who reduces
// an element is the same on all ranks.
struct Cut {
  u32 n, whole, share;
  __device__ __forceinline__ Cut(u32 elements, bool aligned)
      : n(elements), whole(aligned ? elements / LANES : 0),
        share(((elements + LANES - 1) / LANES + RANKS - 1) / RANKS) {}
  __device__ __forceinline__ Tile<Pack> packs() const { return Tile<Pack>(0, whole, share); }
  __device__ __forceinline__ Tile<One> rest() const {
    return Tile<One>(whole * LANES, n, share * LANES);
  }
};

// Who touches whose memory in a step. PUSH: all that crosses a link is written, by the rank that has
// it, into the window of the rank that needs it; otherwise each rank writes into its own window, and
// the others read there. OUT: results go straight into every rank's output, which is registered.
template <class P, bool PUSH, bool OUT>
struct Way {
  static const u32 UNIT = P::N * SIZE;

  // Unit `at` of another rank's shard, given to that rank in the region `in`. Its window has a slot
  // for each of the others.
  static __device__ __forceinline__ u64 given(const Args& a, u64 in, const Tile<P>& t, u32 at) {
    if (!PUSH) return a.window[RANK] + in + at * UNIT;
    const u32 owner = RANKS == 2 ? 1 - RANK : at / t.share;
    return a.window[owner] + in + slot(RANK, owner, t.share) + (at - owner * t.share) * UNIT;
  }
  // The same where this rank, which owns the shard, finds what rank r gave.
  static __device__ __forceinline__ u64 found(const Args& a, u64 in, const Tile<P>& t, u32 at, u32 r) {
    if (!PUSH) return a.window[r] + in + at * UNIT;
    return a.window[RANK] + in + slot(r, RANK, t.share) + (at - RANK * t.share) * UNIT;
  }
  static __device__ __forceinline__ u64 slot(u32 from, u32 owner, u32 share) {
    return (u64)(from < owner ? from : from - 1) * share * UNIT;
  }
  // A result of this rank's, in the region `out` of the windows or at `to` in every output.
  static __device__ __forceinline__ void publish(const Args& a, const P& v, u64 out, u64 to, u32 at) {
    if (OUT) {
#pragma unroll
      for (u32 k = 0; k < RANKS; ++k) v.store_once(a.recv[(RANK + 1 + k) % RANKS] + to + (u64)at * UNIT);
      return;
    }
    if (PUSH) {
#pragma unroll
      for (u32 k = 0; k < RANKS - 1; ++k) v.store(a.window[(RANK + 1 + k) % RANKS] + out + at * UNIT);
    } else {
      v.store(a.window[RANK] + out + at * UNIT);
    }
    v.store_once(a.recv[RANK] + to + (u64)at * UNIT);
  }
  // Where this rank finds a result of rank `owner`.
  static __device__ __forceinline__ u64 result(const Args& a, u64 out, u32 at, u32 owner) {
    return a.window[PUSH ? RANK : owner] + out + at * UNIT;
  }
};

// One step of three tiles: the others' shards of this rank's input are given to them (p), its own
// shard is reduced from what they gave and its own array (s), and the others' results come out of
// the windows (g), unless they went straight into the outputs. All loads of a round are under way
// together. Offsets are in bytes: at_p, at_s, at_g in the arrays, in and was in the windows.
template <class P, bool PUSH, bool OUT>
static __device__ __forceinline__ void step(
    const Args& a, const Tile<P> p, u64 at_p, u64 in, const Tile<P> s, u64 at_s, u64 was,
    const Tile<P> g, u64 at_g, u32 tid) {
  typedef Way<P, PUSH, OUT> W;
  const u32 U = 4, V = RANKS < 8 ? 8 / RANKS : 1, unit = P::N * SIZE, TEAM = Teams::SIZE;
  const u32 mp = p.others(), ms = s.last - s.first, mg = OUT ? 0 : g.others();
  const u64 out = in + RDK_TILE, done = was + RDK_TILE;
  const u64 from = a.send[RANK], to = a.recv[RANK];
  u32 i = tid, j = tid;
  for (; i < mp || i < mg || j < ms; i += U * TEAM, j += V * TEAM) {
    P vp[U], vg[U], vs[V][RANKS];
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mp) vp[u].load_once(from + at_p + (u64)p.other(i + u * TEAM) * unit);
#pragma unroll
    for (u32 v = 0; v < V; ++v) {
      const u32 at = s.first + j + v * TEAM;
      if (at >= s.last) continue;
#pragma unroll
      for (u32 k = 0; k < RANKS; ++k) {
        const u32 r = (RANK + 1 + k) % RANKS;
        if (r == RANK) vs[v][r].load_once(from + at_s + (u64)at * unit);
        else vs[v][r].load(W::found(a, was, s, at, r));
      }
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      if (i + u * TEAM >= mg) continue;
      const u32 at = g.other(i + u * TEAM);
      vg[u].load(W::result(a, done, at, at / g.share));
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mp) vp[u].store(W::given(a, in, p, p.other(i + u * TEAM)));
#pragma unroll
    for (u32 v = 0; v < V; ++v) {
      const u32 at = s.first + j + v * TEAM;
      if (at >= s.last) continue;
      P result;
      fold<T, Op>(vs[v], result);
      W::publish(a, result, out, at_s, at);
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mg) vg[u].store_once(to + at_g + (u64)g.other(i + u * TEAM) * unit);
  }
}

// Two-shot in tiles, for memory that the peers cannot address. In step k of a team its tile k goes
// in, its shard of tile k-1 is reduced, and tile k-2 comes out, with one meeting for each step. What
// a rank reduces itself never passes its window. In place is right: a shard is read before its
// result is stored anywhere.
template <bool PUSH, bool OUT>
static __device__ __forceinline__ void in_tiles(const Args& a, bool whole) {
  Teams s(a);
  const u64 stride = (u64)s.teams() * a.piece;
  u64 n[3] = {0, 0, 0};  // elements of tiles k, k-1 and k-2
  for (u64 first = (u64)s.team * a.piece;; first += stride) {
    n[2] = n[1];
    n[1] = n[0];
    n[0] = first < a.count ? least(a.piece, a.count - first) : 0;
    const u64 at0 = first * SIZE, at1 = at0 - stride * SIZE, at2 = at1 - stride * SIZE;
    const u64 in = s.tile(), was = s.other_tile();
    const Cut c0((u32)n[0], whole), c1((u32)n[1], whole), c2((u32)n[2], whole);
    step<Pack, PUSH, OUT>(a, c0.packs(), at0, in, c1.packs(), at1, was, c2.packs(), at2, s.tid);
    step<One, PUSH, OUT>(a, c0.rest(), at0, in, c1.rest(), at1, was, c2.rest(), at2, s.tid);
    if (!n[0] && !n[1]) break;
    if (!s.meet(0)) return;
  }
  s.done();
}

// The tiles stay in the L2 cache where ranks share a GPU. count: elements of the array.
#ifdef RDK_allreduce_staged
KERNEL allreduce_staged(const __grid_constant__ Args a) {
  in_tiles<RDK_PUSH, false>(a, aligned(a.send[RANK] | a.recv[RANK]));
}
#endif

// The same with results that go straight into the outputs, which are registered; the inputs may be
// any memory. A link carries writes alone, which are faster than reads. count: elements of the array.
#ifdef RDK_allreduce_push
KERNEL allreduce_push(const __grid_constant__ Args a) {
  u64 all = a.send[RANK];
#pragma unroll
  for (u32 r = 0; r < RANKS; ++r) all |= a.recv[r];
  in_tiles<true, true>(a, aligned(all));
}
#endif

// Reduce-scatter through the windows: a tile holds a piece for each rank. In step k tile k is given to
// the ranks it is for, and tile k-1 is reduced. In place: only this rank reads block RANK of its input.
// count: elements of the output.
#ifdef RDK_reduce_scatter_staged
KERNEL reduce_scatter_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u32 size = a.piece;  // elements of one rank's share
  const u64 from = a.send[RANK], block = RANK * a.count, bytes = size * SIZE;
  u32 n = 0, last = 0;  // elements of tiles k and k-1
  for (u64 first = (u64)s.team * size;; first += (u64)s.teams() * size) {
    last = n;
    n = first < a.count ? (u32)least(size, a.count - first) : 0;
#pragma unroll
    for (u32 k = 0; k < RANKS; ++k) {
      const u32 p = (RANK + 1 + k) % RANKS;
      const u64 part = RDK_PUSH ? 0 : p * bytes;
      if (!RDK_PUSH || p != RANK)
        give<RDK_PUSH>(a, s.tile() + part, from + (p * a.count + first) * SIZE, bytes, n, p, s.tid);
    }
    const u64 then = (first - (u64)s.teams() * size) * SIZE;
    const u64 mine = RDK_PUSH ? 0 : RANK * bytes;
    reduce_tile<RDK_PUSH>(a, s.other_tile() + mine, from + block * SIZE + then, bytes,
                          a.recv[RANK] + then, last, s.tid);
    if (!n) break;
    if (!s.meet(0)) return;
  }
  s.done();
}
#endif
