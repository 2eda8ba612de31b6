/* What is done to single tokens between a step's products: norms, rotation, activations. */
#include "gate.h"
#include "glue.h"

/* ---- norms ------------------------------------------------------------------------------------- */

void norm_row(const Step *s, const void *x, Norm by, void *y, int64_t size, float eps, int kind) {
#define RMS(DTYPE, WEIGHT) norm(x, by, y, size, eps, 1.0f, DTYPE, WEIGHT, RMS_NORM, 0)
#define LAYER(DTYPE, WEIGHT) norm(x, by, y, size, eps, 1.0f, DTYPE, WEIGHT, LAYER_NORM, 0)
    if (kind == RMS_NORM) {
        WITH_TYPES(s, RMS)
    } else {
        WITH_TYPES(s, LAYER)
    }
}

void add_norm_row(const Step *s, const void *x, Norm by, void *y, int64_t size, float eps,
                  float scale, int kind) {
#define ADD_RMS(DTYPE, WEIGHT) norm(x, by, y, size, eps, scale, DTYPE, WEIGHT, RMS_NORM, 1)
#define ADD_LAYER(DTYPE, WEIGHT) norm(x, by, y, size, eps, scale, DTYPE, WEIGHT, LAYER_NORM, 1)
    if (kind == RMS_NORM) {
        WITH_TYPES(s, ADD_RMS)
    } else {
        WITH_TYPES(s, ADD_LAYER)
    }
}

/* ---- heads ------------------------------------------------------------------------------------- */

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

/* The same for pairs that are adjacent. */
INLINE void rotate_adjacent(void *x, const void *cos, const void *sin, int64_t num_rotated,
                            const int dtype) {
    int64_t half = num_rotated / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = load_as(x, 2 * i, dtype), b = load_as(x, 2 * i + LANES, dtype);
        vec low = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                          28, 30);
        vec high = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                           29, 31);
        vec first = low * load_as(cos, i, dtype) + high * load_as(sin, i, dtype);
        vec second = high * load_as(cos, half + i, dtype) + low * load_as(sin, half + i, dtype);
        store_as(x, 2 * i, __builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                                   5, 21, 6, 22, 7, 23), dtype);
        store_as(x, 2 * i + LANES, __builtin_shufflevector(first, second, 8, 24, 9, 25, 10, 26, 11,
                                                           27, 12, 28, 13, 29, 14, 30, 15, 31),
                 dtype);
    }
    for (; i < half; i++) {
        float low = read_as(x, 2 * i, dtype), high = read_as(x, 2 * i + 1, dtype);
        write_as(x, 2 * i, low * read_as(cos, i, dtype) + high * read_as(sin, i, dtype), dtype);
        write_as(x, 2 * i + 1,
                 high * read_as(cos, half + i, dtype) + low * read_as(sin, half + i, dtype), dtype);
    }
}

void rotate_pairs(const Glue *g, int64_t token, void *x, int is_adjacent) {
    const Step *s = g->step;
    int64_t table = g->layer->rotation, num_rotated = s->num_rotated[table];
    const void *cos = token_of(s, s->cos[table], token, num_rotated);
    const void *sin = token_of(s, s->sin[table], token, num_rotated);
    int is_float = dtype_of(s) == FLOAT32;
    if (is_adjacent && is_float)
        rotate_adjacent(x, cos, sin, num_rotated, FLOAT32);
    else if (is_adjacent)
        rotate_adjacent(x, cos, sin, num_rotated, BFLOAT16);
    else if (is_float)
        rotate(x, cos, sin, num_rotated, FLOAT32);
    else
        rotate(x, cos, sin, num_rotated, BFLOAT16);
}

void rotate_head(const Glue *g, int64_t token, void *x) {
    rotate_pairs(g, token, x, g->layer->flags & ADJACENT_PAIRS);
}

/* Each head by its row of weights, or all of them as one row. */
static void norm_heads(const Glue *g, char *x, int64_t first, int64_t num_heads) {
    const Layer *layer = g->layer;
    int64_t size = g->attention->head_dim, is_joint = layer->flags & JOINT_NORM;
    int64_t bytes = size * size_of(dtype_of(g->step)), step = size * size_of(g->step->norm_dtype);
    int kind = layer->flags & LAYER_NORM_OF_HEADS ? LAYER_NORM : RMS_NORM;
    const char *weight = (const char *)layer->head_norms + first * step;
    int64_t num_rows = is_joint ? num_heads > 0 : num_heads, width = is_joint ? num_heads * size : size;
    for (int64_t row = 0; row < num_rows; row++, x += bytes, weight += step)
        norm_row(g->step, x, (Norm){weight, NULL}, x, width, layer->head_eps, kind);
}

void scale_values(const Step *s, void *x, int64_t size, float scale) {
    for (int64_t i = 0; i < size; i++)
        write_as(x, i, read_as(x, i, dtype_of(s)) * scale, dtype_of(s));
}

void prepare_heads(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    const Attention *a = g->attention;
    int64_t size = a->head_dim, num_heads = a->num_heads, bytes = size * size_of(a->q_dtype);
    int64_t num_kv = layer->flags & READS_CELLS ? 0 : a->num_kv_heads;
    char *q = token_of(s, g->scratch->qkv, token, a->q_stride);
    char *k = q + num_heads * bytes, *v = k + num_kv * bytes;
    for (int is_after = 0; is_after < 2; is_after++) {
        if (layer->head_norms && is_after == !!(layer->flags & NORM_AFTER_ROTATION)) {
            norm_heads(g, q, 0, num_heads);
            norm_heads(g, k, num_heads, num_kv);
        }
        for (int64_t head = 0; !is_after && layer->rotation >= 0 && head < num_heads + num_kv; head++)
            rotate_head(g, token, q + head * bytes);
    }
    if (layer->flags & SCALED_QUERIES) scale_values(s, q, num_heads * size, s->query_scales[token]);
    for (int64_t head = 0; head < num_kv; head++, k += bytes, v += bytes) {
        if (layer->value_norm)
            norm_row(s, v, (Norm){layer->value_norm, NULL}, v, size, layer->value_eps, RMS_NORM);
        store_head(a, write_slots_of(g)[token], head, k, v);
    }
}

INLINE void multiply_by_sigmoid(void *x, const void *gate, int64_t size, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_as(x, i, load_as(x, i, dtype) / (1.0f + exp_vec(-load_as(gate, i, dtype))), dtype);
    for (; i < size; i++) {
        vec factor = 1.0f + exp_vec(splat(-read_as(gate, i, dtype)));
        write_as(x, i, read_as(x, i, dtype) / factor[0], dtype);
    }
}

void gate_output_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const Attention *a = g->attention;
    int64_t size = (int64_t)a->num_heads * a->head_dim;
    void *x = token_of(s, g->scratch->mixed, token, size);
    const char *end = token_of(s, g->scratch->qkv, token + 1, a->q_stride);
    const void *gate = end - size * size_of(dtype_of(s));
    if (dtype_of(s) == FLOAT32)
        multiply_by_sigmoid(x, gate, size, FLOAT32);
    else
        multiply_by_sigmoid(x, gate, size, BFLOAT16);
}

void scale_mixed_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    int64_t size = g->layer->recurrent->out_width;
    scale_values(s, token_of(s, g->scratch->mixed, token, size), size, s->residual_scale);
}

void add_values(const Step *s, const void *x, void *y, int64_t size) {
    int dtype = dtype_of(s);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_as(y, i, load_as(y, i, dtype) + load_as(x, i, dtype), dtype);
    for (; i < size; i++) write_as(y, i, read_as(y, i, dtype) + read_as(x, i, dtype), dtype);
}

/* ---- activations ------------------------------------------------------------------------------- */

/* Keep how far values are above so many standard deviations over their mean, or 0. */
INLINE void relu_above(void *x, int64_t size, float num_deviations, const int dtype) {
    float mean = mean_of(x, size, dtype);
    float limit = mean + sqrtf(mean_square(x, size, mean, dtype)) * num_deviations;
    vec zeros = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_as(x, i, max_vec(load_as(x, i, dtype) - limit, zeros), dtype);
    for (; i < size; i++) {
        float above = read_as(x, i, dtype) - limit;
        write_as(x, i, above > 0.0f ? above : 0.0f, dtype);
    }
}

static void make_sparse(const Glue *g, void *x, int64_t size) {
    float num_deviations = g->layer->gate_deviations;
    if (dtype_of(g->step) == FLOAT32)
        relu_above(x, size, num_deviations, FLOAT32);
    else
        relu_above(x, size, num_deviations, BFLOAT16);
}

void gate_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    int64_t size = g->layer->intermediate;
    void *x = token_of(s, g->scratch->gate_up, token, (1 + s->has_gate) * size);
    const void *up = s->has_gate ? token_of(s, x, 1, size) : NULL;
    void *y = token_of(s, g->scratch->gated, token, size);
    if (g->layer->gate_deviations != 0.0f) make_sparse(g, x, size);
    const Gate *gate = g->layer->gate ? g->layer->gate : &s->gate;
    gate_values(x, up, y, size, gate, s->residual_scale, dtype_of(s));
}

void gate_input_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, g->scratch->gated, token, s->input_size);
    const void *input = token_of(s, s->layer_inputs, token * s->num_inputs + g->layer->number,
                                 s->input_size);
    gate_values(x, input, x, s->input_size, &s->gate, 1.0f, dtype_of(s));
}
