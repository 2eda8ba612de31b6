/* Latent attention of a layer: see core/runtime/layers/latent_attention.py. Queries are brought into the
 * space of the cache's rows, and results out of it, by a matrix for each head. */
#include "glue.h"

/* The parts of the scratch memory, for every token: after each other where others have qkv, and where
 * they have the attended values. */
typedef struct {
    char *down, *queries, *absorbed, *attended, *values;
    int64_t down_width, query_stride;
} Parts;

static Parts parts_of(const Glue *g) {
    const Step *s = g->step;
    const Latents *l = g->layer->latents;
    int64_t num_tokens = s->attention.num_tokens, num_heads = g->layer->num_heads;
    int64_t query_width = num_heads * (l->nope_dim + l->rope_dim);
    Parts p = {.down = g->scratch->qkv, .attended = g->scratch->mixed};
    p.down_width = l->query_inputs + l->kv_rank + l->rope_dim;
    p.queries = l->q_up.weights ? token_of(s, p.down, num_tokens, p.down_width) : p.down;
    p.query_stride = l->q_up.weights ? query_width : p.down_width;
    p.absorbed = token_of(s, p.queries, num_tokens, p.query_stride);
    p.values = token_of(s, p.attended, num_tokens, num_heads * l->kv_rank);
    return p;
}

/* Normalize a token's query inputs; make its row and store it. */
static void store_row(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const Latents *l = g->layer->latents;
    Parts p = parts_of(g);
    char *x = token_of(s, p.down, token, p.down_width), *row = token_of(s, x, 1, l->query_inputs);
    if (l->q_up.weights) norm_row(s, x, l->q_norm, x, l->query_inputs, l->eps, RMS_NORM);
    norm_row(s, row, l->kv_norm, row, l->kv_rank, l->eps, RMS_NORM);
    rotate_head(g, token, token_of(s, row, 1, l->kv_rank));
    store_head(g->attention, s->write_slots[token], 0, row, NULL);
}

/* Rotate a token's queries, into their places after the absorbed values; scale both parts. */
static void rotate_queries(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const Latents *l = g->layer->latents;
    int64_t num_heads = g->layer->num_heads, row_dim = l->kv_rank + l->rope_dim;
    Parts p = parts_of(g);
    char *from = token_of(s, p.queries, token, p.query_stride);
    char *to = token_of(s, p.absorbed, token, num_heads * row_dim);
    size_t num_bytes = (size_t)(l->rope_dim * size_of(dtype_of(s)));
    for (int64_t head = 0; head < num_heads; head++) {
        char *rotated = token_of(s, to, 1, head * row_dim + l->kv_rank);
        char *plain = token_of(s, from, 1, head * (l->nope_dim + l->rope_dim));
        memcpy(rotated, token_of(s, plain, 1, l->nope_dim), num_bytes);
        rotate_head(g, token, rotated);
        if (!(g->layer->flags & SCALED_QUERIES)) continue;
        scale_values(s, rotated, l->rope_dim, s->query_scales[token]);
        scale_values(s, plain, l->nope_dim, s->query_scales[token]);
    }
}

/* Some values of each head, `x_step` apart in a token's row of x, times the head's matrix. */
static void multiply_heads(const Glue *g, Linear first, int64_t x_step, int64_t y_step) {
    int64_t num_heads = g->layer->num_heads;
    Linear heads[num_heads];
    for (int64_t head = 0; head < num_heads; head++) {
        heads[head] = first;
        heads[head].weights = first.weights + head;
        heads[head].x = token_of(g->step, first.x, 1, head * x_step);
        heads[head].y = token_of(g->step, first.y, 1, head * y_step);
        heads[head].num_weights = 1;
    }
    linears(heads, num_heads);
}

static void absorb(const Glue *g, const Parts *p) {
    const Latents *l = g->layer->latents;
    int64_t row_dim = l->kv_rank + l->rope_dim;
    Linear first = product_of(g->step, p->queries, l->nope_dim, l->absorb, p->absorbed, l->kv_rank);
    first.x_stride = p->query_stride;
    first.y_stride = g->layer->num_heads * row_dim;
    multiply_heads(g, first, l->nope_dim + l->rope_dim, row_dim);
}

static void expand(const Glue *g, const Parts *p) {
    const Latents *l = g->layer->latents;
    Linear first = product_of(g->step, p->attended, l->kv_rank, l->expand, p->values, l->value_dim);
    first.x_stride = g->layer->num_heads * l->kv_rank;
    first.y_stride = g->layer->num_heads * l->value_dim;
    multiply_heads(g, first, l->kv_rank, l->value_dim);
}

/* ---- the index --------------------------------------------------------------------------------- */

static void store_index_key(const Glue *g, int64_t token) {
    const KeyIndex *i = g->layer->latents->index;
    void *key = token_of(g->step, g->scratch->mixed, token, i->head_dim);
    norm_row(g->step, key, i->key_norm, key, i->head_dim, i->eps, LAYER_NORM);
    rotate_pairs(g, token, key, i->has_adjacent_pairs);
    store_head(g->attention, g->step->write_slots[token], 0, key, NULL);
}

static void rotate_index_queries(const Glue *g, int64_t token) {
    const KeyIndex *i = g->layer->latents->index;
    char *queries = token_of(g->step, g->attention->q, token, (int64_t)i->num_heads * i->head_dim);
    for (int head = 0; head < i->num_heads; head++)
        rotate_pairs(g, token, token_of(g->step, queries, head, i->head_dim), i->has_adjacent_pairs);
}

/* Store the keys of the index, and choose those of the cache where the step has too many. Its keys and
 * queries lie where attended values will lie. */
static void run_index(const Glue *g, const void *x, const Parts *p) {
    const Step *s = g->step;
    const Latents *l = g->layer->latents;
    const KeyIndex *i = l->index;
    int64_t width = (int64_t)i->num_heads * i->head_dim;
    char *keys = g->scratch->mixed, *queries = token_of(s, keys, s->attention.num_tokens, i->head_dim);
    Attention a = s->attention;
    Glue heads = *g;
    a.q = queries;
    a.q_stride = width;
    a.k_pages = i->k_pages;
    a.k_scales = a.v_scales = i->k_scales;
    a.num_heads = i->num_heads;
    a.head_dim = i->head_dim;
    a.scale = i->scale;
    heads.attention = &a;
    project(s, x, s->hidden, i->key, NULL, keys, i->head_dim);
    for_tokens(&heads, NULL, store_index_key);
    if (!s->choice) return;
    Linear up = product_of(s, p->down, l->query_inputs, i->queries, queries, width);
    up.x_stride = p->down_width;
    multiply(s, &up, i->queries);
    for_tokens(&heads, NULL, rotate_index_queries);
    Linear weights = product_of(s, x, s->hidden, i->weights, s->choice->weights, i->num_heads);
    weights.y_dtype = FLOAT32;
    multiply(s, &weights, i->weights);
    choose_keys(&a, s->choice);
}

int attend_latents(const Glue *g, Attention a) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Latents *l = layer->latents;
    Parts p = parts_of(g);
    Glue rows = *g;
    a.value_dim = (int32_t)l->kv_rank;
    a.q = p.absorbed;
    a.q_stride = layer->num_heads * (l->kv_rank + l->rope_dim);
    a.out = p.attended;
    rows.attention = &a;
    const void *x = open_half(g, &layer->input_norm, norm_token);
    Linear down = product_of(s, x, s->hidden, l->down, p.down, p.down_width);
    multiply(s, &down, l->down);
    for_tokens(&rows, NULL, store_row);
    if (l->index) run_index(g, x, &p);
    if (l->q_up.weights) {
        Linear up = product_of(s, p.down, l->query_inputs, l->q_up, p.queries, p.query_stride);
        up.x_stride = p.down_width;
        multiply(s, &up, l->q_up);
    }
    for_tokens(&rows, NULL, rotate_queries);
    absorb(g, &p);
    if (s->choice) a = over_chosen(a, s->choice);
    if (paged_attention(&a)) return 1;
    expand(g, &p);
    project_back(g, p.values, layer->num_heads * l->value_dim, layer->out,
                 &layer->attention_post_norm, 1.0f);
    return 0;
}
