/* The choice of the keys that tokens attend to, by the scores of an index: see
 * core/runtime/kernels/key_index.py.
 *
 * A key's score is computed from the query and the key's cells alone, and the choice among scores is
 * exact, so that a token's choice depends neither on the chunks of its prompt nor on other rows. Scores
 * are kept as integers of the same order.
 */
#include "latent_tile.h"
#include "pool.h"

#define PART (32 * TILE) /* keys of a task */

typedef struct {
    const Attention *a;
    const Choice *c;
    int64_t first_token, num_parts;
} Choosing;

/* A token's row, and its position there. */
typedef struct {
    int64_t row, position;
} Place;

static Place place_of_token(const Attention *a, int64_t token) {
    int64_t low = 0, high = a->num_rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a->query_starts[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    int64_t end = low + 1 < a->num_rows ? a->query_starts[low + 1] : a->num_tokens;
    return (Place){low, a->context_lengths[low] - (end - token)};
}

INLINE uint32_t *ranks_of(const Choosing *g, int64_t token) {
    return g->c->ranks + (token - g->first_token) * g->c->rank_stride;
}

/* ---- scores ------------------------------------------------------------------------------------ */

static void open_queries(const Attention *a, Block *b, int64_t token, int first, int num) {
    int dtype = b->is_bf16 ? BFLOAT16 : FLOAT32;
    memset(b->q, 0, (size_t)(num * b->dim * size_of(dtype)));
    for (int m = 0; m < num; m++) {
        int64_t at = token * a->q_stride + (int64_t)(first + m) * a->head_dim;
        const char *from = (const char *)a->q + at * size_of(a->q_dtype);
        char *to = (char *)b->q + (int64_t)m * b->dim * size_of(dtype);
        convert(from, a->q_dtype, to, dtype, a->head_dim);
    }
}

/* Add what some heads score the keys of a tile. Compiled once, so that it rounds alike everywhere. */
static __attribute__((noinline)) void add_heads(const Block *b, const float *weights, int num,
                                                float scale, float sums[TILE]) {
    vec first = load(sums), last = load(sums + LANES), zeros = splat(0.0f);
    vec first_scale = splat(scale), last_scale = splat(scale);
    if (b->has_scales) {
        first_scale *= load(b->k_scales);
        last_scale *= load(b->k_scales + LANES);
    }
    for (int m = 0; m < num; m++) {
        first += weights[m] * max_vec(load(b->scores + m * TILE) * first_scale, zeros);
        last += weights[m] * max_vec(load(b->scores + m * TILE + LANES) * last_scale, zeros);
    }
    store(sums, first);
    store(sums + LANES, last);
}

/* Integers of the order of numbers; both zeros are one. */
INLINE uvec rank_of(vec x) {
    ivec bits = (ivec)(x + 0.0f);
    return (uvec)bits ^ ((uvec)(bits >> 31) | 0x80000000u);
}

static void rank_tile(const float sums[TILE], uint32_t *ranks, int num) {
    uvec halves[2] = {rank_of(load(sums)), rank_of(load(sums + LANES))};
    memcpy(ranks, halves, sizeof(uint32_t) * (size_t)num);
}

/* Some keys of a token, which has more than it chooses. */
static void score_part(void *context, int64_t index, int worker) {
    const Choosing *g = context;
    const Attention *a = g->a;
    int64_t token = g->first_token + index / g->num_parts, first = index % g->num_parts * PART;
    Place place = place_of_token(a, token);
    (void)worker;
    if (place.position < g->c->num_chosen || first > place.position) return;
    int64_t end = first + PART <= place.position ? first + PART : place.position + 1;
    _Alignas(64) float sums[PART] = {0};
    Block b;
    b.is_bf16 = a->kv_dtype != FLOAT32;
    b.has_scales = a->k_scales != NULL;
    b.dim = padded(a->head_dim);
    b.value_dim = 0;
    for (int head = 0; head < a->num_heads; head += MAX_QUERIES) {
        int num = a->num_heads - head < MAX_QUERIES ? a->num_heads - head : MAX_QUERIES;
        const float *weights = g->c->weights + token * a->num_heads + head;
        open_queries(a, &b, token, head, num);
        for (int64_t key = first; key < end; key += TILE) {
            Tile tile;
            find_tile(a, place.row, key, end, &tile);
            if (b.has_scales) open_scales(a, &b, &tile, 0);
            open_latents(a, &b, &tile);
            (b.is_bf16 ? score_pairs : score_floats)(&b, 0, num);
            add_heads(&b, weights, num, a->scale, sums + key - first);
        }
    }
#if HAS_TILES
    TILE_RELEASE();
#endif
    for (int64_t key = first; key < end; key += TILE)
        rank_tile(sums + key - first, ranks_of(g, token) + key, (int)(end - key < TILE ? end - key : TILE));
}

/* ---- the choice -------------------------------------------------------------------------------- */

/* The lowest chosen rank, and the number of keys of that rank that are chosen. */
typedef struct {
    uint32_t rank;
    int64_t num_equal;
} Limit;

/* Digit by digit, from the highest: of the ranks that begin with the digits found so far, `num_chosen`
 * are chosen. */
static Limit limit_of(const uint32_t *ranks, int64_t num, int64_t num_chosen) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < num; i++)
            if ((ranks[i] & mask) == found) counts[ranks[i] >> shift & 255]++;
        int digit = 255;
        while (counts[digit] < num_chosen) num_chosen -= counts[digit--];
        found |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    return (Limit){found, num_chosen};
}

/* List a token's keys in the order of positions; of equal ranks the first ones are chosen. */
static void list_keys(void *context, int64_t index, int worker) {
    const Choosing *g = context;
    const Attention *a = g->a;
    int64_t token = g->first_token + index, num_chosen = g->c->num_chosen, count = 0;
    Place place = place_of_token(a, token);
    const int64_t *pages = a->page_table + place.row * a->table_stride;
    const uint32_t *ranks = ranks_of(g, token);
    int64_t *slots = g->c->slots + token * num_chosen, mask = ((int64_t)1 << a->page_shift) - 1;
    int has_limit = place.position >= num_chosen;
    Limit limit = has_limit ? limit_of(ranks, place.position + 1, num_chosen) : (Limit){0};
    (void)worker;
    for (int64_t key = 0; key <= place.position; key++) {
        if (has_limit && ranks[key] < limit.rank) continue;
        if (has_limit && ranks[key] == limit.rank && limit.num_equal-- <= 0) continue;
        slots[count++] = (pages[key >> a->page_shift] << a->page_shift) + (key & mask);
    }
    g->c->lengths[token] = count;
}

void choose_keys(const Attention *a, const Choice *c) {
    int64_t num_parts = (c->rank_stride + PART - 1) / PART;
    for (int64_t first = 0; first < a->num_tokens; first += c->num_ranked) {
        int64_t left = a->num_tokens - first, num = left < c->num_ranked ? left : c->num_ranked;
        Choosing g = {a, c, first, num_parts};
        run_tasks(num * num_parts, a->num_threads, score_part, &g);
        run_tasks(num, a->num_threads, list_keys, &g);
    }
}

Attention over_chosen(Attention a, const Choice *c) {
    a.page_table = c->slots;
    a.table_stride = c->num_chosen;
    a.context_lengths = c->lengths;
    a.query_starts = c->starts;
    a.num_rows = a.num_tokens;
    a.blocks = NULL;
    a.page_shift = 0;
    return a;
}
