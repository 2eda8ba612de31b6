/* Sixteen floats at a time, in the compiler's portable vector extension (GCC 12, Clang).
 *
 * Owns loads, stores, conversions and the exponential that every operation here needs. On AVX-512
 * a vector is one register; elsewhere the compiler splits it, which costs a few times as much, so
 * the hot loops are written in `reg`, as many floats as a register holds. Never compiled with
 * -ffast-math: every sum has the order in the source, so a row's result depends only on the row.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef uint16_t wvec __attribute__((vector_size(64)));
typedef uint16_t bf16;

#if defined(__AVX512F__)
#define REG 16
#elif defined(__AVX2__)
#define REG 8
#else
#define REG 4
#endif

typedef float reg __attribute__((vector_size(4 * REG)));
typedef uint32_t ureg __attribute__((vector_size(4 * REG)));

/* Types of one byte are for cells in pages only (cells.h). `arguments.py` repeats the numbers. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 16, FLOAT8 = 17 };

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == BFLOAT16 ? 2 : 1; }

INLINE vec splat(float x) { return (vec){0} + x; }

INLINE vec load(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store(float *p, vec x) { memcpy(p, &x, sizeof x); }

INLINE reg load_reg(const void *p) {
    reg x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_reg(float *p, reg x) { memcpy(p, &x, sizeof x); }

INLINE uvec load_bits(const void *p) {
    uvec x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* A bfloat16 is the upper half of a float32: the first values of pairs, and the second ones. */
INLINE reg low_halves(reg pairs) { return (reg)((ureg)pairs << 16); }

INLINE reg high_halves(reg pairs) { return (reg)((ureg)pairs & 0xffff0000u); }

/* a[0], b[0], a[1], b[1], ...: the first and the second half of it. */
INLINE wvec interleave_low(wvec a, wvec b) {
    return __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8,
                                   40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
}

INLINE wvec interleave_high(wvec a, wvec b) {
    return __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54,
                                   23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62,
                                   31, 63);
}

INLINE vec load_bf16(const bf16 *p) {
    hvec half;
    memcpy(&half, p, sizeof half);
    return (vec)(__builtin_convertvector(half, uvec) << 16);
}

/* Round to nearest, ties to even, as torch does; NaN stays NaN. */
INLINE hvec to_bf16(vec x) {
#if HAS_BF16_DOT
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec is_nan = (uvec)(x != x);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), hvec);
#endif
}

INLINE void store_bf16(bf16 *p, vec x) {
    hvec half = to_bf16(x);
    memcpy(p, &half, sizeof half);
}

INLINE vec load_as(const void *p, int64_t index, int dtype) {
    return dtype == BFLOAT16 ? load_bf16((const bf16 *)p + index) : load((const float *)p + index);
}

INLINE void store_as(void *p, int64_t index, vec x, int dtype) {
    if (dtype == BFLOAT16)
        store_bf16((bf16 *)p + index, x);
    else
        store((float *)p + index, x);
}

INLINE float read_as(const void *p, int64_t index, int dtype) {
    if (dtype == FLOAT32) return ((const float *)p)[index];
    uint32_t bits = (uint32_t)((const bf16 *)p)[index] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE bf16 round_bf16(float x) { return to_bf16(splat(x))[0]; }

INLINE void write_as(void *p, int64_t index, float x, int dtype) {
    if (dtype == FLOAT32)
        ((float *)p)[index] = x;
    else
        ((bf16 *)p)[index] = round_bf16(x);
}

/* `size` values of one type as another. */
INLINE void convert(const void *from, int from_dtype, void *to, int to_dtype, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_as(to, i, load_as(from, i, from_dtype), to_dtype);
    for (; i < size; i++) write_as(to, i, read_as(from, i, from_dtype), to_dtype);
}

INLINE float sum_lanes(vec x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

INLINE vec blend(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

INLINE vec max_vec(vec a, vec b) { return blend(a > b, a, b); }

INLINE float max_lanes(vec x) {
    x = max_vec(
        x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    x = max_vec(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

INLINE int any_lane(ivec x) {
    x |= __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    x |= __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    return ((x[0] | x[1]) | (x[2] | x[3])) != 0;
}

/* e^x to 2 ulp; 0 below -87.3, and e^88 above 88 (Cephes' expf: Moshier, "Methods and Programs for
 * Mathematical Functions", 1989). NaN stays NaN. */
INLINE vec exp_vec(vec x) {
    ivec is_small = x < -87.3f;
    vec clamped = blend(is_small, splat(-87.3f), blend(x > 88.0f, splat(88.0f), x));
    const float to_integer = 12582912.0f; /* 1.5 * 2^23 */
    vec n = (clamped * 1.44269504088896341f + to_integer) - to_integer;
    vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    return blend(is_small, splat(0.0f), y * (vec)exponent);
}

/* 16 x 16 words in place: rows[i][j] becomes rows[j][i]. */
INLINE void transpose(uvec rows[LANES]) {
    uvec t[LANES];
#define PAIRS(SPAN, LOW, HIGH)                                               \
    for (int i = 0; i < LANES; i++) {                                        \
        if (i & (SPAN)) continue;                                            \
        t[i] = __builtin_shufflevector(rows[i], rows[i + (SPAN)], LOW);      \
        t[i + (SPAN)] = __builtin_shufflevector(rows[i], rows[i + (SPAN)], HIGH); \
    }                                                                        \
    memcpy(rows, t, sizeof t);
#define L8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define H8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define L4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define H4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define L2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define H2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define L1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define H1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define EXPAND(...) __VA_ARGS__
    PAIRS(8, EXPAND(L8), EXPAND(H8))
    PAIRS(4, EXPAND(L4), EXPAND(H4))
    PAIRS(2, EXPAND(L2), EXPAND(H2))
    PAIRS(1, EXPAND(L1), EXPAND(H1))
}

/* LANES words of a row of `num_bytes` from word `first` on; zeros past its end. */
INLINE uvec load_words(const void *row, int64_t first, int64_t num_bytes) {
    int64_t left = num_bytes - 4 * first;
    const char *from = (const char *)row + 4 * first;
    if (left >= (int64_t)sizeof(uvec)) return load_bits(from);
    uint32_t words[LANES] = {0};
    if (left > 0) memcpy(words, from, (size_t)left);
    return load_bits(words);
}

/* Words of LANES rows: word w of row j goes to to[w * stride + j], padded to `num_words`. */
INLINE void transpose_words(const void *const rows[LANES], int64_t num_bytes, uint32_t *to,
                            int64_t stride, int64_t num_words) {
    for (int64_t first = 0; first < num_words; first += LANES) {
        uvec words[LANES];
        int is_whole = 4 * (first + LANES) <= num_bytes;
        if (is_whole)
            for (int j = 0; j < LANES; j++) words[j] = load_bits((const uint32_t *)rows[j] + first);
        else
            for (int j = 0; j < LANES; j++) words[j] = load_words(rows[j], first, num_bytes);
        transpose(words);
        if (is_whole || first + LANES <= num_words)
            for (int i = 0; i < LANES; i++)
                memcpy(to + (first + i) * stride, &words[i], sizeof words[i]);
        else
            for (int64_t i = 0; first + i < num_words; i++)
                memcpy(to + (first + i) * stride, &words[i], sizeof words[i]);
    }
}
