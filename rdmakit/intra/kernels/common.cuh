// Shared by all kernels: 16-byte packs, elements and copies, on top of access.cuh.
//
// Set by the caller (see device_kernels.py):
//   RDK_T      element type        RDK_OP     reduction (both of numbers.cuh)
//   RDK_RANKS  ranks of the node   RDK_RANK   this rank
//   RDK_THREADS threads of a block RDK_UNROLL packs a thread has under way at once
//   RDK_TEAMS  teams of a block in kernels that go through the window
//   RDK_STEPS  rounds of packs a warp takes at a time in kernels that do not
//   RDK_<kernel> one for each kernel that is wanted: compiling all takes a second or two

typedef RDK_T T;
typedef T::Stored Stored;

// One unit of work: a pack of 16 bytes, or one element where memory is not aligned.
struct Pack {
  static const u32 N = 16 / sizeof(Stored);
  union {
    Vec raw;
    Stored e[N];
  };
  __device__ __forceinline__ void load(u64 at) { raw = load16(at); }
  __device__ __forceinline__ void load_once(u64 at) { raw = load16_once(at); }
  __device__ __forceinline__ void store(u64 at) const { store16(at, raw); }
  __device__ __forceinline__ void store_once(u64 at) const { store16_once(at, raw); }
};
// An element as machine words, which memory is read and written by.
template <u32 BYTES>
struct Word;
template <>
struct Word<1> {
  typedef u8 Type;
};
template <>
struct Word<2> {
  typedef u16 Type;
};
template <>
struct Word<4> {
  typedef u32 Type;
};
template <>
struct Word<8> {
  typedef u64 Type;
};
template <>
struct Word<16> {  // as two of 8
  typedef u64 Type;
};
struct One {
  static const u32 N = 1;
  typedef Word<sizeof(Stored)>::Type Raw;
  static const u32 WORDS = sizeof(Stored) / sizeof(Raw);
  union {
    Raw raw[WORDS];
    Stored e[1];
  };
  __device__ __forceinline__ void load(u64 at) {
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) raw[i] = ((volatile const Raw*)at)[i];
  }
  __device__ __forceinline__ void load_once(u64 at) { load(at); }
  __device__ __forceinline__ void store(u64 at) const {
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) ((volatile Raw*)at)[i] = raw[i];
  }
  __device__ __forceinline__ void store_once(u64 at) const { store(at); }
};

static const u32 THREADS = RDK_THREADS;
static const u64 SIZE = sizeof(Stored);
static const u32 LANES = 16 / sizeof(Stored);  // elements of a pack

static __device__ __forceinline__ bool aligned(u64 at) { return (at & 15) == 0; }
static __device__ __forceinline__ u64 least(u64 a, u64 b) { return a < b ? a : b; }

// Copy n elements by N threads: into the window (IN: the source is read once), or out of it.
template <bool IN, u32 N>
static __device__ __forceinline__ void copy(u64 dst, u64 src, u64 n, u32 tid) {
  const u32 U = 4;
  u64 done = 0;
  if (aligned(dst | src)) {
    const u64 packs = n / LANES;
    for (u64 i = tid; i < packs; i += U * N) {
      Pack v[U];
#pragma unroll
      for (u32 u = 0; u < U; ++u) {
        if (i + u * N >= packs) continue;
        if (IN) v[u].load_once(src + (i + u * N) * 16);
        else v[u].load(src + (i + u * N) * 16);
      }
#pragma unroll
      for (u32 u = 0; u < U; ++u) {
        if (i + u * N >= packs) continue;
        if (IN) v[u].store(dst + (i + u * N) * 16);
        else v[u].store_once(dst + (i + u * N) * 16);
      }
    }
    done = packs * LANES;
  }
#pragma unroll 4
  for (u64 i = done + tid; i < n; i += N) {
    One v;
    v.load(src + i * SIZE);
    v.store(dst + i * SIZE);
  }
}
