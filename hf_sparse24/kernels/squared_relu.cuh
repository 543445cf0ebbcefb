// h = relu(u)^2, or relu(gate)^2 u, and which two of every four are kept.  Compile with -D GATED.  Behind common.cuh.

// NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

__device__ __forceinline__ u32 square_of(u32 two) {
    const float low = larger(number(u16(two)), 0.f), high = larger(number(u16(two >> 16)), 0.f);
    return pair(low * low, high * high);
}

// Two h.
__device__ __forceinline__ u32 activated(u32 u, u32 gate) {
    if (!GATED) return square_of(u);
    const u32 squared = square_of(gate);
    return pair(number(u16(squared)) * number(u16(u)), number(u16(squared >> 16)) * number(u16(u >> 16)));
}

__device__ __forceinline__ uint4 activated(const uint4* u, const uint4* gate, int i) {
    const uint4 a = u[i];
    uint4 b = a;
    if (GATED) b = gate[i];
    return make_uint4(activated(a.x, b.x), activated(a.y, b.y), activated(a.z, b.z), activated(a.w, b.w));
}

// Of four h the kept ones.  A key is a magnitude, then three minus the column, then the sign: no two are equal.
struct Kept { u32 first, second; };  // in the order of their columns

__device__ __forceinline__ u32 key_of(u32 bits, u32 rank) { return (bits & 0x7FFF) << 3 | rank << 1 | (GATED ? bits >> 15 & 1 : 0); }

__device__ __forceinline__ Kept largest_two(u32 low, u32 high) {
    const u32 a = key_of(low, 3), b = key_of(low >> 16, 2), c = key_of(high, 1), d = key_of(high >> 16, 0);
    const u32 ab = max(a, b), cd = max(c, d), most = max(ab, cd), next = max(min(ab, cd), max(min(a, b), min(c, d)));
    const bool in_order = (most & 6) > (next & 6);
    return {in_order ? most : next, in_order ? next : most};
}

__device__ __forceinline__ u32 column_of(u32 key) { return 3 - (key >> 1 & 3); }
__device__ __forceinline__ u32 bits_of(u32 key) { return key >> 3 | (GATED ? key << 15 & 0x8000 : 0); }
__device__ __forceinline__ u32 nibble_of(const Kept& kept) { return 1u << column_of(kept.first) | 1u << column_of(kept.second); }
__device__ __forceinline__ u32 values_of(const Kept& kept) { return bits_of(kept.first) | bits_of(kept.second) << 16; }

// The same four with zeros where they are dropped.
__device__ __forceinline__ void drop(u32& low, u32& high) {
    const u32 nibble = nibble_of(largest_two(low, high));
    low &= (nibble & 1 ? 0xFFFFu : 0) | (nibble & 2 ? 0xFFFF0000u : 0);
    high &= (nibble & 4 ? 0xFFFFu : 0) | (nibble & 8 ? 0xFFFF0000u : 0);
}
