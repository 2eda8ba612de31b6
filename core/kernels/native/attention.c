/* Attention over paged keys and values: decode rows and prompt chunks, grouped queries, windows,
 * blocks that see themselves as a whole.
 *
 * The method is FlashAttention's (Dao et al. 2022, arXiv:2205.14135): keys pass in tiles, with a
 * running maximum and sum per query. Tiles lie at fixed positions of the sequence and a query
 * skips what it may not see, so its result depends neither on how its prompt was cut into chunks
 * nor on the other rows. Sums are float32. Over a bfloat16 cache, queries and probabilities are
 * bfloat16, too, and multiplied in pairs; over a float32 cache everything is float32.
 *
 * The queries of one key-value head are the rows of a small matrix product. Per tile keys are
 * packed once as [D][TILE] (bfloat16: [D / 2][TILE][2]) and values as [TILE][D] ([TILE / 2][D][2]).
 */
#include <stddef.h>
#include <stdlib.h>

#include "kernels.h"
#include "pool.h"
#include "tiles.h"
#include "unrolled.h"

#define TILE 32
#define MAX_QUERIES 64
#define MAX_DIM 256

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

/* Everything one task keeps of its queries. `dim` is head_dim rounded up to 32. */
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

/* Words of keys: floats, or pairs of bfloat16 neighbours in D. */
static void pack_keys(Block *b, const void *const keys[TILE], int64_t num_bytes) {
    int64_t num_words = b->is_bf16 ? b->dim / 2 : b->dim;
    for (int half = 0; half < TILE; half += LANES)
        transpose_words(keys + half, num_bytes, b->k + half, TILE, num_words);
}

static void pack_floats(Block *b, const void *const values[TILE], int64_t num_bytes) {
    for (int j = 0; j < TILE; j++)
        for (int d = 0; d < b->dim; d += LANES) {
            uvec words = load_words(values[j], d, num_bytes);
            memcpy(&b->v[j * b->dim + d], &words, sizeof words);
        }
}

/* Pairs of neighbouring keys. */
static void pack_pairs(Block *b, const void *const values[TILE], int64_t num_bytes) {
    for (int d = 0; d < b->dim; d += 2 * LANES)
        for (int j = 0; j < TILE; j += 2) {
            wvec even = (wvec)load_words(values[j], d / 2, num_bytes);
            wvec odd = (wvec)load_words(values[j + 1], d / 2, num_bytes);
            wvec low = interleave_low(even, odd), high = interleave_high(even, odd);
            uint32_t *to = b->v + (j / 2) * b->dim + d;
            memcpy(to, &low, sizeof low);
            memcpy(to + LANES, &high, sizeof high);
        }
}

static void pack_tile(const Attention *a, Block *b, const void *const keys[TILE],
                      const void *const values[TILE]) {
    int64_t num_bytes = a->head_dim * size_of(a->kv_dtype);
    pack_keys(b, keys, num_bytes);
    if (b->is_bf16)
        pack_pairs(b, values, num_bytes);
    else
        pack_floats(b, values, num_bytes);
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

/* out[num][TILE] += rows[num][depth] b[depth][TILE], in words; strides, too. */
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
    multiply(scores, TILE, b->q + (size_t)m * width, b->k, TILE, width, num, is_bf16);
}

INLINE void mix_block(Block *b, int m, const int num, const int is_bf16) {
    int width = is_bf16 ? TILE / 2 : TILE;
    for (int d = 0; d < b->dim; d += TILE)
        multiply(b->out + m * b->dim + d, b->dim, b->probs + m * width, b->v + d, b->dim, width,
                 num, is_bf16);
}

/* Defines NAME(b, m, end) for the queries [m, end), one head's. */
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
        multiply_tiles(b->q + (size_t)m * b->dim / 2, 2 * b->dim, b->k, 4 * TILE, scores, 4 * TILE,
                       b->dim, num);
    }
}

static void mix_pairs(Block *b, int m, int end) {
    for (int num; m < end; m += num) {
        num = end - m < 2 * TILE_ROWS ? end - m : 2 * TILE_ROWS;
        shape_tiles(num);
        for (int d = 0; d < b->dim; d += TILE)
            multiply_tiles(b->probs + m * TILE / 2, 2 * TILE, b->v + d, 4 * b->dim,
                           b->out + m * b->dim + d, 4 * b->dim, TILE, num);
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
} Sight;

INLINE Sight sight_of(const Attention *a, int64_t token, int64_t position) {
    Sight s = {0, position};
    if (a->blocks) s.last = a->blocks[a->num_tokens + token];
    if (!a->window) return s;
    s.first = position - a->window + 1;
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

/* The scores of the tile at `first_key` become probabilities, as far as the query sees the keys. */
static void soften(Block *b, int m, Sight sight, int64_t first_key, float scale) {
    vec s0 = load(b->scores + m * TILE) * scale;
    vec s1 = load(b->scores + m * TILE + LANES) * scale;
    int last = clamp_to_tile(sight.last - first_key), first = clamp_to_tile(sight.first - first_key);
    if (last < TILE - 1) {
        s0 = blend(IOTA <= last, s0, splat(-INFINITY));
        s1 = blend(IOTA <= last - LANES, s1, splat(-INFINITY));
    }
    if (first > 0) {
        s0 = blend(IOTA >= first, s0, splat(-INFINITY));
        s1 = blend(IOTA >= first - LANES, s1, splat(-INFINITY));
    }
    float peak = max_lanes(max_vec(s0, s1));
    if (peak > b->peaks[m]) {
        vec shrink = exp_vec(splat(b->peaks[m] - peak));
        b->sums[m] *= shrink;
        for (int d = 0; d < b->dim; d += LANES)
            store(b->out + m * b->dim + d, load(b->out + m * b->dim + d) * shrink);
        b->peaks[m] = peak;
    }
    if (last < 0 || b->peaks[m] == -INFINITY) { /* nothing seen: adds exactly nothing */
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
} Work;

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

static const uint32_t ZEROS[MAX_DIM];

/* Where the keys and values of a tile lie for one head; zeros past the end. */
static void locate_tile(const Attention *a, const int64_t slots[TILE], int kv_head,
                        const void *keys[TILE], const void *values[TILE]) {
    int64_t item = size_of(a->kv_dtype);
    for (int j = 0; j < TILE; j++) {
        int64_t at = (slots[j] * a->num_kv_heads + kv_head) * a->head_dim * item;
        keys[j] = slots[j] < 0 ? (const char *)ZEROS : (const char *)a->k_pages + at;
        values[j] = slots[j] < 0 ? (const char *)ZEROS : (const char *)a->v_pages + at;
    }
}

/* Ask for a tile's memory ahead of its turn: into the second-level cache, as the first is full of
 * the tile at work (measured on Zen 4: a third less time than without, prefetching into the first
 * level more). Inline, because GCC drops calls of a function that does nothing but prefetch. */
INLINE void prefetch_tile(const Attention *a, const int64_t slots[TILE], int kv_head) {
    const void *keys[TILE], *values[TILE];
    int64_t num_bytes = a->head_dim * size_of(a->kv_dtype);
    locate_tile(a, slots, kv_head, keys, values);
    for (int j = 0; j < TILE; j++)
        for (int64_t at = 0; at < num_bytes; at += 64) {
            __builtin_prefetch((const char *)keys[j] + at, 0, 2);
            __builtin_prefetch((const char *)values[j] + at, 0, 2);
        }
}

/* `next` are the slots of the tile that follows, or NULL. */
static void attend_tile(const Attention *a, Block *b, const Work *w, int64_t first_key,
                        const int64_t slots[TILE], const int64_t *next) {
    int group = a->num_heads / a->num_kv_heads, num_q = w->num_queries * group;
    for (int head = 0; head < w->num_kv_heads; head++) {
        const void *keys[TILE], *values[TILE];
        if (next) prefetch_tile(a, next, w->kv_head + head);
        locate_tile(a, slots, w->kv_head + head, keys, values);
        int begin = head * num_q, end = begin + num_q;
        pack_tile(a, b, keys, values);
        (b->is_bf16 ? score_pairs : score_floats)(b, begin, end);
        for (int m = begin; m < end; m++) {
            int64_t query = (m - begin) / group;
            soften(b, m, sight_of(a, w->first_token + query, w->position + query), first_key,
                   a->scale);
        }
        (b->is_bf16 ? mix_pairs : mix_floats)(b, begin, end);
    }
}

/* Index of query `m` of the task's `head`-th head in q, by its stride, or in out. */
INLINE int64_t locate(const Attention *a, const Work *w, int m, int64_t token_stride) {
    int group = a->num_heads / a->num_kv_heads, num_q = w->num_queries * group;
    int head = w->kv_head + m / num_q, rest = m % num_q;
    return (w->first_token + rest / group) * token_stride +
           (int64_t)(head * group + rest % group) * a->head_dim;
}

static void pack_queries(const Attention *a, Block *b, const Work *w, int num_rows) {
    int dtype = b->is_bf16 ? BFLOAT16 : FLOAT32;
    memset(b->q, 0, (size_t)(num_rows * b->dim * size_of(dtype)));
    for (int m = 0; m < num_rows; m++) {
        int64_t from = locate(a, w, m, a->q_stride), to = (int64_t)m * b->dim;
        int d = 0;
        for (; d + LANES <= a->head_dim; d += LANES)
            store_as(b->q, to + d, load_as(a->q, from + d, a->q_dtype), dtype);
        for (; d < a->head_dim; d++)
            write_as(b->q, to + d, read_as(a->q, from + d, a->q_dtype), dtype);
    }
}

static void finish(const Attention *a, Block *b, const Work *w, int num_rows) {
    for (int m = 0; m < num_rows; m++) {
        float *out = b->out + m * b->dim, sum = sum_lanes(b->sums[m]);
        int64_t to = locate(a, w, m, (int64_t)a->num_heads * a->head_dim);
        int d = 0;
        for (; d + LANES <= a->head_dim; d += LANES)
            store_as(a->out, to + d, load(out + d) / sum, a->q_dtype);
        for (; d < a->head_dim; d++) write_as(a->out, to + d, out[d] / sum, a->q_dtype);
    }
}

/* The positions that any of the task's queries sees. */
static Sight sight_of_all(const Attention *a, const Work *w) {
    Sight all = sight_of(a, w->first_token, w->position);
    for (int query = 1; query < w->num_queries; query++) {
        Sight s = sight_of(a, w->first_token + query, w->position + query);
        if (s.first < all.first) all.first = s.first;
        if (s.last > all.last) all.last = s.last;
    }
    return all;
}

static void attend(const Attention *a, const Work *w) {
    Block b;
    int num_rows = w->num_queries * (a->num_heads / a->num_kv_heads) * w->num_kv_heads;
    b.is_bf16 = a->kv_dtype == BFLOAT16;
    b.dim = (a->head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    pack_queries(a, &b, w, num_rows);
    memset(b.out, 0, sizeof(float) * (size_t)num_rows * b.dim);
    for (int m = 0; m < num_rows; m++) {
        b.sums[m] = splat(0.0f);
        b.peaks[m] = -INFINITY;
    }
    Sight all = sight_of_all(a, w);
    int64_t tile = all.first / TILE * TILE, end = all.last + 1, slots[2][TILE];
    find_tile(a, w->row, tile, end, slots[0]);
    for (int turn = 0; tile < end; tile += TILE, turn ^= 1) {
        int64_t *next = tile + TILE < end ? slots[turn ^ 1] : NULL;
        if (next) find_tile(a, w->row, tile + TILE, end, next);
        attend_tile(a, &b, w, tile, slots[turn], next);
    }
    finish(a, &b, w, num_rows);
#if HAS_TILES
    TILE_RELEASE();
#endif
}

/* ---- the whole batch ------------------------------------------------------------------------ */

/* `first_task` of each row, counted in blocks of queries. */
typedef struct {
    const Attention *a;
    int64_t *first_task;
    int num_queries, num_heads;
} Batch;

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

/* The last row whose tasks begin at `task` or before. */
INLINE int64_t row_of(const Batch *batch, int64_t task) {
    int64_t low = 0, high = batch->a->num_rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (batch->first_task[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void attend_task(void *context, int64_t index, int worker) {
    const Batch *batch = context;
    const Attention *a = batch->a;
    int splits = a->num_kv_heads / batch->num_heads;
    int64_t task = index / splits, row = row_of(batch, task);
    int64_t first = a->query_starts[row] + (task - batch->first_task[row]) * batch->num_queries;
    int64_t left = row_end(a, row) - first;
    Work w = {
        .row = row,
        .first_token = first,
        .position = a->context_lengths[row] - left,
        .num_queries = (int)(left < batch->num_queries ? left : batch->num_queries),
        .kv_head = (int)(index % splits) * batch->num_heads,
        .num_kv_heads = batch->num_heads,
    };
    (void)worker;
    attend(a, &w);
}

int paged_attention(const Attention *a) {
    Batch batch = {a, malloc(sizeof(int64_t) * (size_t)(a->num_rows + 1)), queries_per_task(a),
                   heads_per_task(a)};
    if (!batch.first_task) return 1;
    batch.first_task[0] = 0;
    for (int64_t row = 0; row < a->num_rows; row++) {
        int64_t num_queries = row_end(a, row) - a->query_starts[row];
        batch.first_task[row + 1] =
            batch.first_task[row] + (num_queries + batch.num_queries - 1) / batch.num_queries;
    }
    int64_t num_tasks = batch.first_task[a->num_rows] * (a->num_kv_heads / batch.num_heads);
    run_tasks(num_tasks, a->num_threads, attend_task, &batch);
    free(batch.first_task);
    return 0;
}
