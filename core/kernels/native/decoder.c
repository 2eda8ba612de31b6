/* All layers of a decoder in one call, in bfloat16: the glue between its products. */
#include "kernels.h"

#define SMALL 4 /* rows from which a loop is worth a second thread */

/* ---- norms, rotation, gate: one token each ---------------------------------------------------- */

/* y = x / rms(x) * weight over `size` values; see core/kernels/rms_norm.py. */
static void rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, int64_t size, float eps) {
    vec squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load_bf16(x + i) * load_bf16(x + i);
    float sum = sum_lanes(squares);
    for (int64_t j = i; j < size; j++) sum += read_as(x, j, BFLOAT16) * read_as(x, j, BFLOAT16);
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store_bf16(y + i, load_bf16(x + i) * scale * load_bf16(weight + i));
    for (; i < size; i++)
        write_as(y, i, read_as(x, i, BFLOAT16) * scale * read_as(weight, i, BFLOAT16), BFLOAT16);
}

/* Rotate one head in place; see core/kernels/rotary.py. */
static void rotate(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t num_rotated) {
    int64_t half = num_rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = read_as(x, i, BFLOAT16), high = read_as(x, half + i, BFLOAT16);
        float first = low * read_as(cos, i, BFLOAT16) + high * read_as(sin, i, BFLOAT16);
        float second =
            high * read_as(cos, half + i, BFLOAT16) + low * read_as(sin, half + i, BFLOAT16);
        write_as(x, i, first, BFLOAT16);
        write_as(x, half + i, second, BFLOAT16);
    }
}

static void store_head(void *pages, int64_t at, const bf16 *x, int64_t size, int dtype) {
    if (dtype == BFLOAT16)
        memcpy((bf16 *)pages + at, x, sizeof(bf16) * (size_t)size);
    else
        for (int64_t i = 0; i < size; i++) ((float *)pages)[at + i] = read_as(x, i, BFLOAT16);
}

static void prepare_heads(const Step *s, const Layer *layer, bf16 *qkv, int64_t token) {
    const Attention *a = &s->attention;
    int64_t size = a->head_dim, num_heads = a->num_heads, num_kv = a->num_kv_heads;
    for (int64_t head = 0; head < num_heads + num_kv; head++) {
        bf16 *x = qkv + head * size;
        if (layer->qk_norm)
            rms_norm(x, layer->qk_norm + (head < num_heads ? 0 : size), x, size, s->qk_eps);
        if (layer->uses_rope)
            rotate(x, s->cos + token * s->num_rotated, s->sin + token * s->num_rotated,
                   s->num_rotated);
    }
    for (int64_t head = 0; head < num_kv; head++) {
        int64_t at = (s->write_slots[token] * num_kv + head) * size;
        store_head(layer->k_pages, at, qkv + (num_heads + head) * size, size, a->kv_dtype);
        store_head(layer->v_pages, at, qkv + (num_heads + num_kv + head) * size, size, a->kv_dtype);
    }
}

/* silu(gate) * up; see core/kernels/silu_and_mul.py. */
static void gate(const bf16 *gate_up, bf16 *y, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec x = load_bf16(gate_up + i);
        store_bf16(y + i, x / (1.0f + exp_vec(-x)) * load_bf16(gate_up + size + i));
    }
    for (; i < size; i++) {
        float x = read_as(gate_up, i, BFLOAT16);
        float up = read_as(gate_up, size + i, BFLOAT16);
        write_as(y, i, x / (1.0f + exp_vec(splat(-x))[0]) * up, BFLOAT16);
    }
}

/* ---- the step --------------------------------------------------------------------------------- */

typedef struct {
    bf16 *normed, *qkv, *mixed, *gate_up, *gated;
} Scratch;

static void norm_tokens(const Step *s, const bf16 *weight, bf16 *y) {
    int64_t num_tokens = s->attention.num_tokens;
#pragma omp parallel for num_threads(s->attention.num_threads) if (num_tokens >= SMALL)
    for (int64_t token = 0; token < num_tokens; token++)
        rms_norm(s->x + token * s->hidden, weight, y + token * s->hidden, s->hidden, s->eps);
}

static void project(const Step *s, const bf16 *x, int64_t num_inputs, const bf16 *weight,
                    const bf16 *bias, const bf16 *residual, bf16 *y, int64_t num_outputs) {
    Linear l = {x, weight, bias, residual, y, s->attention.num_tokens, num_inputs, num_outputs,
                s->attention.num_threads};
    linear(&l);
}

static int attend_layer(const Step *s, const Layer *layer, const Scratch *t) {
    Attention a = s->attention;
    int64_t width = ((int64_t)a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    norm_tokens(s, layer->input_norm, t->normed);
    project(s, t->normed, s->hidden, layer->qkv, layer->qkv_bias, NULL, t->qkv, width);
#pragma omp parallel for num_threads(a.num_threads) if (a.num_tokens >= SMALL)
    for (int64_t token = 0; token < a.num_tokens; token++)
        prepare_heads(s, layer, t->qkv + token * width, token);
    a.q = t->qkv;
    a.k_pages = layer->k_pages;
    a.v_pages = layer->v_pages;
    a.out = t->mixed;
    a.q_stride = width;
    a.window = layer->window;
    if (paged_attention(&a)) return 1;
    int64_t num_mixed = (int64_t)a.num_heads * a.head_dim;
    project(s, t->mixed, num_mixed, layer->out, layer->out_bias, s->x, s->x, s->hidden);
    return 0;
}

static void transform_layer(const Step *s, const Layer *layer, const Scratch *t) {
    int64_t num_tokens = s->attention.num_tokens, size = s->intermediate;
    norm_tokens(s, layer->mlp_norm, t->normed);
    project(s, t->normed, s->hidden, layer->gate_up, layer->gate_up_bias, NULL, t->gate_up,
            2 * size);
#pragma omp parallel for num_threads(s->attention.num_threads) if (num_tokens >= SMALL)
    for (int64_t token = 0; token < num_tokens; token++)
        gate(t->gate_up + token * 2 * size, t->gated + token * size, size);
    project(s, t->gated, size, layer->down, layer->down_bias, s->x, s->x, s->hidden);
}

int decoder_step(const Step *s) {
    const Attention *a = &s->attention;
    int64_t num_tokens = a->num_tokens;
    Scratch t = {.normed = s->scratch};
    t.qkv = t.normed + num_tokens * s->hidden;
    t.mixed = t.qkv + num_tokens * (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
    t.gate_up = t.mixed + num_tokens * a->num_heads * a->head_dim;
    t.gated = t.gate_up + num_tokens * 2 * s->intermediate;
    for (int64_t index = 0; index < s->num_layers; index++) {
        if (attend_layer(s, &s->layers[index], &t)) return 1;
        transform_layer(s, &s->layers[index], &t);
    }
    norm_tokens(s, s->final_norm, s->x);
    return 0;
}
