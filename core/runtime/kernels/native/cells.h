/* Cells of one byte in a page, to and from other types: integers with a scale, and float8 (e4m3).
 *
 * An integer is a value divided by its scale, to nearest even; float8 is not scaled and saturates at
 * 448. NaN makes a scale NaN. NaN of float8 reads as 480, as in the GPU kernels.
 */
#pragma once

#include "vector.h"

#if defined(__AVX2__) /* implies F16C */
#include <immintrin.h>
#endif

#define MAX_INT8 127.0f
#define MAX_FLOAT8 448.0f
#define MIN_NORMAL_FLOAT8 0.015625f

/* ---- reading ---------------------------------------------------------------------------------- */

/* Compilers convert vectors of bytes to others one by one. */
INLINE vec load_int8(const void *p) {
    ivec n;
#if defined(__AVX512F__)
    n = (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
    __m256i parts[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)),
                        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)((const char *)p + 8)))};
    memcpy(&n, parts, sizeof n);
#else
    int8_t cells[LANES];
    memcpy(cells, p, sizeof cells);
    for (int i = 0; i < LANES; i++) n[i] = cells[i];
#endif
    return __builtin_convertvector(n, vec);
}

INLINE vec load_float8(const void *p) {
#if defined(__AVX2__)
    /* The same bits are a float16 whose exponent is too low by 8; subnormals are read at full speed. */
    hvec bits = (hvec)_mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    bits = ((bits & 0x80) << 8) | ((bits & 0x7f) << 7);
    vec x;
#if defined(__AVX512F__)
    x = (vec)_mm512_cvtph_ps((__m256i)bits);
#else
    __m128i halves[2];
    memcpy(halves, &bits, sizeof halves);
    __m256 parts[2] = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
    memcpy(&x, parts, sizeof x);
#endif
    return x * 256.0f;
#else
    uint8_t cells[LANES];
    memcpy(cells, p, sizeof cells);
    uvec bits;
    for (int i = 0; i < LANES; i++) bits[i] = cells[i];
    uvec size = bits & 0x7f;
    vec normal = (vec)((size << 20) + (120u << 23));
    vec subnormal = __builtin_convertvector((ivec)size, vec) * 0x1p-9f;
    return (vec)((uvec)blend((ivec)(size < 8), subnormal, normal) | (bits & 0x80) << 24);
#endif
}

/* Values that bfloat16 holds exactly. */
INLINE void store_exact(bf16 *p, vec x) {
#if HAS_BF16_DOT
    hvec half = to_bf16(x);
#else
    hvec half = __builtin_convertvector((uvec)x >> 16, hvec);
#endif
    memcpy(p, &half, sizeof half);
}

#if defined(__AVX512BW__)
/* 32 cells of float8 as bfloat16: the exponent becomes the other type's; subnormals are looked up. */
INLINE void widen_float8(const void *from, bf16 *to) {
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i cells = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
    __m512i size = _mm512_and_si512(cells, _mm512_set1_epi16(0x7f));
    __m512i wide = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    wide = _mm512_mask_permutexvar_epi16(wide, is_small, size, subnormals);
    __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(cells, size), 8);
    _mm512_storeu_si512(to, _mm512_or_si512(wide, sign));
}
#endif

/* `size` cells as bfloat16, before their scale. */
INLINE void widen(const void *cells, bf16 *to, int64_t size, const int dtype) {
    const char *from = cells;
    int64_t i = 0;
#if defined(__AVX512BW__)
    for (; dtype == FLOAT8 && i + 2 * LANES <= size; i += 2 * LANES) widen_float8(from + i, to + i);
#endif
    for (; i + LANES <= size; i += LANES)
        store_exact(to + i, dtype == INT8 ? load_int8(from + i) : load_float8(from + i));
    if (i == size) return;
    char rest[LANES] = {0};
    bf16 wide[LANES];
    memcpy(rest, from + i, (size_t)(size - i));
    store_exact(wide, dtype == INT8 ? load_int8(rest) : load_float8(rest));
    memcpy(to + i, wide, sizeof(bf16) * (size_t)(size - i));
}

/* ---- writing: rows of whole vectors ------------------------------------------------------------ */

INLINE void store_bytes(void *p, ivec x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    int8_t cells[LANES];
    for (int i = 0; i < LANES; i++) cells[i] = (int8_t)x[i];
    memcpy(p, cells, sizeof cells);
#endif
}

INLINE void store_float8(void *p, vec x) {
    uvec sign = ((uvec)x >> 24) & 0x80, is_nan = (uvec)(x != x);
    vec size = (vec)((uvec)x & 0x7fffffff);
    size = blend(size > MAX_FLOAT8, splat(MAX_FLOAT8), size);
    uvec bits = (uvec)size;
    /* Of the 23 bits of the fraction 3 stay: add half of the rest, less one so that ties go to even. */
    uvec normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3);
    /* Below are multiples of 2^-9, the last place of 2^14. */
    uvec subnormal = (uvec)(size + 16384.0f) & 0xf;
    uvec is_small = (uvec)(size < MIN_NORMAL_FLOAT8);
    uvec found = (is_small & subnormal) | (~is_small & normal) | sign;
    store_bytes(p, (ivec)((is_nan & 0x7f) | (~is_nan & found)));
}

/* The scale of `size` values, which maps the largest to 127, rounded to bfloat16. */
INLINE float scale_of(const float *x, int64_t size) {
    ivec largest = {0}; /* as bits, where NaN is the largest */
    for (int64_t i = 0; i < size; i += LANES) {
        ivec bits = (ivec)load_bits(x + i) & 0x7fffffff, is_larger = bits > largest;
        largest = (is_larger & bits) | (~is_larger & largest);
    }
    int32_t peak_bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (largest[lane] > peak_bits) peak_bits = largest[lane];
    float peak;
    memcpy(&peak, &peak_bits, sizeof peak);
    bf16 scale = round_bf16(peak / MAX_INT8);
    return read_as(&scale, 0, BFLOAT16);
}

/* Zeros for a scale that is 0 or not finite. */
INLINE void store_int8(void *p, vec x, float scale) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23 */
    int divides = scale > 0 && scale < INFINITY;
    vec n = divides ? (x / scale + to_integer) - to_integer : splat(0.0f);
    n = blend(n > MAX_INT8, splat(MAX_INT8), blend(n < -MAX_INT8, splat(-MAX_INT8), n));
    store_bytes(p, __builtin_convertvector(n, ivec));
}
