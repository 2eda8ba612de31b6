/* Layers of a decoder in one call: the order of its products, with the glue between them. */
#include "altup.h"
#include "pool.h"

#define TOKENS 8 /* of a task of the glue */

/* ---- single tokens ----------------------------------------------------------------------------- */

void norm_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    void *y = token_of(s, g->scratch->normed, token, s->hidden);
    norm_row(s, x, *g->norm, y, s->hidden, s->eps, s->norm_kind);
}

/* A single token's keys go to one place for each word, none of them in a cache. */
static void prefetch_token(const Glue *g, int64_t token) {
    const Attention *a = g->attention;
    if (a->num_tokens == a->num_rows && !(g->layer->flags & READS_CELLS))
        prefetch_slot(a, a->k_pages, write_slots_of(g)[token]);
}

static void open_token(const Glue *g, int64_t token) {
    prefetch_token(g, token);
    norm_token(g, token);
}

static void finish_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    norm_row(s, x, *g->norm, x, s->hidden, s->eps, s->norm_kind);
}

static void add_normed_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    const void *y = token_of(s, g->scratch->normed, token, s->hidden);
    add_norm_row(s, y, *g->norm, x, s->hidden, s->eps, g->scale, s->norm_kind);
}

/* Add the projection of a token to its rows of the table of layer inputs. */
static void mix_inputs_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    for (int64_t layer = 0; layer < s->num_inputs; layer++) {
        int64_t row = token * s->num_inputs + layer;
        const void *y = token_of(s, g->scratch->qkv, row, s->input_size);
        void *x = token_of(s, s->layer_inputs, row, s->input_size);
        add_norm_row(s, y, *g->norm, x, s->input_size, s->inputs_eps, 0.7071067811865476f, RMS_NORM);
    }
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

void for_tokens(const Glue *g, const Norm *norm, PerToken run) {
    Glue glue = *g;
    TokenTask t = {&glue, run};
    const Attention *a = &g->step->attention;
    glue.norm = norm;
    run_tasks((a->num_tokens + TOKENS - 1) / TOKENS, a->num_threads, run_tokens, &t);
}

Linear product_of(const Step *s, const void *x, int64_t num_inputs, Projection by, void *y,
                  int64_t num_outputs) {
    const Attention *a = &s->attention;
    return (Linear){.x = x, .bias = by.bias, .weights = by.weights, .y = y, .quantized = s->quantized,
                    .num_rows = a->num_tokens, .num_inputs = num_inputs, .num_outputs = num_outputs,
                    .num_weights = (int32_t)by.num_weights, .dtype = a->q_dtype,
                    .y_dtype = a->q_dtype, .num_threads = a->num_threads};
}

void multiply(const Step *s, const Linear *l, Projection by) {
    linear(l);
    if (s->adapted_rows && by.adapters) add_low_rank(l, by.adapters, s->adapted_rows);
}

void project(const Step *s, const void *x, int64_t num_inputs, Projection by, const void *residual,
             void *y, int64_t num_outputs) {
    Linear l = product_of(s, x, num_inputs, by, y, num_outputs);
    l.residual = residual;
    multiply(s, &l, by);
}

void project_back(const Glue *g, const void *x, int64_t num_inputs, Projection by,
                  const Norm *post_norm, float scale) {
    const Step *s = g->step;
    if (!post_norm->weight) {
        project(s, x, num_inputs, by, s->x, s->x, s->hidden);
        return;
    }
    Glue scaled = *g;
    scaled.scale = scale;
    project(s, x, num_inputs, by, NULL, g->scratch->normed, s->hidden);
    for_tokens(&scaled, post_norm, add_normed_token);
}

const void *open_half(const Glue *g, const Norm *norm, PerToken run) {
    if (!norm->weight) return g->step->x;
    for_tokens(g, norm, run);
    return g->scratch->normed;
}

static Attention attention_of(const Glue *g) {
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    Attention a = g->step->attention;
    int64_t num_kv = layer->flags & READS_CELLS ? 0 : layer->num_kv_heads;
    a.q = t->qkv;
    a.k_pages = layer->k_pages;
    a.v_pages = layer->v_pages;
    a.k_scales = layer->k_scales;
    a.v_scales = layer->v_scales;
    a.out = t->mixed;
    a.sinks = layer->sinks;
    a.num_heads = layer->num_heads;
    a.num_kv_heads = layer->num_kv_heads;
    a.head_dim = layer->head_dim;
    a.q_stride = (layer->num_heads + 2 * num_kv) * layer->head_dim;
    if (layer->flags & GATED_OUTPUT) a.q_stride += layer->num_heads * layer->head_dim;
    if (layer->flags & WINDOW_PAGES) a.page_table = g->step->window_table;
    a.window = layer->window;
    a.scale = layer->scale;
    a.soft_cap = layer->soft_cap;
    a.out_scale = g->step->residual_scale * layer->attention_scale;
    return a;
}

static int attend_layer(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    Attention a = attention_of(g);
    if (layer->latents) return attend_latents(g, a);
    Glue heads = *g;
    heads.attention = &a;
    const void *x = layer->recurrent ? t->normed : open_half(&heads, &layer->input_norm, open_token);
    if (layer->altup) add_laurel(g);
    project(s, x, s->hidden, layer->qkv, NULL, t->qkv, a.q_stride);
    for_tokens(&heads, NULL, prepare_heads);
    if (paged_attention(&a)) return 1;
    if (layer->flags & GATED_OUTPUT) for_tokens(&heads, NULL, gate_output_token);
    project_back(g, t->mixed, (int64_t)a.num_heads * a.head_dim, layer->out,
                 &layer->attention_post_norm, layer->altup ? LAUREL_SCALE : 1.0f);
    return 0;
}

/* Some inputs of a recurrent part, from values in the same rows. */
static void make_inputs_of(const Glue *g, int64_t from, int64_t num_inputs, Projection by, int64_t to,
                           int64_t num_outputs) {
    const Step *s = g->step;
    char *in = g->scratch->qkv;
    Linear l = product_of(s, token_of(s, in, 1, from), num_inputs, by, token_of(s, in, 1, to), num_outputs);
    l.x_stride = l.y_stride = g->layer->recurrent->in_width;
    multiply(s, &l, by);
}

/* The inputs of a recurrent part. */
static void open_recurrent(const Glue *g) {
    const Layer *layer = g->layer;
    const Recurrent *r = layer->recurrent;
    const void *x = open_half(g, &layer->input_norm, norm_token);
    int64_t low = r->delta.low_rank, num_decays = r->delta.num_value_heads * r->delta.num_decays;
    int64_t z_place = r->in_width - r->out_width, a_place = z_place - num_decays;
    Linear l = product_of(g->step, x, g->step->hidden, layer->recurrent_in, g->scratch->qkv,
                          low ? a_place : r->in_width);
    l.y_stride = r->in_width;
    multiply(g->step, &l, layer->recurrent_in);
    if (!low) return;
    make_inputs_of(g, a_place - 2 * low, low, layer->decays, a_place, num_decays);
    make_inputs_of(g, a_place - low, low, layer->gates, z_place, r->out_width);
}

/* A recurrent part in the place of attention, or before it. */
static void go_on_layer(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    const Recurrent *r = layer->recurrent;
    open_recurrent(g);
    recur(r, s->state_rows, t->qkv, t->mixed);
    if (s->residual_scale != 1.0f) for_tokens(g, NULL, scale_mixed_token);
    project_back(g, t->mixed, r->out_width, layer->recurrent_out, &layer->attention_post_norm, 1.0f);
}

/* A mixture of experts in the place of an MLP. */
static void mix_layer(const Glue *g, const void *x, float scale) {
    const Step *s = g->step;
    const Norm *post_norm = &g->layer->mlp_post_norm;
    int has_norm = post_norm->weight != NULL;
    Glue scaled = *g;
    scaled.scale = scale;
    Mix m = {.mixture = g->layer->mixture, .x = x, .residual = has_norm ? NULL : s->x,
             .y = has_norm ? g->scratch->normed : s->x, .scratch = s->mixture_scratch,
             .num_tokens = s->attention.num_tokens, .hidden = s->hidden, .shared_gate = s->gate,
             .dtype = dtype_of(s), .num_threads = s->attention.num_threads,
             .out_scale = s->residual_scale};
    mix(&m);
    if (has_norm) for_tokens(&scaled, post_norm, add_normed_token);
}

static void transform_layer(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Scratch *t = g->scratch;
    int64_t size = layer->intermediate;
    float scale = layer->input_gate.weights ? 1.0f : layer->scale_of_result;
    if (!layer->mixture && !layer->gate_up.weights) return;
    const void *x = s->is_parallel ? t->normed : open_half(g, &layer->mlp_norm, norm_token);
    if (layer->mixture) {
        mix_layer(g, x, scale);
        return;
    }
    project(s, x, s->hidden, layer->gate_up, NULL, t->gate_up, (1 + s->has_gate) * size);
    for_tokens(g, NULL, gate_token);
    project_back(g, t->gated, size, layer->down, &layer->mlp_post_norm, scale);
}

/* Add the layer's own input. */
static void take_input(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    void *gated = g->scratch->gated;
    const void *x = layer->altup ? correct_streams(g) : s->x;
    project(s, x, s->hidden, layer->input_gate, NULL, gated, s->input_size);
    for_tokens(g, NULL, gate_input_token);
    if (layer->altup) {
        add_input_to_streams(g);
        return;
    }
    project_back(g, gated, s->input_size, layer->input_projection, &layer->input_post_norm,
                 layer->scale_of_result);
}

/* The inputs of all layers. */
static void make_inputs(const Glue *g) {
    const Step *s = g->step;
    int64_t width = s->num_inputs * s->input_size;
    project(s, s->x, s->hidden, s->input_projection, NULL, g->scratch->qkv, width);
    for_tokens(g, &s->inputs_norm, mix_inputs_token);
}

int decoder_step(const Step *s) {
    int64_t num_tokens = s->attention.num_tokens;
    Scratch t = {.normed = s->scratch};
    t.qkv = token_of(s, t.normed, num_tokens, s->hidden);
    t.mixed = token_of(s, t.qkv, num_tokens, s->qkv_width);
    t.gate_up = token_of(s, t.mixed, num_tokens, s->mixed_width);
    t.gated = token_of(s, t.gate_up, num_tokens, s->gate_up_width);
    Glue g = {.step = s, .scratch = &t};
    if (s->input_projection.weights) make_inputs(&g);
    if (s->spread.weights) open_streams(&g);
    for (int64_t index = 0; index < s->num_layers; index++) {
        g.layer = &s->layers[index];
        int attends = g.layer->qkv.weights || g.layer->latents;
        if (g.layer->altup) predict_streams(&g);
        if (g.layer->recurrent) go_on_layer(&g);
        if (attends && attend_layer(&g)) return 1;
        transform_layer(&g);
        if (g.layer->input_gate.weights) take_input(&g);
    }
    if (s->final_norm.weight && s->streams) close_streams(&g);
    if (s->final_norm.weight) for_tokens(&g, &s->final_norm, finish_token);
    return 0;
}
