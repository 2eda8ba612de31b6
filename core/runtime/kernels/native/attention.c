/* Attention over paged keys and values: decode rows and prompt chunks, grouped queries, windows, soft
 * caps, sinks, blocks whose tokens all see each other.
 *
 * The method is FlashAttention's (Dao et al. 2022, arXiv:2205.14135): keys pass in tiles, with a
 * running maximum and sum per query, which restart for every segment of keys, so that segments can be
 * summed in parallel (Dao et al., "Flash-Decoding for long-context inference", 2023) and are added up
 * in order. Tiles and segments lie at fixed positions of the sequence and a query skips masked keys,
 * so its result depends neither on the chunks of its prompt nor on other rows nor on the threads.
 * Sums are float32. Over a bfloat16 cache, queries and probabilities are also bfloat16, and multiplied
 * in pairs; the same over a cache of bytes, whose cells bfloat16 holds exactly.
 * Over a float32 cache everything is float32.
 */
#include <stddef.h>
#include <stdlib.h>

#include "attention_block.h"
#include "latent_tile.h"
#include "pool.h"

#define SEGMENT (4 * TILE)

/* ---- a tile of keys and values ---------------------------------------------------------------- */

/* Copy words of a block's keys and values to the tile's keys from `first` on. */
static void copy_words(const Attention *a, Block *b, int first, int num, const void *keys,
                       const void *values) {
    int tokens = tokens_per_block(a), size = a->head_dim, rest = num % 2;
    const uint32_t *k = keys, *v = values;
    for (int i = 0; i < (b->is_bf16 ? size / 2 : size); i++)
        memcpy(b->k + i * TILE + first, k + i * tokens, sizeof(uint32_t) * (size_t)tokens);
    int num_rows = b->is_bf16 ? num / 2 : num, row = b->is_bf16 ? first / 2 : first;
    for (int i = 0; i < num_rows; i++)
        memcpy(b->v + (row + i) * b->dim, v + i * size, sizeof(uint32_t) * (size_t)size);
    if (b->is_bf16 && rest)
        for (int d = 0; d < size; d++)
            b->v[(row + num_rows) * b->dim + d] = v[num_rows * size + d] & 0xffff;
}

/* The same for a block without pairs. */
static void copy_halves(const Attention *a, Block *b, int first, int num, const void *keys,
                        const void *values) {
    int tokens = tokens_per_block(a), size = a->head_dim;
    const bf16 *k = keys, *v = values;
    bf16 *to_k = (bf16 *)b->k, *to_v = (bf16 *)b->v;
    for (int j = 0; j < num; j++)
        for (int d = 0; d < size; d++) {
            to_k[(d / 2 * TILE + first + j) * 2 + d % 2] = k[d * tokens + j];
            to_v[((first + j) / 2 * b->dim + d) * 2 + (first + j) % 2] = v[j * size + d];
        }
}

static void widen_block(const Attention *a, const void *cells, bf16 *to) {
    int64_t size = (int64_t)tokens_per_block(a) * a->head_dim;
    if (a->kv_dtype == INT8)
        widen(cells, to, size, INT8);
    else
        widen(cells, to, size, FLOAT8);
}

/* Fill with zeros past the end: a weight of 0 times stale memory may be NaN. */
static void copy_tile(const Attention *a, Block *b, const Tile *t, int64_t head) {
    int tokens = tokens_per_block(a), has_words = !b->is_bf16 || has_pairs(a);
    size_t num_words = (size_t)(b->is_bf16 ? b->dim / 2 : b->dim) * TILE;
    memset(b->k, 0, sizeof(uint32_t) * num_words);
    memset(b->v, 0, sizeof(uint32_t) * num_words);
    for (int j = 0; j < t->num_keys; j += tokens) {
        int64_t at = block_of(a, t->slots[j], head);
        const void *keys = (const char *)a->k_pages + at, *values = (const char *)a->v_pages + at;
        bf16 wide_k[MAX_DIM * TILE], wide_v[MAX_DIM * TILE];
        if (has_small_cells(a)) {
            widen_block(a, keys, wide_k);
            widen_block(a, values, wide_v);
            keys = wide_k;
            values = wide_v;
        }
        int num = t->num_keys - j < tokens ? t->num_keys - j : tokens;
        (has_words ? copy_words : copy_halves)(a, b, j, num, keys, values);
    }
    b->keys = b->k;
    b->values = b->v;
}

/* ---- a tile of either kind ---------------------------------------------------------------------- */

static void open_tile(const Attention *a, Block *b, const Tile *t, int64_t head) {
    if (b->has_scales) open_scales(a, b, t, head);
    if (is_latent(a)) {
        open_latents(a, b, t);
        return;
    }
    if (t->num_keys < TILE || tokens_per_block(a) < TILE || a->head_dim != b->dim) {
        copy_tile(a, b, t, head);
        return;
    }
    int64_t at = block_of(a, t->slots[0], head);
    b->keys = (const uint32_t *)((const char *)a->k_pages + at);
    b->values = (const uint32_t *)((const char *)a->v_pages + at);
    if (!has_small_cells(a)) return;
    widen_block(a, b->keys, (bf16 *)b->k);
    widen_block(a, b->values, (bf16 *)b->v);
    b->keys = b->k;
    b->values = b->v;
}

/* ---- some queries of one row, for one key-value head or for all of them ----------------------- */

typedef struct {
    int64_t row, first_token, position;
    int num_queries, kv_head, num_kv_heads;
} Work;

/* The number of rows of its products. */
INLINE int rows_of(const Attention *a, const Work *w) {
    return w->num_queries * (a->num_heads / a->num_kv_heads) * w->num_kv_heads;
}

static void attend_tile(const Attention *a, Block *b, const Work *w, int64_t first_key,
                        const Tile *tile) {
    int group = a->num_heads / a->num_kv_heads, num_q = w->num_queries * group;
    for (int head = 0; head < w->num_kv_heads; head++) {
        int begin = head * num_q, end = begin + num_q;
        open_tile(a, b, tile, w->kv_head + head);
        (b->is_bf16 ? score_pairs : score_floats)(b, begin, end);
        for (int m = begin; m < end; m++) {
            int64_t query = (m - begin) / group;
            KeyRange range = range_of(a, w->first_token + query, w->position + query);
            softmax_tile(a, b, m, range, first_key);
        }
        (b->is_bf16 ? mix_pairs : mix_floats)(b, begin, end);
    }
}

/* The head of row `m` of the task's products. */
INLINE int head_of(const Attention *a, const Work *w, int m) {
    int group = a->num_heads / a->num_kv_heads, num_q = w->num_queries * group;
    return (w->kv_head + m / num_q) * group + m % num_q % group;
}

/* Index of row `m` in q, by its stride, or in out. */
INLINE int64_t locate(const Attention *a, const Work *w, int m, int64_t token_stride, int dim) {
    int group = a->num_heads / a->num_kv_heads, num_q = w->num_queries * group;
    return (w->first_token + m % num_q / group) * token_stride + (int64_t)head_of(a, w, m) * dim;
}

INLINE int out_dim(const Attention *a) { return is_latent(a) ? a->value_dim : a->head_dim; }

static void pack_queries(const Attention *a, Block *b, const Work *w, int num_rows) {
    int dtype = b->is_bf16 ? BFLOAT16 : FLOAT32;
    memset(b->q, 0, (size_t)(num_rows * b->dim * size_of(dtype)));
    for (int m = 0; m < num_rows; m++) {
        int64_t at = locate(a, w, m, a->q_stride, a->head_dim);
        const char *from = (const char *)a->q + at * size_of(a->q_dtype);
        char *to = (char *)b->q + (int64_t)m * b->dim * size_of(dtype);
        convert(from, a->q_dtype, to, dtype, a->head_dim);
    }
}

/* Add a key of score `sink` to a sum relative to `peak`; `scale` is the factor on values. */
static __attribute__((noinline)) void add_sink(float sink, float peak, float *sum, float *scale) {
    float highest = sink > peak ? sink : peak, shrink = exp_vec(splat(peak - highest))[0];
    *sum = *sum * shrink + exp_vec(splat(sink - highest))[0];
    *scale *= shrink;
}

static void finish(const Attention *a, const Sums *s, const Work *w, int num_rows, int dim) {
    for (int m = 0; m < num_rows; m++) {
        float *out = s->out + m * dim, sum = sum_lanes(s->weights[m]), scale = a->out_scale;
        int64_t to = locate(a, w, m, (int64_t)a->num_heads * out_dim(a), out_dim(a));
        if (a->sinks) add_sink(a->sinks[head_of(a, w, m)], s->peaks[m], &sum, &scale);
        int d = 0;
        for (; d + LANES <= out_dim(a); d += LANES)
            store_as(a->out, to + d, load(out + d) * scale / sum, a->q_dtype);
        for (; d < out_dim(a); d++) write_as(a->out, to + d, out[d] * scale / sum, a->q_dtype);
    }
}

/* The positions that any of the queries sees. */
static KeyRange range_of_all(const Attention *a, const Work *w) {
    KeyRange all = range_of(a, w->first_token, w->position);
    for (int query = 1; query < w->num_queries; query++) {
        KeyRange s = range_of(a, w->first_token + query, w->position + query);
        if (s.first < all.first) all.first = s.first;
        if (s.last > all.last) all.last = s.last;
    }
    return all;
}

INLINE int padded_out(const Attention *a) { return padded(out_dim(a)); }

static void open_block(const Attention *a, Block *b, const Work *w) {
    b->is_bf16 = a->kv_dtype != FLOAT32;
    b->has_scales = a->k_scales != NULL;
    b->dim = padded(a->head_dim);
    b->value_dim = padded_out(a);
    pack_queries(a, b, w, rows_of(a, w));
}

/* Add the keys of `part` to the block's sums. The hardware prefetches a page that is read from end to
 * end: explicit prefetching only cost time (measured on Zen 5). */
static void attend_keys(const Attention *a, Block *b, const Work *w, KeyRange part) {
    for (int64_t first = part.first / TILE * TILE; first <= part.last; first += TILE) {
        Tile tile;
        find_tile(a, w->row, first, part.last + 1, &tile);
        attend_tile(a, b, w, first, &tile);
    }
#if HAS_TILES
    TILE_RELEASE();
#endif
}

/* The part of a range that lies in a segment. */
INLINE KeyRange cut(KeyRange range, int64_t segment) {
    KeyRange s = {segment * SEGMENT, (segment + 1) * SEGMENT - 1};
    if (s.first < range.first) s.first = range.first;
    if (s.last > range.last) s.last = range.last;
    return s;
}

/* All segments, one after the other. */
static void attend(const Attention *a, const Work *w) {
    _Alignas(64) float memory[2][MAX_QUERIES * FLOATS_PER_QUERY(MAX_DIM)];
    Block b;
    open_block(a, &b, w);
    int num_rows = rows_of(a, w);
    KeyRange all = range_of_all(a, w);
    int64_t segment = all.first / SEGMENT;
    Sums sums = empty_sums(memory[0], num_rows, b.value_dim);
    for (int i = 0; segment * SEGMENT <= all.last; segment++, i++) {
        b.sums = i ? empty_sums(memory[1], num_rows, b.value_dim) : sums;
        attend_keys(a, &b, w, cut(all, segment));
        if (i) add_sums(&sums, &b.sums, num_rows, b.value_dim);
    }
    finish(a, &sums, w, num_rows, b.value_dim);
}

/* ---- the whole batch ------------------------------------------------------------------------ */

/* Tasks are blocks of queries, times key-value heads; or, where rows of one token are too few to keep
 * the threads busy, segments of a row, with sums in `memory`. `first_task` has an entry for each
 * row. */
typedef struct {
    const Attention *a;
    int64_t *first_task;
    float *memory;
    int num_queries, num_heads, in_segments;
} Batch;

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

/* A row of one token, with all its heads. */
INLINE Work lone_query(const Attention *a, int64_t row) {
    return (Work){row, a->query_starts[row], a->context_lengths[row] - 1, 1, 0, a->num_kv_heads};
}

INLINE float *segment_memory(const Batch *batch, int64_t task) {
    const Attention *a = batch->a;
    return batch->memory + task * a->num_heads * FLOATS_PER_QUERY(padded_out(a));
}

static void attend_segment(void *context, int64_t index, int worker) {
    const Batch *batch = context;
    const Attention *a = batch->a;
    Work w = lone_query(a, row_of(batch, index));
    KeyRange all = range_of_all(a, &w);
    int64_t segment = all.first / SEGMENT + index - batch->first_task[w.row];
    Block b;
    (void)worker;
    open_block(a, &b, &w);
    b.sums = empty_sums(segment_memory(batch, index), a->num_heads, b.value_dim);
    attend_keys(a, &b, &w, cut(all, segment));
}

static void join_segments(void *context, int64_t row, int worker) {
    const Batch *batch = context;
    const Attention *a = batch->a;
    Work w = lone_query(a, row);
    int64_t first = batch->first_task[row], end = batch->first_task[row + 1];
    int dim = padded_out(a);
    Sums sums = sums_at(segment_memory(batch, first), a->num_heads, dim);
    (void)worker;
    for (int64_t task = first + 1; task < end; task++) {
        Sums part = sums_at(segment_memory(batch, task), a->num_heads, dim);
        add_sums(&sums, &part, a->num_heads, dim);
    }
    finish(a, &sums, &w, a->num_heads, dim);
}

static int64_t count_tasks(const Batch *batch, int64_t row) {
    const Attention *a = batch->a;
    if (batch->in_segments) {
        Work w = lone_query(a, row);
        KeyRange all = range_of_all(a, &w);
        return all.last / SEGMENT - all.first / SEGMENT + 1;
    }
    int64_t num_queries = row_end(a, row) - a->query_starts[row];
    return (num_queries + batch->num_queries - 1) / batch->num_queries;
}

static int run_segments(Batch *batch, int64_t num_tasks) {
    const Attention *a = batch->a;
    size_t per_task = sizeof(float) * (size_t)a->num_heads * FLOATS_PER_QUERY(padded_out(a));
    if (!(batch->memory = aligned_alloc(64, (size_t)num_tasks * per_task))) return 1;
    run_tasks(num_tasks, a->num_threads, attend_segment, batch);
    run_tasks(a->num_rows, a->num_threads, join_segments, batch);
    free(batch->memory);
    return 0;
}

/* All heads read the same latents: groups of them, as large as a task's products. */
INLINE int num_groups(const Attention *a) {
    int num = is_latent(a) ? 1 : a->num_kv_heads;
    while (a->num_heads / num > MAX_QUERIES || a->num_heads % num) num++;
    return num;
}

/* Rows of one token process all heads, so that a page is read from end to end. */
int paged_attention(const Attention *given) {
    Attention grouped = *given;
    const Attention *a = &grouped;
    grouped.num_kv_heads = num_groups(given);
    int is_decode = a->num_rows == a->num_tokens && a->num_heads <= MAX_QUERIES, status = 0;
    Batch batch = {
        .a = a,
        .first_task = malloc(sizeof(int64_t) * (size_t)(a->num_rows + 1)),
        .num_queries = MAX_QUERIES / (a->num_heads / a->num_kv_heads),
        .num_heads = is_decode ? a->num_kv_heads : 1,
        .in_segments = is_decode && a->num_threads > 1 && a->num_rows < 2 * a->num_threads,
    };
    if (!batch.first_task) return 1;
    batch.first_task[0] = 0;
    for (int64_t row = 0; row < a->num_rows; row++)
        batch.first_task[row + 1] = batch.first_task[row] + count_tasks(&batch, row);
    int64_t num_tasks = batch.first_task[a->num_rows] * (a->num_kv_heads / batch.num_heads);
    if (batch.in_segments)
        status = run_segments(&batch, num_tasks);
    else
        run_tasks(num_tasks, a->num_threads, attend_task, &batch);
    free(batch.first_task);
    return status;
}
