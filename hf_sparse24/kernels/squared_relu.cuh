// h = relu(u)^2, or relu(gate)^2 u, and which two of every four are kept.  Two numbers of 16 bits are worked on at a time.
// Compile with -D GATED.  Behind common.cuh.

#if BF16
#define TYPE "bf16x2"
#else
#define TYPE "f16x2"
#endif

// NaN if one is NaN, as all that follows.
__device__ __forceinline__ float larger(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

__device__ __forceinline__ u32 larger_two(u32 a, u32 b) {
    u32 larger;
    asm("max.NaN." TYPE " %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Exact products, rounded: -0 is added, which changes none.
__device__ __forceinline__ u32 product_of_two(u32 a, u32 b) {
    u32 product;
    asm("fma.rn." TYPE " %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    return product;
}

__device__ __forceinline__ u32 activated(u32 u, u32 gate) {
    const u32 positive = larger_two(GATED ? gate : u, 0), squared = product_of_two(positive, positive);
    return GATED ? product_of_two(squared, u) : squared;
}

__device__ __forceinline__ uint4 activated(const uint4* u, const uint4* gate, int i) {
    const uint4 a = u[i];
    uint4 b = a;
    if (GATED) b = gate[i];
    return make_uint4(activated(a.x, b.x), activated(a.y, b.y), activated(a.z, b.z), activated(a.w, b.w));
}

__device__ __forceinline__ u32 magnitudes(u32 two) { return GATED ? two & 0x7FFF7FFF : two; }

// Which of a, b (low: the two halves of it) and c, d (high) are the two of largest magnitude, the lower column of equal ones: a number
// below eight, times four.  Magnitudes have 15 bits, NaN is the largest, and bit 15 of (x | 0x8000) - y says that x >= y: of two at once.
__device__ __forceinline__ u32 choice_of(u32 low, u32 high) {
    constexpr u32 TOP = 0x80008000;
    const u32 ab = magnitudes(low), cd = magnitudes(high);
    const u32 ac_bd = (ab | TOP) - cd, ad_bc = (ab | TOP) - __byte_perm(cd, 0, 0x1032);
    const u32 ab_cd = (__byte_perm(ab, cd, 0x5410) | TOP) - __byte_perm(ab, cd, 0x7632);
    // Of three comparisons each has to win two; bit 15 for a, 31 for b and c.
    const u32 a = (ac_bd & ad_bc) | (ab_cd & (ac_bd | ad_bc));
    const u32 lost_to_a = ~(ab_cd << 16), b = (ac_bd & ad_bc) | (lost_to_a & (ac_bd | ad_bc));
    const u32 lost_to_a2 = ~(ac_bd << 16), lost_to_b = ~ad_bc, c = (lost_to_a2 & lost_to_b) | (ab_cd & (lost_to_a2 | lost_to_b));
    return ((a >> 12 & 8) | (b >> 29 & 4) | (c >> 27 & 16)) & 28;
}

// For each choice: how __byte_perm(low, high) takes the two, and from bit 16 on the four bits of the mask.  In shared memory; a
// __syncthreads must follow.
__device__ __forceinline__ void fill_choices(u32* choices) {
    if (threadIdx.x >= 8) return;
    const u32 b = threadIdx.x & 1, a = threadIdx.x >> 1 & 1, c = threadIdx.x >> 2 & 1;
    const u32 first = a ? 0 : b ? 1 : 2, second = a + b + c < 2 ? 3 : c ? 2 : 1;
    choices[threadIdx.x] = (0x1010 + 0x22 * first + 0x2200 * second) | (1u << first | 1u << second) << 16;
}

__device__ __forceinline__ u32 found(const u32* choices, u32 choice) {
    return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(choices) + choice);
}

// The same four with zeros where they are dropped.
__device__ __forceinline__ void drop(u32& low, u32& high, const u32* choices) {
    const u32 mask = found(choices, choice_of(low, high)) >> 16;
    low &= (mask & 1 ? 0xFFFFu : 0) | (mask & 2 ? 0xFFFF0000u : 0);
    high &= (mask & 4 ? 0xFFFFu : 0) | (mask & 8 ? 0xFFFF0000u : 0);
}
