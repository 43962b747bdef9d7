// All-gather, broadcast, all-to-all and barrier of the ranks of one node. RDK_T is an unsigned
// integer of the largest size that divides all addresses and lengths; its value does not matter.

typedef Sync<RDK_TEAMS> Teams;

struct Targets {  // stores to all ranks but one, starting at the next rank
  template <class P>
  static __device__ __forceinline__ void store(const P& v, const u64* to, u64 at, u32 skip) {
#pragma unroll
    for (u32 k = 0; k < RANKS; ++k) {
      const u32 p = (RANK + 1 + k) % RANKS;
      if (p != skip) v.store(to[p] + at);
    }
  }
};

// Copy units [first, last) from `src` to offset `at` of every rank's `to` but that of rank `skip`.
template <class P>
static __device__ __forceinline__ void spread(
    u64 src, const u64* to, u64 at, u64 first, u64 last, u32 skip) {
  const u64 unit = P::N * SIZE, step = (u64)gridDim.x * THREADS;
  const u32 U = 4;
  u64 i = first + (u64)blockIdx.x * THREADS + threadIdx.x;
  for (; i + (U - 1) * step < last; i += U * step) {
    P v[U];
#pragma unroll
    for (u32 u = 0; u < U; ++u) v[u].load(src + (i + u * step) * unit);
#pragma unroll
    for (u32 u = 0; u < U; ++u) Targets::store(v[u], to, at + (i + u * step) * unit, skip);
  }
  for (; i < last; i += step) {
    P v;
    v.load(src + i * unit);
    Targets::store(v, to, at + i * unit, skip);
  }
}

// count: elements of one rank's input. Outputs are registered; the input may be any memory.
#ifdef RDK_allgather_direct
KERNEL allgather_direct(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (!s.meet(0)) return;
  const u64 src = a.send[RANK], at = RANK * a.count * SIZE;
  const u32 skip = a.recv[RANK] + at == src ? RANK : RANKS;  // in place: the own block is there
  const u64 tail = a.head + a.packs * LANES;
  spread<Pack>(src + a.head * SIZE, a.recv, at + a.head * SIZE, 0, a.packs, skip);
  spread<One>(src, a.recv, at, 0, a.head, skip);
  spread<One>(src, a.recv, at, tail, a.count, skip);
  if (s.meet(1)) s.done();
}
#endif

// Move units [first, last) of PEERS ranks' blocks, from the next rank's on; of all RANKS the own is
// last. Rank p's block goes from `from(p)` to `to(p)`. Some PACKS units are under way together in
// a thread. LOAD, STORE: whether the memory is touched once.
template <class P, u32 PEERS, u32 PACKS, bool LOAD, bool STORE, class From, class To>
static __device__ __forceinline__ void exchange(
    const From& from, const To& to, u64 offset, u64 first, u64 last, u64 step) {
  const u32 U = PEERS < PACKS ? PACKS / PEERS : 1;
  const u64 unit = P::N * SIZE;
  for (u64 i = first; i < last; i += U * step) {
    P v[U][PEERS];
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      if (i + u * step >= last) continue;
      const u64 at = offset + (i + u * step) * unit;
#pragma unroll
      for (u32 k = 0; k < PEERS; ++k) {
        if (LOAD) v[u][k].load_once(from((RANK + 1 + k) % RANKS) + at);
        else v[u][k].load(from((RANK + 1 + k) % RANKS) + at);
      }
    }
#pragma unroll
    for (u32 u = 0; u < U; ++u) {
      if (i + u * step >= last) continue;
      const u64 at = offset + (i + u * step) * unit;
#pragma unroll
      for (u32 k = 0; k < PEERS; ++k) {
        if (STORE) v[u][k].store_once(to((RANK + 1 + k) % RANKS) + at);
        else v[u][k].store(to((RANK + 1 + k) % RANKS) + at);
      }
    }
  }
}

// Block p of the input goes to block RANK of rank p's output. Outputs are registered; the input may
// be any memory, apart from the output. count: elements of one block.
#ifdef RDK_alltoall_direct
KERNEL alltoall_direct(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (!s.meet(0)) return;
  const u64 block = a.count * SIZE;
  const auto from = [&](u32 p) { return a.send[RANK] + p * block; };
  const auto to = [&](u32 p) { return a.recv[p] + RANK * block; };
  const u64 start = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  const u64 tail = a.head + a.packs * LANES;
  exchange<Pack, RANKS, 8, true, true>(from, to, a.head * SIZE, start, a.packs, step);
  exchange<One, RANKS, 8, true, true>(from, to, 0, start, a.head, step);
  exchange<One, RANKS, 8, true, true>(from, to, 0, tail + start, a.count, step);
  if (s.meet(1)) s.done();
}
#endif

// Each rank but the root pulls a share from the root and stores it into the others' memory, so
// that no link carries the array more than once. count: elements of the array; recv: registered.
#ifdef RDK_broadcast_direct
KERNEL broadcast_direct(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (!s.meet(0)) return;
  if (RANK != a.root) {
    const u32 index = (RANK + RANKS - a.root) % RANKS - 1, n = RANKS - 1;
    const u64 src = a.recv[a.root];
    u64 share = (a.packs + n - 1) / n;
    spread<Pack>(src + a.head * SIZE, a.recv, a.head * SIZE, least(index * share, a.packs),
                 least((index + 1) * share, a.packs), a.root);
    share = (a.head + n - 1) / n;
    spread<One>(src, a.recv, 0, least(index * share, a.head), least((index + 1) * share, a.head),
                a.root);
    const u64 tail = a.head + a.packs * LANES;
    share = (a.count - tail + n - 1) / n;
    spread<One>(src, a.recv, 0, least(tail + index * share, a.count),
                least(tail + (index + 1) * share, a.count), a.root);
  }
  if (s.meet(1)) s.done();
}
#endif

// count: elements of one rank's input.
#ifdef RDK_allgather_staged
KERNEL allgather_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u32 size = a.piece;
  for (u64 first = (u64)s.team * size; first < a.count; first += (u64)s.teams() * size) {
    const u64 n = least(size, a.count - first), tile = s.tile();
    copy<true, Teams::SIZE>(a.window[RANK] + tile, a.send[RANK] + first * SIZE, n, s.tid);
    if (!s.meet(0)) return;
    for (u32 k = 0; k < RANKS; ++k) {
      const u32 p = (RANK + 1 + k) % RANKS;
      copy<false, Teams::SIZE>(a.recv[RANK] + (p * a.count + first) * SIZE, a.window[p] + tile, n, s.tid);
    }
  }
  s.done();
}
#endif

// count: elements of the array, which is send on the root and recv elsewhere.
#ifdef RDK_broadcast_staged
KERNEL broadcast_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u32 size = a.piece;
  for (u64 first = (u64)s.team * size; first < a.count; first += (u64)s.teams() * size) {
    const u64 n = least(size, a.count - first), tile = s.tile();
    if (RANK == a.root) copy<true, Teams::SIZE>(a.window[RANK] + tile, a.send[RANK] + first * SIZE, n, s.tid);
    if (!s.meet(0)) return;
    if (RANK != a.root) copy<false, Teams::SIZE>(a.recv[RANK] + first * SIZE, a.window[a.root] + tile, n, s.tid);
  }
  s.done();
}
#endif

// A tile has a slot for each rank. A rank stores the peers' pieces into their windows, since stores
// over NVLink are faster than loads, and copies out of its own after the meeting. The two regions
// serve here as well: a rank reads what was put into its window before it posts the next meeting,
// and the region is written again after that one. The own block passes no window.
// count: elements of one block.
#ifdef RDK_alltoall_staged
KERNEL alltoall_staged(const __grid_constant__ Args a) {
  Teams s(a);
  const u32 size = a.piece;  // of one slot
  const u64 block = a.count * SIZE, slot = size * SIZE;
  // A piece is whole packs where a block is, so that no elements are left over.
  const bool in = aligned(a.send[RANK] | block), both = in && aligned(a.recv[RANK]);
  for (u64 first = (u64)s.team * size; first < a.count; first += (u64)s.teams() * size) {
    const u64 n = least(size, a.count - first), at = first * SIZE, tile = s.tile();
    const auto mine = [&](u32 p) { return a.send[RANK] + p * block + at; };
    const auto there = [&](u32 p) { return a.window[p] + tile + RANK * slot; };
    if (in) exchange<Pack, RANKS - 1, 4, true, false>(mine, there, 0, s.tid, n / LANES, Teams::SIZE);
    else exchange<One, RANKS - 1, 4, true, false>(mine, there, 0, s.tid, n, Teams::SIZE);
    if (!s.meet(0)) return;
    const auto here = [&](u32 p) {
      return p == RANK ? a.send[RANK] + p * block + at : a.window[RANK] + tile + p * slot;
    };
    const auto to = [&](u32 p) { return a.recv[RANK] + p * block + at; };
    if (both) exchange<Pack, RANKS, 4, false, true>(here, to, 0, s.tid, n / LANES, Teams::SIZE);
    else exchange<One, RANKS, 4, false, true>(here, to, 0, s.tid, n, Teams::SIZE);
  }
  s.done();
}
#endif

// Nothing but the meeting. One block.
#ifdef RDK_barrier
KERNEL barrier(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (s.meet(0)) s.done();
}
#endif
