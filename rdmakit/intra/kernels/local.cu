// Work of one rank on its own memory: reduce several arrays into one, gather strided elements.

static const u32 SOURCES = RDK_RANKS;
static const u32 MAX_DIMS = RDK_MAX_DIMS;

#ifdef RDK_OP
typedef RDK_OP Op;

struct Sources {
  u64 dst;
  u64 src[RDK_MAX_RANKS];
  u64 count;
  u64 head;
  u64 packs;
};

template <class P>
static __device__ __forceinline__ void combine_range(const Sources& a, u64 offset, u64 n) {
  const u64 unit = P::N * SIZE;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < n; i += (u64)gridDim.x * THREADS) {
    const u64 at = offset + i * unit;
    P in[SOURCES], out;
#pragma unroll
    for (u32 k = 0; k < SOURCES; ++k) in[k].load(a.src[k] + at);
    fold<T, Op>(in, out);
    out.store(a.dst + at);
  }
}

// dst = src[0] op src[1] op ..., in that order; dst may be one of them. A mean is of these sources.
KERNEL combine(const __grid_constant__ Sources a) {
  combine_range<Pack>(a, a.head * SIZE, a.packs);
  combine_range<One>(a, 0, a.head);
  const u64 tail = a.head + a.packs * LANES;
  combine_range<One>(a, tail * SIZE, a.count - tail);
}

#else

struct Strided {
  u64 strided;
  u64 packed;
  u64 count;
  u64 first;  // elements before the first that is moved
  u64 shape[MAX_DIMS];  // last dimension first
  i64 stride[MAX_DIMS];  // bytes
  u32 dims;
  u32 wide;  // whether an index needs 64 bits: dividing those takes several times as long
};

template <class U>
static __device__ __forceinline__ u64 place(const Strided& a, U index) {
  i64 at = 0;
  for (u32 d = 0; d + 1 < a.dims; ++d) {
    const U n = (U)a.shape[d], next = index / n;
    at += (i64)(index - next * n) * a.stride[d];
    index = next;
  }
  return a.strided + at + (i64)index * a.stride[a.dims - 1];
}

template <class U, bool IN>
static __device__ __forceinline__ void move(const Strided& a) {
  const u64 step = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < a.count; i += step) {
    Stored* const one = (Stored*)place<U>(a, (U)(a.first + i));
    if (IN) ((Stored*)a.packed)[i] = *one;
    else *one = ((const Stored*)a.packed)[i];
  }
}

// packed[i] = element first + i, in C order, of a strided array.
KERNEL pack(const __grid_constant__ Strided a) {
  if (a.wide) move<u64, true>(a);
  else move<u32, true>(a);
}

KERNEL unpack(const __grid_constant__ Strided a) {
  if (a.wide) move<u64, false>(a);
  else move<u32, false>(a);
}
#endif
