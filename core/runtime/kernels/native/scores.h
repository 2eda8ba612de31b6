/* Some queries against one tile of keys: their products.
 *
 * The queries of one key-value head are the rows of a small matrix product. The other operand is keys as
 * [D][TILE] (bfloat16: [D / 2][TILE][2]): a block of a page in place, or a copy if the block is smaller,
 * has masked cells or has cells of a byte, or rows of latents. Attention goes on with the values of the
 * tile (attention_block.h).
 */
#pragma once

#include "pages.h"
#include "tiles.h"
#include "unrolled.h"

#define TILE PAGE_BLOCK
#define MAX_QUERIES 64

/* Queries and registers of columns whose sums fit into registers. */
#if defined(__AVX512F__)
#define BLOCK 8
#define REGS 2
#elif defined(__AVX2__)
#define BLOCK 4
#define REGS 2
#else
#define BLOCK 2
#define REGS 4
#endif

/* The running sums of queries: values, weights in 16 parts, and the highest score. */
typedef struct {
    float *out; /* [num_queries][dim] */
    vec *weights;
    float *peaks;
} Sums;

#define FLOATS_PER_QUERY(dim) ((dim) + 2 * LANES)

/* The state of one task. `dim` and `value_dim` are those of keys and values, rounded up to 32. */
typedef struct {
    _Alignas(64) float scores[MAX_QUERIES * TILE];
    _Alignas(64) uint32_t probs[MAX_QUERIES * TILE];
    _Alignas(64) uint32_t q[MAX_QUERIES * MAX_DIM];
    _Alignas(64) uint32_t k[MAX_DIM * TILE];
    _Alignas(64) uint32_t v[MAX_DIM * TILE];
    _Alignas(64) float k_scales[TILE], v_scales[TILE]; /* the tile's, where cells have scales */
    const uint32_t *keys, *values; /* the tile's, in a page or copied to k and v */
    Sums sums;
    int dim, value_dim, is_bf16, has_scales;
} Block;

INLINE int padded(int dim) { return (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

/* ---- products: BLOCK queries at a time ------------------------------------------------------ */

/* acc[i][v] += the word x[i * stride] times columns[v]: float32, or pairs of bfloat16. */
INLINE void add_products(reg acc[BLOCK][REGS], const uint32_t *x, int stride,
                         const reg columns[REGS], const int num, const int is_bf16) {
#if HAS_BF16_DOT
    if (is_bf16) {
        for (int i = 0; i < num; i++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32((int)x[i * stride]);
            for (int v = 0; v < REGS; v++)
                acc[i][v] = (reg)_mm512_dpbf16_ps((__m512)acc[i][v], pair, (__m512bh)columns[v]);
        }
        return;
    }
#endif
    for (int i = 0; i < num; i++) {
        uint32_t word = x[i * stride], halves[2] = {word << 16, word & 0xffff0000u};
        float factor, factors[2];
        memcpy(&factor, &word, sizeof factor);
        memcpy(factors, halves, sizeof factors);
        for (int v = 0; v < REGS; v++) {
            if (!is_bf16) {
                acc[i][v] += factor * columns[v];
                continue;
            }
            acc[i][v] += factors[0] * low_halves(columns[v]);
            acc[i][v] += factors[1] * high_halves(columns[v]);
        }
    }
}

/* out[num][TILE] += rows[num][depth] b[depth][TILE]; sizes and strides are in words. */
INLINE void multiply(float *out, int out_stride, const uint32_t *rows, const uint32_t *b,
                     int b_stride, int depth, const int num, const int is_bf16) {
    for (int first = 0; first < TILE; first += REGS * REG) {
        reg acc[BLOCK][REGS], columns[REGS];
        for (int i = 0; i < num; i++)
            for (int v = 0; v < REGS; v++)
                acc[i][v] = load_reg(out + i * out_stride + first + v * REG);
        for (int d = 0; d < depth; d++) {
            for (int v = 0; v < REGS; v++) columns[v] = load_reg(b + d * b_stride + first + v * REG);
            add_products(acc, rows + d, depth, columns, num, is_bf16);
        }
        for (int i = 0; i < num; i++)
            for (int v = 0; v < REGS; v++)
                store_reg(out + i * out_stride + first + v * REG, acc[i][v]);
    }
}

INLINE void score_block(Block *b, int m, const int num, const int is_bf16) {
    int width = is_bf16 ? b->dim / 2 : b->dim;
    float *scores = b->scores + m * TILE;
    memset(scores, 0, sizeof(float) * (size_t)(num * TILE));
    multiply(scores, TILE, b->q + (size_t)m * width, b->keys, TILE, width, num, is_bf16);
}

/* Defines NAME(b, m, end) for the queries [m, end) of one head. */
#define FOR_BLOCKS(NAME)                                                           \
    UP_TO(BLOCK, DEFINE_##NAME)                                                    \
    static void NAME(Block *b, int m, int end) {                                   \
        for (; m < end; m += BLOCK) switch (end - m < BLOCK ? end - m : BLOCK) {   \
                UP_TO(BLOCK, CASE_##NAME)                                          \
            }                                                                      \
    }
#define DEFINE_score_floats(N) OWN score_floats_##N(Block *b, int m) { score_block(b, m, N, 0); }
#define DEFINE_score_pairs(N) OWN score_pairs_##N(Block *b, int m) { score_block(b, m, N, 1); }
#define CASE_score_floats(N) case N: score_floats_##N(b, m); break;
#define CASE_score_pairs(N) case N: score_pairs_##N(b, m); break;
FOR_BLOCKS(score_floats)

#if HAS_TILES
static void score_pairs(Block *b, int m, int end) {
    for (int num; m < end; m += num) {
        num = end - m < 2 * TILE_ROWS ? end - m : 2 * TILE_ROWS;
        float *scores = b->scores + m * TILE;
        memset(scores, 0, sizeof(float) * (size_t)(num * TILE));
        shape_tiles(num);
        multiply_tiles(b->q + (size_t)m * b->dim / 2, 2 * b->dim, b->keys, 4 * TILE, scores, 4 * TILE,
                       b->dim, num);
    }
}
#else
FOR_BLOCKS(score_pairs)
#endif
