/* Attention over paged keys and values: decode rows and prompt chunks, grouped queries, windows.
 *
 * The method is FlashAttention's (Dao et al. 2022, arXiv:2205.14135): keys pass in tiles, with a
 * running maximum and sum per query. Tiles lie at fixed positions of the sequence and a query
 * skips what it may not see, so its result depends neither on how its prompt was cut into chunks
 * nor on the other rows. Sums are float32. Where the processor multiplies bfloat16 pairs, keys,
 * values and probabilities stay bfloat16; elsewhere everything is float32 inside.
 *
 * The queries of one key-value head are the rows of a small matrix product. Per tile keys are
 * packed once as [D][TILE] (bfloat16: [D / 2][TILE][2]) and values as [TILE][D] ([TILE / 2][D][2]).
 */
#include <stddef.h>
#include <stdlib.h>

#include "kernels.h"
#include "vector.h"

#define TILE 32
#define MAX_QUERIES 64
#define MAX_DIM 256
#define BLOCK 4

/* Everything one thread keeps of one block of queries. `dim` is head_dim rounded up to 32. */
typedef struct {
    _Alignas(64) float scores[MAX_QUERIES * TILE];
    _Alignas(64) uint32_t probs[MAX_QUERIES * TILE];
    _Alignas(64) float out[MAX_QUERIES * MAX_DIM];
    _Alignas(64) uint32_t q[MAX_QUERIES * MAX_DIM];
    _Alignas(64) uint32_t k[MAX_DIM * TILE];
    _Alignas(64) uint32_t v[MAX_DIM * TILE];
    _Alignas(64) vec sums[MAX_QUERIES];
    float peaks[MAX_QUERIES];
    int dim, is_bf16;
} Block;

static const ivec IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- packing ------------------------------------------------------------------------------ */

/* LANES words of a stored vector from word `first` on; zeros where there are none. */
INLINE uvec load_words(const void *row, int first, int num_words) {
    if (first + LANES <= num_words) return load_bits((const uint32_t *)row + first);
    uint32_t words[LANES] = {0};
    if (first < num_words)
        memcpy(words, (const uint32_t *)row + first, sizeof(uint32_t) * (num_words - first));
    return load_bits(words);
}

/* Keys as words: floats, or pairs of bfloat16 neighbours in D. */
static void pack_keys_by_words(Block *b, const void *const keys[TILE], int num_words) {
    for (int first = 0; first < num_words; first += LANES) {
        for (int half = 0; half < TILE; half += LANES) {
            uvec words[LANES];
            for (int j = 0; j < LANES; j++)
                words[j] = keys[half + j] ? load_words(keys[half + j], first, num_words) : (uvec){0};
            transpose(words);
            for (int d = 0; d < LANES; d++)
                memcpy(&b->k[(first + d) * TILE + half], &words[d], sizeof words[d]);
        }
    }
}

static void pack_widened(Block *b, const void *const keys[TILE], const void *const values[TILE],
                         int head_dim) {
    float *k = (float *)b->k, *v = (float *)b->v;
    for (int j = 0; j < TILE; j++)
        for (int d = 0; d < b->dim; d++) {
            int is_stored = keys[j] && d < head_dim;
            k[d * TILE + j] = is_stored ? read_as(keys[j], d, BFLOAT16) : 0.0f;
            v[j * b->dim + d] = is_stored ? read_as(values[j], d, BFLOAT16) : 0.0f;
        }
}

static void pack_values_float(Block *b, const void *const values[TILE], int head_dim) {
    for (int j = 0; j < TILE; j++)
        for (int d = 0; d < b->dim; d += LANES) {
            uvec words = values[j] ? load_words(values[j], d, head_dim) : (uvec){0};
            memcpy(&b->v[j * b->dim + d], &words, sizeof words);
        }
}

#if HAS_BF16_DOT
/* Pairs of neighbouring keys. Interleaving leaves D in the order of `unpack`: see `finish`. */
static void pack_values_pairs(Block *b, const void *const values[TILE], int num_words) {
    for (int j = 0; j < TILE; j += 2)
        for (int d = 0; d < b->dim; d += 2 * LANES) {
            uvec even = values[j] ? load_words(values[j], d / 2, num_words) : (uvec){0};
            uvec odd = values[j + 1] ? load_words(values[j + 1], d / 2, num_words) : (uvec){0};
            uint32_t *to = b->v + (j / 2) * b->dim + d;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16((__m512i)even, (__m512i)odd));
            _mm512_storeu_si512(to + LANES, _mm512_unpackhi_epi16((__m512i)even, (__m512i)odd));
        }
}
#endif

static void pack_tile(const Attention *a, Block *b, const void *const keys[TILE],
                      const void *const values[TILE]) {
    if (a->kv_dtype == FLOAT32) {
        pack_keys_by_words(b, keys, a->head_dim);
        pack_values_float(b, values, a->head_dim);
        return;
    }
#if HAS_BF16_DOT
    if (b->is_bf16) {
        pack_keys_by_words(b, keys, a->head_dim / 2);
        pack_values_pairs(b, values, a->head_dim / 2);
        return;
    }
#endif
    pack_widened(b, keys, values, a->head_dim);
}

/* ---- products: BLOCK queries at a time ------------------------------------------------------ */

INLINE void score_block(Block *b, int m, const int num, int depth) {
    vec acc[BLOCK][2];
    for (int i = 0; i < num; i++) acc[i][0] = acc[i][1] = splat(0.0f);
#if HAS_BF16_DOT
    if (b->is_bf16) {
        const uint32_t *q = b->q + (size_t)m * b->dim / 2;
        for (int d = 0; d < depth; d++) {
            __m512bh k0 = (__m512bh)load_bits(b->k + d * TILE);
            __m512bh k1 = (__m512bh)load_bits(b->k + d * TILE + LANES);
            for (int i = 0; i < num; i++) {
                __m512bh x = (__m512bh)_mm512_set1_epi32((int)q[i * (b->dim / 2) + d]);
                acc[i][0] = (vec)_mm512_dpbf16_ps((__m512)acc[i][0], x, k0);
                acc[i][1] = (vec)_mm512_dpbf16_ps((__m512)acc[i][1], x, k1);
            }
        }
    } else
#endif
    {
        const float *q = (const float *)b->q + (size_t)m * b->dim, *k = (const float *)b->k;
        for (int d = 0; d < depth; d++) {
            vec k0 = load(k + d * TILE), k1 = load(k + d * TILE + LANES);
            for (int i = 0; i < num; i++) {
                acc[i][0] += q[i * b->dim + d] * k0;
                acc[i][1] += q[i * b->dim + d] * k1;
            }
        }
    }
    for (int i = 0; i < num; i++) {
        store(b->scores + (m + i) * TILE, acc[i][0]);
        store(b->scores + (m + i) * TILE + LANES, acc[i][1]);
    }
}

INLINE void mix_block(Block *b, int m, const int num, int d) {
    vec acc[BLOCK][2];
    for (int i = 0; i < num; i++) {
        acc[i][0] = load(b->out + (m + i) * b->dim + d);
        acc[i][1] = load(b->out + (m + i) * b->dim + d + LANES);
    }
#if HAS_BF16_DOT
    if (b->is_bf16) {
        for (int j = 0; j < TILE / 2; j++) {
            __m512bh v0 = (__m512bh)load_bits(b->v + j * b->dim + d);
            __m512bh v1 = (__m512bh)load_bits(b->v + j * b->dim + d + LANES);
            for (int i = 0; i < num; i++) {
                __m512bh p = (__m512bh)_mm512_set1_epi32((int)b->probs[(m + i) * TILE / 2 + j]);
                acc[i][0] = (vec)_mm512_dpbf16_ps((__m512)acc[i][0], p, v0);
                acc[i][1] = (vec)_mm512_dpbf16_ps((__m512)acc[i][1], p, v1);
            }
        }
    } else
#endif
    {
        const float *v = (const float *)b->v, *p = (const float *)b->probs;
        for (int j = 0; j < TILE; j++) {
            vec v0 = load(v + j * b->dim + d), v1 = load(v + j * b->dim + d + LANES);
            for (int i = 0; i < num; i++) {
                acc[i][0] += p[(m + i) * TILE + j] * v0;
                acc[i][1] += p[(m + i) * TILE + j] * v1;
            }
        }
    }
    for (int i = 0; i < num; i++) {
        store(b->out + (m + i) * b->dim + d, acc[i][0]);
        store(b->out + (m + i) * b->dim + d + LANES, acc[i][1]);
    }
}

/* Queries [m, end): one head's. */
static void score(Block *b, int m, int end, int depth) {
    for (; m + BLOCK <= end; m += BLOCK) score_block(b, m, BLOCK, depth);
    switch (end - m) {
        case 3: score_block(b, m, 3, depth); break;
        case 2: score_block(b, m, 2, depth); break;
        case 1: score_block(b, m, 1, depth); break;
    }
}

static void mix(Block *b, int begin, int end) {
    for (int d = 0; d < b->dim; d += 2 * LANES) {
        int m = begin;
        for (; m + BLOCK <= end; m += BLOCK) mix_block(b, m, BLOCK, d);
        switch (end - m) {
            case 3: mix_block(b, m, 3, d); break;
            case 2: mix_block(b, m, 2, d); break;
            case 1: mix_block(b, m, 1, d); break;
        }
    }
}

/* ---- running softmax ------------------------------------------------------------------------ */

INLINE void store_probs(Block *b, int m, vec p0, vec p1) {
    if (b->is_bf16) {
        store_bf16((bf16 *)b->probs + m * TILE, p0);
        store_bf16((bf16 *)b->probs + m * TILE + LANES, p1);
    } else {
        store((float *)b->probs + m * TILE, p0);
        store((float *)b->probs + m * TILE + LANES, p1);
    }
}

/* Keys `first_key + j` that the query at `position` sees: at most it, and after position - window. */
static void soften(Block *b, int m, int64_t position, int64_t first_key, const Attention *a) {
    vec s0 = load(b->scores + m * TILE) * a->scale;
    vec s1 = load(b->scores + m * TILE + LANES) * a->scale;
    int64_t ahead = position - first_key;
    if (ahead < TILE - 1) {
        s0 = blend(IOTA <= (int)ahead, s0, splat(-INFINITY));
        s1 = blend(IOTA <= (int)ahead - LANES, s1, splat(-INFINITY));
    }
    if (a->window && ahead >= a->window) {
        int64_t oldest = ahead - a->window;
        int bound = oldest < TILE ? (int)oldest : TILE;
        s0 = blend(IOTA > bound, s0, splat(-INFINITY));
        s1 = blend(IOTA > bound - LANES, s1, splat(-INFINITY));
    }
    float peak = max_lanes(max_vec(s0, s1));
    if (peak > b->peaks[m]) {
        vec shrink = exp_vec(splat(b->peaks[m] - peak));
        b->sums[m] *= shrink;
        for (int d = 0; d < b->dim; d += LANES)
            store(b->out + m * b->dim + d, load(b->out + m * b->dim + d) * shrink);
        b->peaks[m] = peak;
    }
    if (ahead < 0 || b->peaks[m] == -INFINITY) { /* nothing seen: adds exactly nothing */
        store_probs(b, m, splat(0.0f), splat(0.0f));
        return;
    }
    vec p0 = exp_vec(s0 - b->peaks[m]), p1 = exp_vec(s1 - b->peaks[m]);
    b->sums[m] += p0 + p1;
    store_probs(b, m, p0, p1);
}

/* ---- one task: some queries of one row, for one key-value head or for all of them ------------ */

typedef struct {
    int64_t row, first_token, position;
    int num_queries, kv_head, num_kv_heads;
} Task;

static void find_tile(const Attention *a, int64_t row, int64_t first_key, int64_t end_key,
                      int64_t slots[TILE]) {
    const int64_t *pages = a->page_table + row * a->table_stride;
    int64_t offset_mask = ((int64_t)1 << a->page_shift) - 1;
    for (int j = 0; j < TILE; j++) {
        int64_t key = first_key + j;
        int is_seen = key < end_key;
        int64_t page = pages[(is_seen ? key : first_key) >> a->page_shift];
        slots[j] = is_seen ? (page << a->page_shift) + (key & offset_mask) : -1;
    }
}

/* Where the keys and values of a tile lie for one head; NULL past the end. */
static void locate_tile(const Attention *a, const int64_t slots[TILE], int kv_head,
                        const void *keys[TILE], const void *values[TILE]) {
    int64_t item = a->kv_dtype == BFLOAT16 ? 2 : 4;
    for (int j = 0; j < TILE; j++) {
        int64_t at = (slots[j] * a->num_kv_heads + kv_head) * a->head_dim * item;
        keys[j] = slots[j] < 0 ? NULL : (const char *)a->k_pages + at;
        values[j] = slots[j] < 0 ? NULL : (const char *)a->v_pages + at;
    }
}

/* Ask for a tile's memory ahead of its turn: into the second-level cache, as the first is full of
 * the tile at work (measured on Zen 4: a third less time than without, prefetching into the first
 * level more). Inline, because GCC drops calls of a function that does nothing but prefetch. */
INLINE void prefetch_tile(const Attention *a, const int64_t slots[TILE], int kv_head) {
    const void *keys[TILE], *values[TILE];
    int64_t num_bytes = a->head_dim * (a->kv_dtype == BFLOAT16 ? 2 : 4);
    locate_tile(a, slots, kv_head, keys, values);
    for (int j = 0; j < TILE && keys[j]; j++)
        for (int64_t at = 0; at < num_bytes; at += 64) {
            __builtin_prefetch((const char *)keys[j] + at, 0, 2);
            __builtin_prefetch((const char *)values[j] + at, 0, 2);
        }
}

/* `next` are the slots of the tile that follows, or NULL. */
static void attend_tile(const Attention *a, Block *b, const Task *t, int64_t first_key,
                        const int64_t slots[TILE], const int64_t *next) {
    int group = a->num_heads / a->num_kv_heads, num_q = t->num_queries * group;
    for (int head = 0; head < t->num_kv_heads; head++) {
        const void *keys[TILE], *values[TILE];
        if (next) prefetch_tile(a, next, t->kv_head + head);
        locate_tile(a, slots, t->kv_head + head, keys, values);
        int begin = head * num_q, end = begin + num_q;
        pack_tile(a, b, keys, values);
        score(b, begin, end, b->is_bf16 ? a->head_dim / 2 : a->head_dim);
        for (int m = begin; m < end; m++)
            soften(b, m, t->position + (m - begin) / group, first_key, a);
        mix(b, begin, end);
    }
}

/* Index of query `m` of the task's `head`-th head in q, by its stride, or in out. */
INLINE int64_t locate(const Attention *a, const Task *t, int m, int64_t token_stride) {
    int group = a->num_heads / a->num_kv_heads, num_q = t->num_queries * group;
    int head = t->kv_head + m / num_q, rest = m % num_q;
    return (t->first_token + rest / group) * token_stride +
           (int64_t)(head * group + rest % group) * a->head_dim;
}

static void pack_queries(const Attention *a, Block *b, const Task *t, int num_rows) {
    memset(b->q, 0, sizeof(uint32_t) * (size_t)num_rows * b->dim);
    for (int m = 0; m < num_rows; m++) {
        int64_t from = locate(a, t, m, a->q_stride);
        for (int d = 0; d < a->head_dim; d++) {
            float x = read_as(a->q, from + d, a->q_dtype);
            if (b->is_bf16)
                ((bf16 *)b->q)[m * b->dim + d] = round_bf16(x);
            else
                ((float *)b->q)[m * b->dim + d] = x;
        }
    }
}

static void finish(const Attention *a, Block *b, const Task *t, int num_rows) {
    for (int m = 0; m < num_rows; m++) {
        float *out = b->out + m * b->dim, sum = sum_lanes(b->sums[m]);
        if (b->is_bf16)
            for (int d = 0; d < b->dim; d += 2 * LANES) { /* undo the interleaving of values */
                vec low = load(out + d), high = load(out + d + LANES);
                store(out + d, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5,
                                                       6, 7, 20, 21, 22, 23));
                store(out + d + LANES, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26,
                                                               27, 12, 13, 14, 15, 28, 29, 30, 31));
            }
        int64_t to = locate(a, t, m, (int64_t)a->num_heads * a->head_dim);
        int d = 0;
        for (; d + LANES <= a->head_dim; d += LANES)
            store_as(a->out, to + d, load(out + d) / sum, a->q_dtype);
        for (; d < a->head_dim; d++) write_as(a->out, to + d, out[d] / sum, a->q_dtype);
    }
}

static void attend(const Attention *a, Block *b, const Task *t) {
    int num_rows = t->num_queries * (a->num_heads / a->num_kv_heads) * t->num_kv_heads;
    pack_queries(a, b, t, num_rows);
    memset(b->out, 0, sizeof(float) * (size_t)num_rows * b->dim);
    for (int m = 0; m < num_rows; m++) {
        b->sums[m] = splat(0.0f);
        b->peaks[m] = -INFINITY;
    }
    int64_t end = t->position + t->num_queries;
    int64_t oldest = a->window && t->position >= a->window ? t->position - a->window + 1 : 0;
    int64_t tile = oldest / TILE * TILE, slots[2][TILE];
    find_tile(a, t->row, tile, end, slots[0]);
    for (int turn = 0; tile < end; tile += TILE, turn ^= 1) {
        int64_t *next = tile + TILE < end ? slots[turn ^ 1] : NULL;
        if (next) find_tile(a, t->row, tile + TILE, end, next);
        attend_tile(a, b, t, tile, slots[turn], next);
    }
    finish(a, b, t, num_rows);
}

/* ---- the whole batch ------------------------------------------------------------------------ */

/* How many queries and key-value heads a task takes. A lone query takes all heads where there are
 * rows enough for every thread: a page is then read once, from end to end. */
INLINE int queries_per_task(const Attention *a) {
    return MAX_QUERIES / (a->num_heads / a->num_kv_heads);
}

INLINE int heads_per_task(const Attention *a) {
    int is_decode = a->num_rows == a->num_tokens;
    return is_decode && a->num_rows >= 2 * a->num_threads && a->num_heads <= MAX_QUERIES
               ? a->num_kv_heads
               : 1;
}

INLINE int64_t row_end(const Attention *a, int64_t row) {
    return row + 1 < a->num_rows ? a->query_starts[row + 1] : a->num_tokens;
}

int paged_attention(const Attention *a) {
    int step = queries_per_task(a), heads = heads_per_task(a), splits = a->num_kv_heads / heads;
    int64_t *blocks = malloc(sizeof(int64_t) * (size_t)(a->num_rows + 1));
    if (!blocks) return 1;
    blocks[0] = 0;
    for (int64_t row = 0; row < a->num_rows; row++)
        blocks[row + 1] = blocks[row] + (row_end(a, row) - a->query_starts[row] + step - 1) / step;
    int64_t num_tasks = blocks[a->num_rows] * splits;
#pragma omp parallel num_threads(a->num_threads)
    {
        Block b;
        b.is_bf16 = HAS_BF16_DOT && a->kv_dtype == BFLOAT16 && a->head_dim % 2 == 0;
        b.dim = (a->head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        int64_t row = 0;
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < num_tasks; index++) {
            int64_t block = index / splits;
            while (block >= blocks[row + 1]) row++;
            int64_t first = a->query_starts[row] + (block - blocks[row]) * step;
            int64_t left = row_end(a, row) - first;
            Task task = {
                .row = row,
                .first_token = first,
                .position = a->context_lengths[row] - left,
                .num_queries = (int)(left < step ? left : step),
                .kv_head = (int)(index % splits) * heads,
                .num_kv_heads = heads,
            };
            attend(a, &b, &task);
        }
    }
    free(blocks);
    return 0;
}
