/* Some queries against one tile of keys and values: running softmax of scores (scores.h), weighted values.
 *
 * Values are [TILE][D] (bfloat16: [TILE / 2][D][2]), in a page or copied as keys are. Scales of cells are
 * applied to scores and to probabilities.
 */
#pragma once

#include "scores.h"

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

/* ---- weighted values ---------------------------------------------------------------------------- */

INLINE void mix_block(Block *b, int m, const int num, const int is_bf16) {
    int width = is_bf16 ? TILE / 2 : TILE;
    for (int d = 0; d < b->value_dim; d += TILE)
        multiply(b->sums.out + m * b->value_dim + d, b->value_dim, b->probs + m * width, b->values + d,
                 b->value_dim, width, num, is_bf16);
}

#define DEFINE_mix_floats(N) OWN mix_floats_##N(Block *b, int m) { mix_block(b, m, N, 0); }
#define DEFINE_mix_pairs(N) OWN mix_pairs_##N(Block *b, int m) { mix_block(b, m, N, 1); }
#define CASE_mix_floats(N) case N: mix_floats_##N(b, m); break;
#define CASE_mix_pairs(N) case N: mix_pairs_##N(b, m); break;
FOR_BLOCKS(mix_floats)

#if HAS_TILES
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
