// All-reduce and reduce-scatter of the ranks of one node. Loads start at the next rank, so that
// the ranks do not all pull on one peer's link; sums are made in rank order, so that every
// algorithm gives the same bits on every rank.

typedef RDK_OP Op;

// out = in[0] op in[1] op ..., in rank order.
template <class P>
static __device__ __forceinline__ void fold(const P (&in)[RANKS], P& out) {
#pragma unroll
  for (u32 i = 0; i < P::N; ++i) {
    T::Acc acc = T::widen(in[0].e[i]);
#pragma unroll
    for (u32 p = 1; p < RANKS; ++p) acc = Op::template apply<T>(acc, T::widen(in[p].e[i]));
    out.e[i] = T::narrow(acc);
  }
}

// Reduce U units: unit u lies `u * step` bytes after `at` in each rank's memory.
template <class P, u32 U>
static __device__ __forceinline__ void reduce(const u64* base, u64 at, u64 step, P* out) {
  P in[U][RANKS];
#pragma unroll
  for (u32 u = 0; u < U; ++u) {
#pragma unroll
    for (u32 k = 0; k < RANKS; ++k) {
      const u32 p = (RANK + 1 + k) % RANKS;
      in[u][p].load(base[p] + at + u * step);
    }
  }
#pragma unroll
  for (u32 u = 0; u < U; ++u) fold(in[u], out[u]);
}

// Reduce units [first, last) of all ranks' `from`, and store each into `n` ranks' `to` (the own one
// last). Offsets are in bytes and the same everywhere, but for `shift` bytes between from and to.
template <class P, bool ALL>
static __device__ __forceinline__ void reduce_range(
    const u64* from, const u64* to, u64 offset, i64 shift, u64 first, u64 last, u64 start, u64 step) {
  const u64 unit = P::N * SIZE;
  u64 i = first + start;
  for (; i + (RDK_UNROLL - 1) * step < last; i += RDK_UNROLL * step) {
    P out[RDK_UNROLL];
    reduce<P, RDK_UNROLL>(from, offset + i * unit, step * unit, out);
#pragma unroll
    for (u32 u = 0; u < RDK_UNROLL; ++u) {
      const u64 at = offset + (i + u * step) * unit + shift;
      if (ALL) {
#pragma unroll
        for (u32 k = 0; k < RANKS; ++k) out[u].store(to[(RANK + 1 + k) % RANKS] + at);
      } else {
        out[u].store(to[RANK] + at);
      }
    }
  }
  for (; i < last; i += step) {
    P out[1];
    reduce<P, 1>(from, offset + i * unit, 0, out);
    const u64 at = offset + i * unit + shift;
    if (ALL) {
#pragma unroll
      for (u32 k = 0; k < RANKS; ++k) out[0].store(to[(RANK + 1 + k) % RANKS] + at);
    } else {
      out[0].store(to[RANK] + at);
    }
  }
}

// Reduce n elements of all ranks' windows from offset `at` into this rank's `to`, by one block.
static __device__ __forceinline__ void reduce_tile(const Args& a, u64 at, u64 to, u32 n) {
  u32 done = 0;
  if (aligned(to)) {
    const u32 packs = n / LANES;
    for (u32 i = threadIdx.x; i < packs; i += THREADS) {
      Pack out;
      reduce<Pack, 1>(a.window, at + i * 16, 0, &out);
      out.store(to + i * 16);
    }
    done = packs * LANES;
  }
  for (u32 i = done + threadIdx.x; i < n; i += THREADS) {
    One out;
    reduce<One, 1>(a.window, at + i * SIZE, 0, &out);
    out.store(to + i * SIZE);
  }
}

// Two-shot on registered memory: rank r reduces shard r and stores it into every rank's output.
// count: elements of the array. In place is right: one thread reads and writes an element.
#ifdef RDK_allreduce_direct
KERNEL allreduce_direct(const __grid_constant__ Args a) {
  Sync s(a);
  if (!s.meet(0)) return;
  const u64 start = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  u64 share = (a.packs + RANKS - 1) / RANKS;
#if RDK_DYNAMIC
  {
    const u64 first = least(RANK * share, a.packs), last = least((RANK + 1) * share, a.packs);
    const u32 lane = threadIdx.x % 32;
    const u64 size = 32 * RDK_UNROLL * RDK_DYNAMIC, warps = step / 32;
    u32* ticket = (u32*)(a.window[RANK] + RDK_TICKET);
    u64 i = start / 32;
    while (first + i * size < last) {
      u32 t = 0;
      if (lane == 0) t = atomicAdd(ticket, 1);
      const u64 from = first + i * size;
      reduce_range<Pack, true>(a.send, a.recv, a.head * SIZE, 0, from, least(from + size, last), lane, 32);
      i = warps + __shfl_sync(0xffffffff, t, 0);
    }
  }
#else
  reduce_range<Pack, true>(a.send, a.recv, a.head * SIZE, 0, least(RANK * share, a.packs),
                           least((RANK + 1) * share, a.packs), start, step);
#endif
  share = (a.head + RANKS - 1) / RANKS;
  reduce_range<One, true>(a.send, a.recv, 0, 0, least(RANK * share, a.head),
                          least((RANK + 1) * share, a.head), start, step);
  const u64 from = a.head + a.packs * LANES, tail = a.count - from;
  share = (tail + RANKS - 1) / RANKS;
  reduce_range<One, true>(a.send, a.recv, from * SIZE, 0, least(RANK * share, tail),
                          least((RANK + 1) * share, tail), start, step);
  if (!s.meet(1)) return;
  s.done();
#if RDK_DYNAMIC
  if (threadIdx.x == 0 && atomicInc((u32*)(a.window[RANK] + RDK_TICKET + 4), gridDim.x - 1) == gridDim.x - 1)
    *(volatile u32*)(a.window[RANK] + RDK_TICKET) = 0;
#endif
}
#endif

// Reduce-scatter on registered inputs; the output may be any memory of this rank's.
// count: elements of the output. In place: only this rank reads block RANK of its input.
#ifdef RDK_reduce_scatter_direct
KERNEL reduce_scatter_direct(const __grid_constant__ Args a) {
  Sync s(a);
  if (!s.meet(0)) return;
  const u64 start = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  const u64 block = RANK * a.count * SIZE;
  reduce_range<Pack, false>(a.send, a.recv, block + a.head * SIZE, -(i64)block, 0, a.packs, start,
                            step);
  reduce_range<One, false>(a.send, a.recv, block, -(i64)block, 0, a.head, start, step);
  const u64 from = a.head + a.packs * LANES;
  reduce_range<One, false>(a.send, a.recv, block + from * SIZE, -(i64)block, 0, a.count - from,
                           start, step);
  if (s.meet(1)) s.done();
}
#endif

// One-shot: every rank puts its input into its window and reduces all of them. One meeting, any
// memory. count: elements of the array, at most one tile a block.
#ifdef RDK_allreduce_oneshot
KERNEL allreduce_oneshot(const __grid_constant__ Args a) {
  Sync s(a);
  const u64 packs = (a.count + LANES - 1) / LANES, share = (packs + gridDim.x - 1) / gridDim.x;
  const u64 first = least(blockIdx.x * share * LANES, a.count);
  const u32 n = (u32)least(share * LANES, a.count - first);
  const u64 tile = s.tile();
  copy<true>(a.window[RANK] + tile, a.send[RANK] + first * SIZE, n);
  if (!s.meet(0)) return;
  reduce_tile(a, tile, a.recv[RANK] + first * SIZE, n);
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

  // The others' shards of this rank's input into its window.
  __device__ __forceinline__ void put(u64 to, u64 from) const {
    const u32 U = 4, m = others();
    for (u32 i = threadIdx.x; i < m; i += U * THREADS) {
      P v[U];
#pragma unroll
      for (u32 u = 0; u < U; ++u)
        if (i + u * THREADS < m) v[u].load_once(from + (u64)other(i + u * THREADS) * UNIT);
#pragma unroll
      for (u32 u = 0; u < U; ++u)
        if (i + u * THREADS < m) v[u].store(to + (u64)other(i + u * THREADS) * UNIT);
    }
  }

  // This rank's shard: the peers' input from their windows, its own from its array.
  __device__ __forceinline__ void sum(const Args& a, u64 in, u64 out, u64 from, u64 to) const {
    for (u32 i = first + threadIdx.x; i < last; i += THREADS) {
      P v[RANKS], result;
#pragma unroll
      for (u32 k = 0; k < RANKS; ++k) {
        const u32 p = (RANK + 1 + k) % RANKS;
        if (p == RANK) v[p].load_once(from + (u64)i * UNIT);
        else v[p].load(a.window[p] + in + i * UNIT);
      }
      fold(v, result);
      result.store(a.window[RANK] + out + i * UNIT);
      result.store_once(to + (u64)i * UNIT);
    }
  }

  // The others' results from their windows.
  __device__ __forceinline__ void get(const Args& a, u64 out, u64 to) const {
    const u32 U = 4, m = others();
    for (u32 i = threadIdx.x; i < m; i += U * THREADS) {
      P v[U];
#pragma unroll
      for (u32 u = 0; u < U; ++u) {
        const u32 at = other(i + u * THREADS);
        if (i + u * THREADS < m) v[u].load(a.window[at / share] + out + at * UNIT);
      }
#pragma unroll
      for (u32 u = 0; u < U; ++u)
        if (i + u * THREADS < m) v[u].store_once(to + (u64)other(i + u * THREADS) * UNIT);
    }
  }
};

// Two-shot through the windows, for memory that the peers cannot address. In step k of a block its
// tile k goes in, its shard of tile k-1 is reduced, and tile k-2 comes out, with one meeting for
// each step. What a rank reduces itself never passes its window. The tiles stay in the L2 cache.
// count: elements of the array. In place is right: a shard is read before its result is stored.
#ifdef RDK_allreduce_staged
KERNEL allreduce_staged(const __grid_constant__ Args a) {
  Sync s(a);
  const u64 from = a.send[RANK], to = a.recv[RANK], stride = (u64)gridDim.x * a.piece;
  const bool whole = aligned(from | to);
  for (u64 first = (u64)blockIdx.x * a.piece;; first += stride) {
    const u64 in = s.tile(), was = s.other_tile();
    bool more = false;
#pragma unroll
    for (u32 k = 0; k < 3; ++k) {
      const u64 at = first - k * stride;  // wraps round before the first tile
      if (at >= a.count) continue;
      const u32 n = (u32)least(a.piece, a.count - at), packs = whole ? n / LANES : 0;
      const u32 share = ((n + LANES - 1) / LANES + RANKS - 1) / RANKS;
      const Tile<Pack> body(0, packs, share);
      const Tile<One> rest(packs * LANES, n, share * LANES);
      if (k == 0) {
        body.put(a.window[RANK] + in, from + at * SIZE);
        rest.put(a.window[RANK] + in, from + at * SIZE);
      } else if (k == 1) {
        body.sum(a, was, in + RDK_TILE, from + at * SIZE, to + at * SIZE);
        rest.sum(a, was, in + RDK_TILE, from + at * SIZE, to + at * SIZE);
      } else {
        body.get(a, was + RDK_TILE, to + at * SIZE);
        rest.get(a, was + RDK_TILE, to + at * SIZE);
      }
      more |= k < 2;
    }
    if (!more) break;
    if (!s.meet(0)) return;
  }
  s.done();
}
#endif

// Reduce-scatter through the windows: a tile holds a piece for each rank.
// count: elements of the output.
#ifdef RDK_reduce_scatter_staged
KERNEL reduce_scatter_staged(const __grid_constant__ Args a) {
  Sync s(a);
  const u32 size = a.piece;  // of one rank's share
  for (u64 first = (u64)blockIdx.x * size; first < a.count; first += (u64)gridDim.x * size) {
    const u32 n = (u32)least(size, a.count - first);
    const u64 tile = s.tile();
    for (u32 p = 0; p < RANKS; ++p)
      copy<true>(a.window[RANK] + tile + p * size * SIZE,
                 a.send[RANK] + (p * a.count + first) * SIZE, n);
    if (!s.meet(0)) return;
    reduce_tile(a, tile + RANK * size * SIZE, a.recv[RANK] + first * SIZE, n);
  }
  s.done();
}
#endif
