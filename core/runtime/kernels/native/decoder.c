/* Layers of a decoder in one call: the glue between its products, in float32 or bfloat16. */
#include "gate.h"
#include "pages.h"
#include "pool.h"

#define TOKENS 8 /* of a task of the glue */

typedef struct {
    void *normed, *qkv, *mixed, *gate_up, *gated;
} Scratch;

/* The arguments of a task of the glue. */
typedef struct {
    const Step *step;
    const Layer *layer;
    const Scratch *scratch;
    const Attention *attention; /* the layer's */
    const void *weight;
} Glue;

typedef void (*PerToken)(const Glue *g, int64_t token);

INLINE int dtype_of(const Step *s) { return s->attention.q_dtype; }

INLINE void *token_of(const Step *s, const void *values, int64_t token, int64_t width) {
    return (char *)values + token * width * size_of(dtype_of(s));
}

/* ---- norms, rotation, gate: one token each ---------------------------------------------------- */

/* y = x / rms(x) * weight (+ y) over `size` values; see core/runtime/kernels/rms_norm.py. */
INLINE void norm(const void *x, const void *weight, void *y, int64_t size, float eps,
                 const int dtype, const int weight_dtype, const int adds) {
    vec squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load_as(x, i, dtype) * load_as(x, i, dtype);
    float sum = sum_lanes(squares);
    for (int64_t j = i; j < size; j++) sum += read_as(x, j, dtype) * read_as(x, j, dtype);
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) {
        vec normed = load_as(x, i, dtype) * scale * load_as(weight, i, weight_dtype);
        store_as(y, i, adds ? load_as(y, i, dtype) + normed : normed, dtype);
    }
    for (; i < size; i++) {
        float normed = read_as(x, i, dtype) * scale * read_as(weight, i, weight_dtype);
        write_as(y, i, adds ? read_as(y, i, dtype) + normed : normed, dtype);
    }
}

static void rms_norm(const Step *s, const void *x, const void *weight, void *y, int64_t size,
                     float eps) {
    if (dtype_of(s) == FLOAT32)
        norm(x, weight, y, size, eps, FLOAT32, FLOAT32, 0);
    else if (s->norm_dtype == FLOAT32)
        norm(x, weight, y, size, eps, BFLOAT16, FLOAT32, 0);
    else
        norm(x, weight, y, size, eps, BFLOAT16, BFLOAT16, 0);
}

static void norm_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    rms_norm(s, x, g->weight, token_of(s, g->scratch->normed, token, s->hidden), s->hidden, s->eps);
}

/* A single token's keys go to one place for each word, none of them in a cache. */
static void open_token(const Glue *g, int64_t token) {
    const Attention *a = &g->step->attention;
    if (a->num_tokens == a->num_rows)
        prefetch_slot(a, g->layer->k_pages, g->step->write_slots[token]);
    norm_token(g, token);
}

static void finish_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    rms_norm(s, x, g->weight, x, s->hidden, s->eps);
}

static void add_normed_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    norm(token_of(s, g->scratch->normed, token, s->hidden), g->weight, x, s->hidden, s->eps,
         dtype_of(s), s->norm_dtype, 1);
}

/* Rotate one head in place; see core/runtime/kernels/rotary.py. */
INLINE void rotate(void *x, const void *cos, const void *sin, int64_t num_rotated, const int dtype) {
    int64_t half = num_rotated / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec low = load_as(x, i, dtype), high = load_as(x, half + i, dtype);
        store_as(x, i, low * load_as(cos, i, dtype) + high * load_as(sin, i, dtype), dtype);
        store_as(x, half + i,
                 high * load_as(cos, half + i, dtype) + low * load_as(sin, half + i, dtype), dtype);
    }
    for (; i < half; i++) {
        float low = read_as(x, i, dtype), high = read_as(x, half + i, dtype);
        float first = low * read_as(cos, i, dtype) + high * read_as(sin, i, dtype);
        float second = high * read_as(cos, half + i, dtype) + low * read_as(sin, half + i, dtype);
        write_as(x, i, first, dtype);
        write_as(x, half + i, second, dtype);
    }
}

static void prepare_heads(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Attention *a = g->attention;
    int64_t size = a->head_dim, num_heads = a->num_heads, num_kv = a->num_kv_heads;
    int64_t bytes = size * size_of(a->q_dtype), table = layer->rotation;
    char *qkv = token_of(s, g->scratch->qkv, token, (num_heads + 2 * num_kv) * size);
    for (int64_t head = 0; head < num_heads + num_kv; head++) {
        char *x = qkv + head * bytes;
        if (layer->qk_norm) {
            int64_t from = head < num_heads ? 0 : size * size_of(s->norm_dtype);
            rms_norm(s, x, (const char *)layer->qk_norm + from, x, size, s->qk_eps);
        }
        if (table < 0) continue;
        const void *cos = token_of(s, s->cos[table], token, s->num_rotated[table]);
        const void *sin = token_of(s, s->sin[table], token, s->num_rotated[table]);
        if (a->q_dtype == FLOAT32)
            rotate(x, cos, sin, s->num_rotated[table], FLOAT32);
        else
            rotate(x, cos, sin, s->num_rotated[table], BFLOAT16);
    }
    for (int64_t head = 0; head < num_kv; head++) {
        const char *k = qkv + (num_heads + head) * bytes;
        store_head(a, s->write_slots[token], head, k, k + num_kv * bytes);
    }
}

static void gate_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const void *gate_up = token_of(s, g->scratch->gate_up, token, 2 * s->intermediate);
    void *y = token_of(s, g->scratch->gated, token, s->intermediate);
    gate_row(gate_up, y, s->intermediate, &s->gate, dtype_of(s));
}

/* ---- the step --------------------------------------------------------------------------------- */

typedef struct {
    const Glue *glue;
    PerToken run;
} TokenTask;

static void run_tokens(void *context, int64_t index, int worker) {
    const TokenTask *t = context;
    int64_t num_tokens = t->glue->step->attention.num_tokens, end = (index + 1) * TOKENS;
    (void)worker;
    for (int64_t token = index * TOKENS; token < end && token < num_tokens; token++)
        t->run(t->glue, token);
}

static void for_tokens(const Glue *g, const void *weight, PerToken run) {
    Glue glue = *g;
    TokenTask t = {&glue, run};
    const Attention *a = &g->step->attention;
    glue.weight = weight;
    run_tasks((a->num_tokens + TOKENS - 1) / TOKENS, a->num_threads, run_tokens, &t);
}

static void project(const Step *s, const void *x, int64_t num_inputs, Projection by,
                    const void *residual, void *y, int64_t num_outputs) {
    const Attention *a = &s->attention;
    Linear l = {.x = x, .bias = by.bias, .residual = residual, .weights = by.weights, .y = y,
                .quantized = s->quantized, .num_rows = a->num_tokens, .num_inputs = num_inputs,
                .num_outputs = num_outputs, .num_weights = (int32_t)by.num_weights,
                .dtype = a->q_dtype, .y_dtype = a->q_dtype, .num_threads = a->num_threads};
    linear(&l);
}

/* Add half of a layer to the residual stream: directly, or after its own norm. */
static void project_back(const Glue *g, const void *x, int64_t num_inputs, Projection by,
                         const void *post_norm) {
    const Step *s = g->step;
    if (!post_norm) {
        project(s, x, num_inputs, by, s->x, s->x, s->hidden);
        return;
    }
    project(s, x, num_inputs, by, NULL, g->scratch->normed, s->hidden);
    for_tokens(g, post_norm, add_normed_token);
}

static int attend_layer(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    Attention a = s->attention;
    int64_t width = ((int64_t)a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    Glue heads = *g;
    a.q = t->qkv;
    a.k_pages = layer->k_pages;
    a.v_pages = layer->v_pages;
    a.k_scales = layer->k_scales;
    a.v_scales = layer->v_scales;
    a.out = t->mixed;
    a.q_stride = width;
    a.window = layer->window;
    heads.attention = &a;
    for_tokens(g, layer->input_norm, open_token);
    project(s, t->normed, s->hidden, layer->qkv, NULL, t->qkv, width);
    for_tokens(&heads, NULL, prepare_heads);
    if (paged_attention(&a)) return 1;
    project_back(g, t->mixed, (int64_t)a.num_heads * a.head_dim, layer->out,
                 layer->attention_post_norm);
    return 0;
}

/* A mixture of experts in the place of an MLP; `x` is normed. */
static void mix_layer(const Glue *g, const void *x) {
    const Step *s = g->step;
    const void *post_norm = g->layer->mlp_post_norm;
    Mix m = {.mixture = g->layer->mixture, .x = x, .residual = post_norm ? NULL : s->x,
             .y = post_norm ? g->scratch->normed : s->x, .scratch = s->mixture_scratch,
             .num_tokens = s->attention.num_tokens, .hidden = s->hidden, .shared_gate = s->gate,
             .dtype = dtype_of(s), .num_threads = s->attention.num_threads};
    mix(&m);
    if (post_norm) for_tokens(g, post_norm, add_normed_token);
}

static void transform_layer(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    for_tokens(g, layer->mlp_norm, norm_token);
    if (layer->mixture) {
        mix_layer(g, t->normed);
        return;
    }
    project(s, t->normed, s->hidden, layer->gate_up, NULL, t->gate_up, 2 * s->intermediate);
    for_tokens(g, NULL, gate_token);
    project_back(g, t->gated, s->intermediate, layer->down, layer->mlp_post_norm);
}

int decoder_step(const Step *s) {
    const Attention *a = &s->attention;
    int64_t num_tokens = a->num_tokens;
    Scratch t = {.normed = s->scratch};
    t.qkv = token_of(s, t.normed, num_tokens, s->hidden);
    t.mixed = token_of(s, t.qkv, num_tokens, (a->num_heads + 2 * a->num_kv_heads) * a->head_dim);
    t.gate_up = token_of(s, t.mixed, num_tokens, (int64_t)a->num_heads * a->head_dim);
    t.gated = token_of(s, t.gate_up, num_tokens, 2 * s->intermediate);
    Glue g = {.step = s, .scratch = &t};
    for (int64_t index = 0; index < s->num_layers; index++) {
        g.layer = &s->layers[index];
        if (attend_layer(&g)) return 1;
        transform_layer(&g);
    }
    if (s->final_norm) for_tokens(&g, s->final_norm, finish_token);
    return 0;
}
