// How the ranks of a node wait for each other inside a kernel.
//
// Team b of every rank meets team b of the others. A rank posts by a release store of
// (signature, epoch) into each peer's flags and waits for theirs in its own. Epochs are kept in
// the window, one for each team, and advanced by the kernel, so that a captured graph can be
// replayed. Two sets of flags serve in turn: a peer is at most one meeting ahead, so a word is
// read before it is written again, and words that do not match are calls that do not match.
//
// A wait ends by the time limit, by the abort word of the host, or when a peer says that it has
// failed; then the error words are written, the peers are told, and every later kernel of this
// window returns at once.
//
// Memory model (PTX ISA, "Memory Consistency Model"): a barrier orders the team's accesses
// before the release at system scope, and after the acquire.

static const u32 MAX_RANKS = RDK_MAX_RANKS;
static const u32 RANKS = RDK_RANKS;
static const u32 RANK = RDK_RANK;

struct Args {
  u64 send[MAX_RANKS];
  u64 recv[MAX_RANKS];
  u64 window[MAX_RANKS];
  u64 count;      // elements: of the call, or of one rank's share; each kernel says which
  u64 head;       // elements before the first whole pack
  u64 packs;      // whole packs after them; 0 where the ranks' memory is aligned differently
  u64 limit;      // nanoseconds one wait may take
  u64 words;      // host memory: see WORD_*
  u32 signature;  // equal on all ranks that make the same call
  u32 root;
  u32 piece;      // elements of a tile that are used, a multiple of a pack
  u32 unused;
};

enum { WORD_ABORT, WORD_STATE, WORD_PEER, WORD_PHASE, WORD_BLOCK, WORD_EPOCH, WORD_WANT, WORD_GOT };
enum { TIMED_OUT = 1, ABORTED, TOLD, MISMATCH };

static __device__ __forceinline__ void post(u64 at, u64 word) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(at), "l"(word) : "memory");
}
static __device__ __forceinline__ u64 seen(u64 at) {
  u64 word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
static __device__ __forceinline__ u32 peek(u64 at) {
  u32 word;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}
static __device__ __forceinline__ void poke(u64 at, u32 word) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(at), "r"(word) : "memory");
}
static __device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// A block works as TEAMS teams, each with flags, tiles and meetings of its own, so that one moves
// data while another waits. (More blocks would do as well, but it takes one for each SM to be sure
// that all of them are resident at once; a block that is not would never be met.)
template <u32 TEAMS>
struct Sync {
  static const u32 SIZE = THREADS / TEAMS;  // threads of a team

  const Args& a;
  const u32 tid;   // this thread in its team
  const u32 team;  // this team in the grid
  u32 epoch;
  u32 dead;

  __device__ __forceinline__ explicit Sync(const Args& args)
      : a(args), tid(threadIdx.x % SIZE), team(blockIdx.x * TEAMS + threadIdx.x / SIZE) {
    const u64 mine = a.window[RANK];
    epoch = peek(mine + RDK_EPOCHS + 4 * team);
    dead = peek(mine + RDK_FAILED);
  }

  static __device__ __forceinline__ u32 teams() { return gridDim.x * TEAMS; }

  // Where in each window this team of its rank keeps what the peers will read after the next
  // meeting, and until the one after it. Two regions in turn, by the epoch of writing: when it
  // is `epoch` again to write one, all have met twice since they could read it.
  __device__ __forceinline__ u64 tile() const { return tile_at(epoch); }
  // What the peers have written before the last meeting.
  __device__ __forceinline__ u64 other_tile() const { return tile_at(epoch + 1); }

  // Wait for this team of all ranks; false when the kernel must end.
  __device__ bool meet(u32 phase) {
    join(0);
    epoch += 1;
    u32 bad = dead;
    if (!dead && tid < RANKS - 1) {
      const u32 peer = (RANK + 1 + tid) % RANKS;
      const u64 row = RDK_FLAGS + ((u64)(epoch & 1) * RDK_MAX_TEAMS + team) * MAX_RANKS * 8;
      const u64 word = (u64)(a.signature + phase) << 32 | epoch;
      post(a.window[peer] + row + RANK * 8, word);
      bad = wait(a.window[RANK] + row + peer * 8, word, peer, phase);
    }
    return !join(bad);
  }

  __device__ void done() {
    if (tid == 0) poke(a.window[RANK] + RDK_EPOCHS + 4 * team, epoch);
  }

 private:
  __device__ __forceinline__ u64 tile_at(u32 when) const {
    return RDK_TILES + (2ull * team + (when & 1)) * 2 * RDK_TILE;
  }

  // A barrier of the team; returns whether any thread gave something but 0.
  static __device__ __forceinline__ u32 join(u32 value) {
    if (TEAMS == 1) return __syncthreads_or(value);
    u32 any;
    // By whole warps, in the aligned form. PTX allows the other as well, but synccheck reports it.
    __syncwarp();
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 q, %1, 0; barrier.cta.red.or.pred.aligned p, %2, %3, q;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(any) : "r"(value), "r"(1 + threadIdx.x / SIZE), "n"(SIZE) : "memory");
    return any;
  }

  __device__ u32 wait(u64 at, u64 word, u32 peer, u32 phase) {
    u64 got = seen(at), since = 0;
    for (u32 polls = 1; (int)((u32)got - (u32)word) < 0; ++polls, got = seen(at)) {
      if (polls % 64) continue;
      if (peek(a.window[RANK] + RDK_FAILED)) return 1;
      if (peek(a.window[RANK] + RDK_TOLD + 4 * peer)) return fail(TOLD, got, word, peer, phase);
      const u64 now = nanoseconds();
      if (!since) since = now;
      if (now - since > a.limit) return fail(TIMED_OUT, got, word, peer, phase);
      if (polls % 1024 == 0) {
        if (peek(a.words + 4 * WORD_ABORT)) return fail(ABORTED, got, word, peer, phase);
        if (now - since > 100000) __nanosleep(1000);  // a long wait leaves the memory to others
      }
    }
    return got == word ? 0 : fail(MISMATCH, got, word, peer, phase);
  }

  __device__ __noinline__ u32 fail(u32 state, u64 got, u64 word, u32 peer, u32 phase) {
    if (atomicCAS((u32*)(a.window[RANK] + RDK_FAILED), 0u, state) == 0) {
      poke(a.words + 4 * WORD_PEER, peer);
      poke(a.words + 4 * WORD_PHASE, phase);
      poke(a.words + 4 * WORD_BLOCK, team);
      poke(a.words + 4 * WORD_EPOCH, (u32)got);
      poke(a.words + 4 * WORD_WANT, (u32)(word >> 32));
      poke(a.words + 4 * WORD_GOT, (u32)(got >> 32));
      asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(a.words + 4 * WORD_STATE), "r"(state)
                   : "memory");
      for (u32 p = 0; p < RANKS; ++p)
        if (p != RANK) poke(a.window[p] + RDK_TOLD + 4 * RANK, state);
    }
    return 1;
  }
};
