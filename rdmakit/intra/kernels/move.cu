// All-gather, broadcast and barrier of the ranks of one node. RDK_T is an unsigned integer of the
// largest size that divides all addresses and lengths; its value does not matter.

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

// Nothing but the meeting. One block.
#ifdef RDK_barrier
KERNEL barrier(const __grid_constant__ Args a) {
  Sync<1> s(a);
  if (s.meet(0)) s.done();
}
#endif
