/* Weights in blocks of small integers, in the order of products.
 *
 * The formats are those of GGUF files (ggml's quants): a weight is scale * (code - zero), or
 * scale * code + minimum, with a scale for 32 inputs (Q6_K: 16). The K formats have scales of 6 or 8
 * bits below one in float16 for 256 inputs. MXFP4 (Rouhani et al. 2023, arXiv:2310.10537) has
 * exponents as scales, and numbers of a table as codes; IQ4_NL is Q4_0 with another table, and IQ4_XS
 * the same with scales of 6 bits.
 *
 * As in linear.c a weight is cut into panels of PANEL outputs. A panel holds for each block of
 * inputs the outputs' scales, minima if there are any, and codes as [BLOCK / 4][PANEL][4] (a "group"
 * is four inputs of all outputs), with the upper bits stored apart: the lower four of group g and of
 * group g + 4 share bytes, the fifth of all eight groups, and the fifth and sixth of four. Only the
 * 6-bit scales of Q4_K, Q5_K and IQ4_XS are larger than in the file; they take a byte each.
 */
#pragma once

#include "kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define PANEL 32
#define BLOCK 32
#define GROUPS (BLOCK / 4)
#define GROUP_BYTES (4 * PANEL)
#define SUPER_BLOCKS 8 /* that share a scale in float16 */

/* Format numbers follow those of dense types. `core.block_formats` repeats them. */
enum { Q8_0 = 2, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, IQ4_NL, IQ4_XS };

INLINE int is_blocks(int format) { return format >= Q8_0; }

INLINE int is_super(int format) {
    return (format >= Q4_K && format <= Q6_K) || format == IQ4_XS;
}

/* Whether codes are places in a table. */
INLINE int has_table(int format) { return format >= MXFP4; }

INLINE int has_minimum(int format) {
    return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K;
}

INLINE int code_bits(int format) {
    switch (format) {
        case Q8_0: return 8;
        case Q6_K: return 6;
        case Q5_0: case Q5_1: case Q5_K: return 5;
        default: return 4;
    }
}

INLINE int code_zero(int format) {
    switch (format) {
        case Q8_0: return 128;
        case IQ4_NL: case IQ4_XS: return 127;
        case Q6_K: return 32;
        case Q5_0: return 16;
        case MXFP4: return 12;
        case Q4_0: return 8;
        default: return 0;
    }
}

/* Inputs that share a scale. */
INLINE int scale_inputs(int format) { return format == Q6_K ? BLOCK / 2 : BLOCK; }

INLINE int64_t num_blocks(int64_t num_inputs) { return (num_inputs + BLOCK - 1) / BLOCK; }

/* Bytes of scales before the blocks they belong to, and of one block. */
INLINE int64_t header_bytes(int format) {
    return format == MXFP4 ? PANEL : (has_minimum(format) ? 2 : 1) * 2 * PANEL;
}

/* Bytes of a block that come before its codes: scales of 6 or 8 bits. */
INLINE int64_t small_bytes(int format) {
    return is_super(format) ? (format == IQ4_XS ? 1 : 2) * PANEL : 0;
}

INLINE int64_t block_bytes(int format) {
    return code_bits(format) * GROUP_BYTES + small_bytes(format);
}

INLINE int64_t blocks_per_header(int format) { return is_super(format) ? SUPER_BLOCKS : 1; }

INLINE int64_t panel_bytes(int format, int64_t num_inputs) {
    int64_t per_header = blocks_per_header(format);
    return num_blocks(num_inputs) / per_header *
           (header_bytes(format) + per_header * block_bytes(format));
}

/* The place of a block in its panel, and its header. */
typedef struct {
    const uint8_t *header, *block;
} BlockPlace;

INLINE BlockPlace place_of(const uint8_t *panel, int64_t index, int format) {
    int64_t per_header = blocks_per_header(format), header = header_bytes(format);
    int64_t stride = header + per_header * block_bytes(format);
    const uint8_t *at = panel + index / per_header * stride;
    return (BlockPlace){at, at + header + index % per_header * block_bytes(format)};
}

INLINE const uint8_t *codes_of(BlockPlace place, int format) {
    return place.block + small_bytes(format);
}

/* ---- reading scales and codes ------------------------------------------------------------------ */

typedef int32_t ireg __attribute__((vector_size(4 * REG)));
typedef uint8_t breg __attribute__((vector_size(REG)));
typedef int8_t cbreg __attribute__((vector_size(REG)));
typedef uint16_t hreg __attribute__((vector_size(2 * REG)));

INLINE reg splat_reg(float x) { return (reg){0} + x; }

/* a * b + c, in one rounding where the processor can. */
INLINE reg fused(reg a, reg b, reg c) {
#if defined(__AVX512F__)
    return (reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* For finite numbers only. */
INLINE reg load_halves(const void *p) {
    hreg bits;
    memcpy(&bits, p, sizeof bits);
#if defined(__AVX512F__)
    return (reg)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (reg)_mm256_cvtph_ps((__m128i)bits);
#else
    ureg wide = __builtin_convertvector(bits, ureg);
    reg size = (reg)((wide & 0x7fff) << 13) * 0x1p112f;
    return (reg)((ureg)size | (wide & 0x8000) << 16);
#endif
}

/* Bytes as words. Compilers convert them one by one: intrinsics, where there are any. */
INLINE ireg unsigned_words(const uint8_t *p) {
#if defined(__AVX512F__)
    return (ireg)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
#elif defined(__AVX2__)
    return (ireg)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
#else
    breg bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ireg);
#endif
}

INLINE ireg signed_words(const uint8_t *p) {
#if defined(__AVX512F__)
    return (ireg)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
#elif defined(__AVX2__)
    return (ireg)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
#else
    cbreg bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ireg);
#endif
}

INLINE reg load_bytes(const uint8_t *p) { return __builtin_convertvector(unsigned_words(p), reg); }

INLINE reg load_signed_bytes(const uint8_t *p) {
    return __builtin_convertvector(signed_words(p), reg);
}

/* Half of 2 to the power of bytes less 127. */
INLINE reg load_powers(const uint8_t *p) {
    ureg exponent = (ureg)unsigned_words(p), is_small = (ureg)(exponent < 2);
    ureg subnormal = 0x00200000u << (exponent & 1);
    return (reg)((is_small & subnormal) | (~is_small & (exponent - 1) << 23));
}

/* The scales of REG outputs from `column` on; `half` is the second 16 inputs of Q6_K. */
INLINE reg scales_at(BlockPlace place, int column, int half, const int format) {
    if (format == MXFP4) return load_powers(place.header + column);
    reg scale = load_halves(place.header + 2 * column);
    if (format == Q6_K) return scale * load_signed_bytes(place.block + half * PANEL + column);
    if (format == IQ4_XS) return scale * load_signed_bytes(place.block + column);
    return is_super(format) ? scale * load_bytes(place.block + column) : scale;
}

INLINE reg minima_at(BlockPlace place, int column, const int format) {
    reg minimum = load_halves(place.header + 2 * PANEL + 2 * column);
    return is_super(format) ? -minimum * load_bytes(place.block + PANEL + column) : minimum;
}

INLINE ureg load_words_reg(const uint8_t *p) {
    ureg words;
    memcpy(&words, p, sizeof words);
    return words;
}

/* By place: twice the numbers of MXFP4 plus 12, which are a sign and one of 0, 1, 2, 3, 4, 6, 8 and
 * 12; and those of IQ4_NL plus 127. */
static const uint8_t FLOAT4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
static const uint8_t UNEVEN[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                   128, 140, 152, 165, 180, 196, 216, 240};

INLINE const uint8_t *table_of(int format) { return format == MXFP4 ? FLOAT4 : UNEVEN; }

/* The codes at places, which are in bytes. */
INLINE ureg look_up(ureg places, const int format) {
#if defined(__AVX512BW__)
    const __m128i table = _mm_loadu_si128((const void *)table_of(format));
    return (ureg)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)places);
#elif defined(__AVX2__)
    const __m128i table = _mm_loadu_si128((const void *)table_of(format));
    return (ureg)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)places);
#else
    if (format != MXFP4) {
        uint8_t bytes[4 * REG];
        memcpy(bytes, &places, sizeof bytes);
        for (int i = 0; i < 4 * REG; i++) bytes[i] = UNEVEN[bytes[i]];
        return load_words_reg(bytes);
    }
    const uint32_t ones = 0x01010101;
    ureg is_wide = places >> 2 & ones, is_widest = is_wide & places >> 1;
    ureg size = (places & 0x03030303) | is_wide << 1;
    size += size & is_wide * 255;
    size += size & is_widest * 255;
    return size + 12 * ones - ((size & (places >> 3 & ones) * 255) << 1);
#endif
}

/* The codes of one group, of REG outputs from `column` on: unsigned bytes, adjacent for each
 * output. */
INLINE ureg codes_at(const uint8_t *codes, int group, int column, const int format) {
    const uint8_t *at = codes + 4 * column;
    int bits = code_bits(format);
    if (bits == 8) return load_words_reg(at + group * GROUP_BYTES);
    ureg low = load_words_reg(at + group % 4 * GROUP_BYTES) >> (group < 4 ? 0 : 4) & 0x0f0f0f0f;
    if (bits == 4) return has_table(format) ? look_up(low, format) : low;
    const uint8_t *high = at + 4 * GROUP_BYTES;
    if (bits == 5) {
        ureg word = load_words_reg(high);
        return low | ((group < 4 ? word << (4 - group) : word >> (group - 4)) & 0x10101010);
    }
    ureg word = load_words_reg(high + group / 4 * GROUP_BYTES);
    int shift = 4 - 2 * (group % 4);
    return low | ((shift >= 0 ? word << shift : word >> -shift) & 0x30303030);
}
