// What all kernels stand on: names of integers, and what only a GPU can do with a number. No header
// is included, so NVRTC needs no include path and compiles in a fraction of the time.

#define KERNEL extern "C" __global__ void __launch_bounds__(RDK_THREADS, 1)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static __device__ __forceinline__ float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
static __device__ __forceinline__ u16 to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
static __device__ __forceinline__ float from_bfloat(u16 x) { return __uint_as_float((u32)x << 16); }
static __device__ __forceinline__ u16 to_bfloat(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Each is rounded by itself: no product is fused with a sum, so that all ranks, and the host, round
// alike.
static __device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
static __device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
static __device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
static __device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
static __device__ __forceinline__ float divide(float a, u32 n) { return __fdiv_rn(a, (float)n); }
static __device__ __forceinline__ double divide(double a, u32 n) { return __ddiv_rn(a, (double)n); }
