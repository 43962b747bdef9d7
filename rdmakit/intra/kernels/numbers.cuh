// Element types, how they are stored and in what they are accumulated; and the reductions of them.
// Plain C++ on top of base.cuh: a test compiles it for the host.
//
// bool is reduced as uint8, and signed integers as unsigned ones but for min and max (see
// device_kernels.py), so there are fewer types here than there.

template <class S>
struct Plain {
  typedef S Stored;
  typedef S Acc;
  static __device__ Acc widen(Stored x) { return x; }
  static __device__ Stored narrow(Acc x) { return x; }
};
typedef Plain<float> float32;
typedef Plain<double> float64;
typedef Plain<signed char> int8;
typedef Plain<short> int16;
typedef Plain<int> int32;
typedef Plain<i64> int64;

// Unsigned integers wrap. Short ones are widened: C would make them signed, which may not overflow.
template <class S, class A>
struct Unsigned {
  typedef S Stored;
  typedef A Acc;
  static __device__ Acc widen(Stored x) { return x; }
  static __device__ Stored narrow(Acc x) { return (S)x; }
};
typedef Unsigned<u8, u32> uint8;
typedef Unsigned<u16, u32> uint16;
typedef Unsigned<u32, u32> uint32;
typedef Unsigned<u64, u64> uint64;

struct float16 {
  typedef u16 Stored;
  typedef float Acc;
  static __device__ float widen(u16 x) { return from_half(x); }
  static __device__ u16 narrow(float x) { return to_half(x); }
};

struct bfloat16 {
  typedef u16 Stored;
  typedef float Acc;
  static __device__ float widen(u16 x) { return from_bfloat(x); }
  static __device__ u16 narrow(float x) { return to_bfloat(x); }
};

// Only for products: sums of complex numbers are sums of twice as many floats.
template <class F>
struct alignas(2 * sizeof(F)) Complex {
  F re, im;
};
typedef Plain<Complex<float>> complex64;
typedef Plain<Complex<double>> complex128;

template <class A>
static __device__ __forceinline__ A multiply(A a, A b) {
  return a * b;
}
template <class F>
static __device__ __forceinline__ Complex<F> multiply(Complex<F> a, Complex<F> b) {
  Complex<F> c;
  c.re = plus(times(a.re, b.re), -times(a.im, b.im));
  c.im = plus(times(a.re, b.im), times(a.im, b.re));
  return c;
}

// Reductions: `first op second`, and what is done to the result of all. Min and max keep a NaN of
// either side, as NumPy's do, and of equals take the second.

struct Keep {
  template <class A>
  static __device__ __forceinline__ A finish(A a, u32) { return a; }
};
#define RDK_REDUCTION(NAME, EXPRESSION)                                        \
  struct NAME : Keep {                                                         \
    template <class A>                                                         \
    static __device__ __forceinline__ A apply(A a, A b) { return EXPRESSION; } \
  };
RDK_REDUCTION(Sum, a + b)
RDK_REDUCTION(Prod, multiply(a, b))
RDK_REDUCTION(Max, a > b || a != a ? a : b)
RDK_REDUCTION(Min, a < b || a != a ? a : b)
RDK_REDUCTION(Land, (A)(a != 0 && b != 0))
RDK_REDUCTION(Lor, (A)(a != 0 || b != 0))
RDK_REDUCTION(Lxor, (A)((a != 0) != (b != 0)))
RDK_REDUCTION(Band, a & b)
RDK_REDUCTION(Bor, a | b)
RDK_REDUCTION(Bxor, a ^ b)
struct Avg {
  template <class A>
  static __device__ __forceinline__ A apply(A a, A b) { return a + b; }
  template <class A>
  static __device__ __forceinline__ A finish(A a, u32 n) { return divide(a, n); }
};

// out = in[0] op in[1] op ... of N sources, element by element, in that order.
template <class T, class Op, class P, u32 N>
static __device__ __forceinline__ void fold(const P (&in)[N], P& out) {
#pragma unroll
  for (u32 i = 0; i < P::N; ++i) {
    typename T::Acc acc = T::widen(in[0].e[i]);
#pragma unroll
    for (u32 p = 1; p < N; ++p) acc = Op::apply(acc, T::widen(in[p].e[i]));
    out.e[i] = T::narrow(Op::finish(acc, N));
  }
}
