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

// Reduce n elements of all ranks' windows from offset `at` into this rank's `to`, by one team.
static __device__ __forceinline__ void reduce_tile(
    const Args& a, u64 at, u64 to, u32 n, u32 tid) {
  u32 done = 0;
  if (aligned(to)) {
    const u32 packs = n / LANES;
    for (u32 i = tid; i < packs; i += Teams::SIZE) {
      Pack out;
      reduce<Pack, 1, false>(a.window, at + i * 16, 0, &out);
      out.store(to + i * 16);
    }
    done = packs * LANES;
  }
  for (u32 i = done + tid; i < n; i += Teams::SIZE) {
    One out;
    reduce<One, 1, false>(a.window, at + i * SIZE, 0, &out);
    out.store(to + i * SIZE);
  }
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

// One-shot: every rank puts its input into its window and reduces all of them. One meeting, any
// memory. count: elements of the array, at most one tile a team.
#ifdef RDK_allreduce_oneshot
KERNEL allreduce_oneshot(const __grid_constant__ Args a) {
  Teams s(a);
  const u64 packs = (a.count + LANES - 1) / LANES, share = (packs + s.teams() - 1) / s.teams();
  const u64 first = least(s.team * share * LANES, a.count);
  const u32 n = (u32)least(share * LANES, a.count - first);
  const u64 tile = s.tile();
  copy<true, Teams::SIZE>(a.window[RANK] + tile, a.send[RANK] + first * SIZE, n, s.tid);
  if (!s.meet(0)) return;
  reduce_tile(a, tile, a.recv[RANK] + first * SIZE, n, s.tid);
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

// One step of three tiles: the others' shards of this rank's input go into its window (p), its own
// shard is reduced from the peers' windows and its own array (s), and the others' results come out
// of theirs (g). All loads of a round are under way together.
template <class P>
static __device__ __forceinline__ void step(
    const Args& a, const Tile<P> p, u64 from_p, u64 in, const Tile<P> s, u64 from_s, u64 to_s, u64 was,
    const Tile<P> g, u64 to_g, u32 tid) {
  const u32 U = 4, V = RANKS < 8 ? 8 / RANKS : 1, unit = P::N * SIZE, TEAM = Teams::SIZE;
  const u32 mp = p.others(), ms = s.last - s.first, mg = g.others();
  const u64 out = in + RDK_TILE, done = was + RDK_TILE;
  u32 i = tid, j = tid;
  for (; i < mp || i < mg || j < ms; i += U * TEAM, j += V * TEAM) {
    P vp[U], vg[U], vs[V][RANKS];
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mp) vp[u].load_once(from_p + (u64)p.other(i + u * TEAM) * unit);
#pragma unroll
    for (u32 v = 0; v < V; ++v) {
      const u32 at = s.first + j + v * TEAM;
      if (at >= s.last) continue;
#pragma unroll
      for (u32 k = 0; k < RANKS; ++k) {
        const u32 r = (RANK + 1 + k) % RANKS;
        if (r == RANK) vs[v][r].load_once(from_s + (u64)at * unit);
        else vs[v][r].load(a.window[r] + was + at * unit);
      }
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      if (i + u * TEAM >= mg) continue;
      const u32 at = g.other(i + u * TEAM);
      vg[u].load(a.window[at / g.share] + done + at * unit);
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mp)
        vp[u].store(a.window[RANK] + in + p.other(i + u * TEAM) * unit);
#pragma unroll
    for (u32 v = 0; v < V; ++v) {
      const u32 at = s.first + j + v * TEAM;
      if (at >= s.last) continue;
      P result;
      fold<T, Op>(vs[v], result);
      result.store(a.window[RANK] + out + at * unit);
      result.store_once(to_s + (u64)at * unit);
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u)
      if (i + u * TEAM < mg) vg[u].store_once(to_g + (u64)g.other(i + u * TEAM) * unit);
  }
}

// Two-shot through the windows, for memory that the peers cannot address. In step k of a block its
// tile k goes in, its shard of tile k-1 is reduced, and tile k-2 comes out, with one meeting for
// each step. What a rank reduces itself never passes its window. The tiles stay in the L2 cache.
// count: elements of the array. In place is right: a shard is read before its result is stored.
#ifdef RDK_allreduce_staged
KERNEL allreduce_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u64 from = a.send[RANK], to = a.recv[RANK], stride = (u64)s.teams() * a.piece;
  const bool whole = aligned(from | to);
  u64 n[3] = {0, 0, 0};  // elements of tiles k, k-1 and k-2
  for (u64 first = (u64)s.team * a.piece;; first += stride) {
    n[2] = n[1];
    n[1] = n[0];
    n[0] = first < a.count ? least(a.piece, a.count - first) : 0;
    const u64 at0 = first * SIZE, at1 = at0 - stride * SIZE, at2 = at1 - stride * SIZE;
    const u64 in = s.tile(), was = s.other_tile();
    const Cut c0((u32)n[0], whole), c1((u32)n[1], whole), c2((u32)n[2], whole);
    step<Pack>(a, c0.packs(), from + at0, in, c1.packs(), from + at1, to + at1, was, c2.packs(),
               to + at2, s.tid);
    step<One>(a, c0.rest(), from + at0, in, c1.rest(), from + at1, to + at1, was, c2.rest(),
              to + at2, s.tid);
    if (!n[0] && !n[1]) break;
    if (!s.meet(0)) return;
  }
  s.done();
}
#endif

// Reduce-scatter through the windows: a tile holds a piece for each rank.
// count: elements of the output.
#ifdef RDK_reduce_scatter_staged
KERNEL reduce_scatter_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u32 size = a.piece;  // of one rank's share
  for (u64 first = (u64)s.team * size; first < a.count; first += (u64)s.teams() * size) {
    const u32 n = (u32)least(size, a.count - first);
    const u64 tile = s.tile();
    for (u32 p = 0; p < RANKS; ++p)
      copy<true, Teams::SIZE>(a.window[RANK] + tile + p * size * SIZE,
                 a.send[RANK] + (p * a.count + first) * SIZE, n, s.tid);
    if (!s.meet(0)) return;
    reduce_tile(a, tile + RANK * size * SIZE, a.recv[RANK] + first * SIZE, n, s.tid);
  }
  s.done();
}
#endif
