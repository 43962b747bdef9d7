// What only a GPU can do with memory: 16 bytes at once, with a word to the caches.

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
