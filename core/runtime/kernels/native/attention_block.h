/* Some queries against one tile of keys and values: scores, running softmax, weighted values.
 *
 * The queries of one key-value head are the rows of a small matrix product. The other operands are
 * keys as [D][TILE] (bfloat16: [D / 2][TILE][2]) and values as [TILE][D] ([TILE / 2][D][2]): a block
 * of a page in place, or a copy if the block is smaller, has masked cells or has cells of a byte, or
 * rows of latents, which are copied in both orders.
 * Scales of cells are applied to scores and to probabilities.
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

static const ivec IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- sums -------------------------------------------------------------------------------------- */

/* Point the sums to memory of FLOATS_PER_QUERY, aligned to 64 bytes. */
INLINE Sums sums_at(float *memory, int num_queries, int dim) {
    vec *weights = (vec *)(memory + num_queries * dim);
    return (Sums){memory, weights, (float *)(weights + num_queries)};
}

static Sums empty_sums(float *memory, int num_queries, int dim) {
    Sums s = sums_at(memory, num_queries, dim);
    memset(memory, 0, sizeof(float) * (size_t)(num_queries * (dim + LANES)));
    for (int m = 0; m < num_queries; m++) s.peaks[m] = -INFINITY;
    return s;
}

/* Add the sums of later keys. Compiled once, so that it rounds alike everywhere. */
static __attribute__((noinline)) void add_sums(Sums *to, const Sums *from, int num_queries, int dim) {
    for (int m = 0; m < num_queries; m++) {
        if (from->peaks[m] == -INFINITY) continue;
        float peak = to->peaks[m] > from->peaks[m] ? to->peaks[m] : from->peaks[m];
        vec old = exp_vec(splat(to->peaks[m] - peak)), new = exp_vec(splat(from->peaks[m] - peak));
        to->weights[m] = to->weights[m] * old + from->weights[m] * new;
        for (int d = m * dim; d < (m + 1) * dim; d += LANES)
            store(to->out + d, load(to->out + d) * old + load(from->out + d) * new);
        to->peaks[m] = peak;
    }
}

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

INLINE void mix_block(Block *b, int m, const int num, const int is_bf16) {
    int width = is_bf16 ? TILE / 2 : TILE;
    for (int d = 0; d < b->value_dim; d += TILE)
        multiply(b->sums.out + m * b->value_dim + d, b->value_dim, b->probs + m * width, b->values + d,
                 b->value_dim, width, num, is_bf16);
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
#define DEFINE_mix_floats(N) OWN mix_floats_##N(Block *b, int m) { mix_block(b, m, N, 0); }
#define DEFINE_score_pairs(N) OWN score_pairs_##N(Block *b, int m) { score_block(b, m, N, 1); }
#define DEFINE_mix_pairs(N) OWN mix_pairs_##N(Block *b, int m) { mix_block(b, m, N, 1); }
#define CASE_score_floats(N) case N: score_floats_##N(b, m); break;
#define CASE_mix_floats(N) case N: mix_floats_##N(b, m); break;
#define CASE_score_pairs(N) case N: score_pairs_##N(b, m); break;
#define CASE_mix_pairs(N) case N: mix_pairs_##N(b, m); break;
FOR_BLOCKS(score_floats)
FOR_BLOCKS(mix_floats)

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

static void mix_pairs(Block *b, int m, int end) {
    for (int num; m < end; m += num) {
        num = end - m < 2 * TILE_ROWS ? end - m : 2 * TILE_ROWS;
        shape_tiles(num);
        for (int d = 0; d < b->value_dim; d += TILE)
            multiply_tiles(b->probs + m * TILE / 2, 2 * TILE, b->values + d, 4 * b->value_dim,
                           b->sums.out + m * b->value_dim + d, 4 * b->value_dim, TILE, num);
    }
}
#else
FOR_BLOCKS(score_pairs)
FOR_BLOCKS(mix_pairs)
#endif

/* ---- running softmax ------------------------------------------------------------------------ */

/* The positions [first, last] of its row that a query sees. */
typedef struct {
    int64_t first, last;
} KeyRange;

INLINE KeyRange range_of(const Attention *a, int64_t token, int64_t position) {
    KeyRange s = {0, position};
    if (a->blocks) s.last = a->blocks[a->num_tokens + token];
    if (!a->window) return s;
    s.first = a->window > 0 ? position - a->window + 1 : position - position % -a->window;
    if (a->blocks && a->blocks[token] < s.first) s.first = a->blocks[token];
    if (s.first < 0) s.first = 0;
    return s;
}

INLINE void store_probs(Block *b, int m, vec p0, vec p1) {
    if (b->is_bf16) {
        store_bf16((bf16 *)b->probs + m * TILE, p0);
        store_bf16((bf16 *)b->probs + m * TILE + LANES, p1);
    } else {
        store((float *)b->probs + m * TILE, p0);
        store((float *)b->probs + m * TILE + LANES, p1);
    }
}

INLINE int clamp_to_tile(int64_t offset) {
    return offset < -1 ? -1 : offset > TILE ? TILE : (int)offset;
}

/* cap * tanh(x / cap), which is exact at both infinities. */
INLINE vec limit(vec x, float cap) {
    return cap - 2.0f * cap / (exp_vec(x * (2.0f / cap)) + 1.0f);
}

/* Turn the scores of the tile at `first_key` into probabilities, 0 for keys that are not seen. */
static void softmax_tile(const Attention *a, Block *b, int m, KeyRange range, int64_t first_key) {
    vec s0 = load(b->scores + m * TILE) * a->scale;
    vec s1 = load(b->scores + m * TILE + LANES) * a->scale;
    if (b->has_scales) {
        s0 *= load(b->k_scales);
        s1 *= load(b->k_scales + LANES);
    }
    if (a->soft_cap > 0) {
        s0 = limit(s0, a->soft_cap);
        s1 = limit(s1, a->soft_cap);
    }
    int last = clamp_to_tile(range.last - first_key), first = clamp_to_tile(range.first - first_key);
    if (last < TILE - 1) {
        s0 = blend(IOTA <= last, s0, splat(-INFINITY));
        s1 = blend(IOTA <= last - LANES, s1, splat(-INFINITY));
    }
    if (first > 0) {
        s0 = blend(IOTA >= first, s0, splat(-INFINITY));
        s1 = blend(IOTA >= first - LANES, s1, splat(-INFINITY));
    }
    float peak = max_lanes(max_vec(s0, s1));
    if (peak > b->sums.peaks[m]) {
        vec shrink = exp_vec(splat(b->sums.peaks[m] - peak));
        b->sums.weights[m] *= shrink;
        float *out = b->sums.out + m * b->value_dim;
        for (int d = 0; d < b->value_dim; d += LANES) store(out + d, load(out + d) * shrink);
        b->sums.peaks[m] = peak;
    }
    if (last < 0 || b->sums.peaks[m] == -INFINITY) { /* nothing seen: adds nothing */
        store_probs(b, m, splat(0.0f), splat(0.0f));
        return;
    }
    vec p0 = exp_vec(s0 - b->sums.peaks[m]), p1 = exp_vec(s1 - b->sums.peaks[m]);
    b->sums.weights[m] += p0 + p1;
    if (b->has_scales) {
        p0 *= load(b->v_scales);
        p1 *= load(b->v_scales + LANES);
    }
    store_probs(b, m, p0, p1);
}
