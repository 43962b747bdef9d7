// Shared by all kernels: types, 16-byte packs, reductions, memory access. No header is included,
// so NVRTC needs no include path and compiles in a fraction of the time.
//
// Set by the caller (see device_kernels.py):
//   RDK_T      element type        RDK_OP     reduction
//   RDK_RANKS  ranks of the node   RDK_RANK   this rank
//   RDK_THREADS threads of a block RDK_UNROLL packs a thread has under way at once
//   RDK_TEAMS  teams of a block in kernels that go through the window
//   RDK_STEPS  rounds of packs a warp takes at a time in kernels that do not
//   RDK_<kernel> one for each kernel that is wanted: compiling all takes a second or two

#define KERNEL extern "C" __global__ void __launch_bounds__(RDK_THREADS, 1)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- element types: how they are stored, and in what they are accumulated ----------------------

template <class S>
struct Plain {
  typedef S Stored;
  typedef S Acc;
  static __device__ Acc widen(Stored x) { return x; }
  static __device__ Stored narrow(Acc x) { return x; }
};
typedef Plain<float> float32;
typedef Plain<double> float64;
typedef Plain<u8> uint8;
typedef Plain<u16> uint16;
typedef Plain<u32> uint32;
typedef Plain<u64> uint64;

// Signed integers are accumulated unsigned for sum and product, which wrap like NumPy's.
template <class S, class U>
struct Signed {
  typedef S Stored;
  typedef S Acc;
  typedef U Wrap;
  static __device__ Acc widen(Stored x) { return x; }
  static __device__ Stored narrow(Acc x) { return x; }
};
typedef Signed<signed char, u32> int8;
typedef Signed<int, u32> int32;
typedef Signed<i64, u64> int64;

struct float16 {
  typedef u16 Stored;
  typedef float Acc;
  static __device__ float widen(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  static __device__ u16 narrow(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
};

struct bfloat16 {
  typedef u16 Stored;
  typedef float Acc;
  static __device__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
  static __device__ u16 narrow(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
};

template <class T>
struct Arithmetic {
  typedef typename T::Acc A;
  static __device__ A add(A a, A b) { return a + b; }
  static __device__ A mul(A a, A b) { return a * b; }
};
template <class S, class U>
struct Arithmetic<Signed<S, U>> {
  static __device__ S add(S a, S b) { return (S)((U)a + (U)b); }
  static __device__ S mul(S a, S b) { return (S)((U)a * (U)b); }
};

// ---- reductions; a NaN on either side is kept by min and max, as NumPy's ------------------------

struct Sum {
  template <class T>
  static __device__ typename T::Acc apply(typename T::Acc a, typename T::Acc b) {
    return Arithmetic<T>::add(a, b);
  }
};
struct Prod {
  template <class T>
  static __device__ typename T::Acc apply(typename T::Acc a, typename T::Acc b) {
    return Arithmetic<T>::mul(a, b);
  }
};
struct Max {
  template <class T>
  static __device__ typename T::Acc apply(typename T::Acc a, typename T::Acc b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  static __device__ typename T::Acc apply(typename T::Acc a, typename T::Acc b) {
    return a < b || a != a ? a : b;
  }
};

typedef RDK_T T;
typedef T::Stored Stored;

// ---- access -------------------------------------------------------------------------------------

struct alignas(16) Vec {
  u32 x, y, z, w;
};

// 16 bytes of a peer's or of this rank's memory. Never the read-only path: others write it. asm
// volatile keeps the order of issue, by which the ranks start at different peers.
static __device__ __forceinline__ Vec load16(u64 at) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
static __device__ __forceinline__ void store16(u64 at, Vec v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// The same for data that is touched once: it makes room in the L2 cache first.
static __device__ __forceinline__ Vec load16_once(u64 at) {
  Vec v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
static __device__ __forceinline__ void store16_once(u64 at, Vec v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

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
struct One {
  static const u32 N = 1;
  Stored e[1];
  __device__ __forceinline__ void load(u64 at) { e[0] = *(volatile const Stored*)at; }
  __device__ __forceinline__ void load_once(u64 at) { load(at); }
  __device__ __forceinline__ void store(u64 at) const { *(volatile Stored*)at = e[0]; }
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
