// Vectors of 16 numbers as four registers of NEON (64-bit ARM): see simd.h.

#pragma once

#include <arm_neon.h>

constexpr bool HAS_AVX512 = false;  // there are 32 registers of a quarter of a vector each

using Floats = Pair<Pair<float32x4_t>>;
using Integers = Pair<Pair<uint32x4_t>>;
using Mask = Integers;  // all bits of a lane, or none

// The results of an operation on each quarter of some vectors.
template <class Operation, class... Vectors>
inline auto by_quarters(Operation operation, Vectors... vectors) {
    using Quarter = decltype(operation(vectors.low.low...));
    return Pair<Pair<Quarter>>{{operation(vectors.low.low...), operation(vectors.low.high...)},
                               {operation(vectors.high.low...), operation(vectors.high.high...)}};
}

inline Floats broadcast(float number) {
    const float32x4_t all = vdupq_n_f32(number);
    return {{all, all}, {all, all}};
}
inline Integers broadcast_integer(uint32_t number) {
    const uint32x4_t all = vdupq_n_u32(number);
    return {{all, all}, {all, all}};
}
inline Floats load(const float* from) {
    return {{vld1q_f32(from), vld1q_f32(from + 4)}, {vld1q_f32(from + 8), vld1q_f32(from + 12)}};
}
inline void store(float* to, Floats a) {
    vst1q_f32(to, a.low.low), vst1q_f32(to + 4, a.low.high);
    vst1q_f32(to + 8, a.high.low), vst1q_f32(to + 12, a.high.high);
}
inline Integers load_integers(const void* from) {
    const uint8_t* const bytes = (const uint8_t*)from;
    const auto quarter = [&](int i) { return vreinterpretq_u32_u8(vld1q_u8(bytes + i * 16)); };
    return {{quarter(0), quarter(1)}, {quarter(2), quarter(3)}};
}

// Operations on a quarter of a vector: BY_HALVES (simd.h) makes those on vectors.
inline float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
// b if either is NaN, as x86 has it; NEON's own maximum would be NaN.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t abs(float32x4_t a) { return vabsq_f32(a); }
inline float32x4_t round(float32x4_t a) { return vrndnq_f32(a); }
inline float32x4_t as_floats(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }
inline uint32x4_t as_bits(float32x4_t a) { return vreinterpretq_u32_f32(a); }
inline float32x4_t to_floats(uint32x4_t a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
inline uint32x4_t to_integers(float32x4_t a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
inline uint32x4_t is_greater(float32x4_t a, float32x4_t b) { return vcgtq_f32(a, b); }
inline uint32x4_t is_greater_or_equal(float32x4_t a, float32x4_t b) { return vcgeq_f32(a, b); }
inline uint32x4_t is_equal(float32x4_t a, float32x4_t b) { return vceqq_f32(a, b); }
inline uint32x4_t is_nan(float32x4_t a) { return vmvnq_u32(vceqq_f32(a, a)); }
inline float32x4_t select(uint32x4_t mask, float32x4_t a, float32x4_t b) { return vbslq_f32(mask, a, b); }
inline uint32x4_t select(uint32x4_t mask, uint32x4_t a, uint32x4_t b) { return vbslq_u32(mask, a, b); }

template <class Reduce>
inline float reduce(Reduce combine, Floats a) {  // in the same order as AVX-512's reductions
    const float32x4_t four = combine(combine(a.high.high, a.low.high), combine(a.high.low, a.low.low));
    const float32x4_t two = combine(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(combine(two, vextq_f32(two, two, 1)), 0);
}
inline float reduce_add(Floats a) {
    return reduce([](float32x4_t x, float32x4_t y) { return x + y; }, a);
}
inline float reduce_max(Floats a) {
    return reduce([](float32x4_t x, float32x4_t y) { return max(x, y); }, a);
}
inline float reduce_min(Floats a) {
    return reduce([](float32x4_t x, float32x4_t y) { return min(x, y); }, a);
}
inline uint32_t reduce_min(Integers a) {
    return vminvq_u32(vminq_u32(vminq_u32(a.low.low, a.low.high), vminq_u32(a.high.low, a.high.high)));
}

inline Integers lane_indices();
inline Mask first_lanes(long count) {
    const uint32x4_t valid = vdupq_n_u32(std::clamp(count, 0L, 16L));
    return by_quarters([&](auto index) { return vcltq_u32(index, valid); }, lane_indices());
}
inline Mask lanes_of(uint32_t bits) {
    static constexpr uint32_t BIT[WIDTH] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                            1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const uint32x4_t all = vdupq_n_u32(bits);
    return by_quarters([&](auto bit) { return vtstq_u32(all, bit); }, load_integers(BIT));
}
inline int count_lanes(Mask mask) {  // a lane is 0 or -1
    return -static_cast<int32_t>(vaddvq_u32(mask.low.low + mask.low.high + mask.high.low + mask.high.high));
}

// Numbers of 16 bits, widened to 32 bits: unsigned integers, and float16 numbers.
inline Integers load_uint16(const uint16_t* from) {
    const uint16x8_t low = vld1q_u16(from), high = vld1q_u16(from + 8);
    return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low)}, {vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}};
}
inline void store_uint16(uint16_t* to, Integers a) {
    vst1q_u16(to, vmovn_high_u32(vmovn_u32(a.low.low), a.low.high));
    vst1q_u16(to + 8, vmovn_high_u32(vmovn_u32(a.high.low), a.high.high));
}
inline Floats load_float16(const uint16_t* from) {
    const auto quarter = [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i * 4))); };
    return {{quarter(0), quarter(1)}, {quarter(2), quarter(3)}};
}
inline void store_float16(uint16_t* to, Floats a) {
    const auto half = [](auto x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); };
    vst1_u16(to, half(a.low.low)), vst1_u16(to + 4, half(a.low.high));
    vst1_u16(to + 8, half(a.high.low)), vst1_u16(to + 12, half(a.high.high));
}
// Bytes, widened to 32 bits.
inline Integers load_uint8(const uint8_t* from) {
    const uint8x16_t all = vld1q_u8(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
    return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low)}, {vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}};
}
inline Integers load_int8(const int8_t* from) {
    return by_quarters(
        [](auto x) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x << 24), 24)); },
        load_uint8((const uint8_t*)from));
}
inline int8x16_t to_int8(Integers a) {  // saturated
    const auto narrow = [](Pair<uint32x4_t> half) {
        const int32x4_t low = vreinterpretq_s32_u32(half.low), high = vreinterpretq_s32_u32(half.high);
        return vqmovn_high_s32(vqmovn_s32(low), high);
    };
    return vqmovn_high_s16(vqmovn_s16(narrow(a.low)), narrow(a.high));
}

// NEON has no masked loads and stores. Here `mask` always selects the first lanes.
template <typename Number, typename LoadAll>
inline auto load_first(const Number* from, Mask mask, LoadAll load_all) {
    const int count = count_lanes(mask);
    if (count == WIDTH) return load_all(from);
    Number all[WIDTH] = {};
    std::memcpy(all, from, count * sizeof *from);
    return load_all(static_cast<const Number*>(all));
}
template <typename Number, typename StoreAll>
inline void store_first(Number* to, Mask mask, StoreAll store_all) {
    const int count = count_lanes(mask);
    if (count == WIDTH) return store_all(to);
    Number all[WIDTH];
    store_all(all);
    std::memcpy(to, all, count * sizeof *to);
}
inline Floats load(const float* from, Mask mask) {
    return load_first(from, mask, [](const float* all) { return load(all); });
}
inline void store(float* to, Floats a, Mask mask) {
    store_first(to, mask, [&](float* all) { store(all, a); });
}
inline Integers load_uint16(const uint16_t* from, Mask mask) {
    return load_first(from, mask, [](const uint16_t* all) { return load_uint16(all); });
}
inline void store_uint16(uint16_t* to, Integers a, Mask mask) {
    store_first(to, mask, [&](uint16_t* all) { store_uint16(all, a); });
}
inline void store_int8(int8_t* to, Integers a, Mask mask) {
    const int8x16_t all = to_int8(a);
    std::memcpy(to, &all, count_lanes(mask));
}

// Adds to each lane of `sum` the four products of the lane's bytes of w and signed bytes of x, of which none is -128.
// The bytes of w are unsigned with i8mm, and signed without.
inline uint32x4_t add_byte_products(uint32x4_t sum, uint32x4_t w, uint32x4_t x) {
    const int32x4_t to = vreinterpretq_s32_u32(sum);
    const int8x16_t second = vreinterpretq_s8_u32(x);
#ifdef __ARM_FEATURE_MATMUL_INT8
    return vreinterpretq_u32_s32(vusdotq_s32(to, vreinterpretq_u8_u32(w), second));
#else
    const int8x16_t first = vreinterpretq_s8_u32(w);
#ifdef __ARM_FEATURE_DOTPROD
    return vreinterpretq_u32_s32(vdotq_s32(to, first, second));
#else  // two products fit in 16 bits
    const int16x8_t low = vmull_s8(vget_low_s8(first), vget_low_s8(second));
    return vreinterpretq_u32_s32(vpadalq_s16(to, vpaddq_s16(low, vmull_high_s8(first, second))));
#endif
#endif
}
BY_HALVES(add_byte_products)

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define HAS_PAIR_PRODUCTS

// Adds to each lane of `sum` both products of the lane's pairs of bfloat16 numbers.
inline float32x4_t add_pair_products(float32x4_t sum, uint32x4_t a, uint32x4_t b) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
BY_HALVES(add_pair_products)
// The first 16 numbers of 16 bits; the others are 0.
inline Integers load_lower_half(const void* from) {
    const uint16_t* const numbers = (const uint16_t*)from;
    const auto quarter = [&](int i) { return vreinterpretq_u32_u16(vld1q_u16(numbers + i * 8)); };
    return {{quarter(0), quarter(1)}, {}};
}
// The first, or the last, 16 numbers of 16 bits of both, in turn.
inline Integers interleave(Pair<uint32x4_t> even, Pair<uint32x4_t> odd) {
    const auto both = [](uint32x4_t a, uint32x4_t b) {
        const uint16x8_t x = vreinterpretq_u16_u32(a), y = vreinterpretq_u16_u32(b);
        return Pair<uint32x4_t>{vreinterpretq_u32_u16(vzip1q_u16(x, y)), vreinterpretq_u32_u16(vzip2q_u16(x, y))};
    };
    return {both(even.low, odd.low), both(even.high, odd.high)};
}
inline Integers interleave_lower(Integers even, Integers odd) { return interleave(even.low, odd.low); }
inline Integers interleave_upper(Integers even, Integers odd) { return interleave(even.high, odd.high); }
#endif

// Writes the columns of a matrix of 16 rows and 16 columns, one after the other: as 16 matrices of 4 by 4.
inline void transpose(Floats (&rows)[WIDTH], float* to) {
    for (int row = 0; row < WIDTH; row += 4)
        for (int quarter = 0; quarter < 4; quarter++) {
            float64x2_t other[4];
            for (int i = 0; i < 4; i += 2) {
                const float32x4_t even = ((const float32x4_t*)&rows[row + i])[quarter];
                const float32x4_t odd = ((const float32x4_t*)&rows[row + i + 1])[quarter];
                other[i] = vreinterpretq_f64_f32(vtrn1q_f32(even, odd));
                other[i + 1] = vreinterpretq_f64_f32(vtrn2q_f32(even, odd));
            }
            for (int i = 0; i < 2; i++) {
                float* const column = to + (quarter * 4 + i) * WIDTH + row;
                vst1q_f32(column, vreinterpretq_f32_f64(vtrn1q_f64(other[i], other[i + 2])));
                vst1q_f32(column + 2 * WIDTH, vreinterpretq_f32_f64(vtrn2q_f64(other[i], other[i + 2])));
            }
        }
}
