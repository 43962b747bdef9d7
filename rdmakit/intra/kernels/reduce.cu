// All-reduce and reduce-scatter of the ranks of one node. Loads start at the next rank, so that
// the ranks do not all pull on one peer's link; sums are made in rank order, so that every
// algorithm gives the same bits on every rank.

typedef RDK_OP Op;

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
  for (u32 u = 0; u < U; ++u) {
#pragma unroll
    for (u32 i = 0; i < P::N; ++i) {
      T::Acc acc = T::widen(in[u][0].e[i]);
#pragma unroll
      for (u32 p = 1; p < RANKS; ++p) acc = Op::template apply<T>(acc, T::widen(in[u][p].e[i]));
      out[u].e[i] = T::narrow(acc);
    }
  }
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
  reduce_range<Pack, true>(a.send, a.recv, a.head * SIZE, 0, least(RANK * share, a.packs),
                           least((RANK + 1) * share, a.packs), start, step);
  share = (a.head + RANKS - 1) / RANKS;
  reduce_range<One, true>(a.send, a.recv, 0, 0, least(RANK * share, a.head),
                          least((RANK + 1) * share, a.head), start, step);
  const u64 from = a.head + a.packs * LANES, tail = a.count - from;
  share = (tail + RANKS - 1) / RANKS;
  reduce_range<One, true>(a.send, a.recv, from * SIZE, 0, least(RANK * share, tail),
                          least((RANK + 1) * share, tail), start, step);
  if (s.meet(1)) s.done();
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

// Copy elements [first, last) of the result tiles to `to`; units [p * share, ...) of them are in
// rank p's window.
template <class P>
static __device__ __forceinline__ void gather(
    const Args& a, u64 tile, u64 to, u32 first, u32 last, u32 share) {
  const u32 U = 4, unit = P::N * SIZE, n = last - first;
  const u32 mine = (RANK + 1) * share < n ? (RANK + 1) * share : 0;  // start at the next rank's
  for (u32 i = threadIdx.x; i < n; i += U * THREADS) {
    P v[U];
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      const u32 j = i + u * THREADS, at = first + (j + mine < n ? j + mine : j + mine - n);
      if (j < n) v[u].load(a.window[at / share] + tile + at * unit);
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      const u32 j = i + u * THREADS, at = first + (j + mine < n ? j + mine : j + mine - n);
      if (j < n) v[u].store_once(to + at * unit);
    }
  }
}

// Two-shot through the windows, for memory that the peers cannot address: tile by tile a block
// copies its input in, reduces its shard of the tile, and pulls the other shards. The tiles stay
// in the L2 cache. count: elements of the array.
#ifdef RDK_allreduce_staged
KERNEL allreduce_staged(const __grid_constant__ Args a) {
  Sync s(a);
  const u32 size = RDK_TILE / SIZE;
  for (u64 first = (u64)blockIdx.x * size; first < a.count; first += (u64)gridDim.x * size) {
    const u32 n = (u32)least(size, a.count - first), packs = (n + LANES - 1) / LANES;
    const u32 share = (packs + RANKS - 1) / RANKS;
    const u64 in = s.tile();
    copy<true>(a.window[RANK] + in, a.send[RANK] + first * SIZE, n);
    if (!s.meet(0)) return;
    const u64 out = s.tile();
    // The last pack may hold old bytes past n, which nobody reads.
    reduce_range<Pack, false>(a.window, a.window, in, (i64)(out - in), least(RANK * share, packs),
                              least((RANK + 1) * share, packs), threadIdx.x, THREADS);
    if (!s.meet(1)) return;
    const u64 to = a.recv[RANK] + first * SIZE;
    const u32 whole = aligned(to) ? n / LANES : 0;
    gather<Pack>(a, out, to, 0, whole, share);
    gather<One>(a, out, to, whole * LANES, n, share * LANES);
  }
  s.done();
}
#endif

// Reduce-scatter through the windows: a tile holds a piece for each rank.
// count: elements of the output.
#ifdef RDK_reduce_scatter_staged
KERNEL reduce_scatter_staged(const __grid_constant__ Args a) {
  Sync s(a);
  const u32 size = RDK_TILE / RANKS / 16 * LANES;
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
