/* The glue between a step's products: its state, and what is done to single tokens. */
#pragma once

#include "pages.h"

typedef struct {
    void *normed, *qkv, *mixed, *gate_up, *gated;
} Scratch;

/* The arguments of a task of the glue. */
typedef struct {
    const Step *step;
    const Layer *layer;
    const Scratch *scratch;
    const Attention *attention; /* the layer's */
    const Norm *norm;
    const void *from;
    void *to;
    int64_t width;
    float eps, scale;
} Glue;

typedef void (*PerToken)(const Glue *g, int64_t token);

INLINE int dtype_of(const Step *s) { return s->attention.q_dtype; }

INLINE void *token_of(const Step *s, const void *values, int64_t token, int64_t width) {
    return (char *)values + token * width * size_of(dtype_of(s));
}

/* The places of this step's tokens in the pages of the layer. */
INLINE const int64_t *write_slots_of(const Glue *g) {
    return g->layer->flags & WINDOW_PAGES ? g->step->window_slots : g->step->write_slots;
}

/* Pass `dtype` and the type of norms to a macro as constants. */
#define WITH_TYPES(S, RUN)                     \
    if (dtype_of(S) == FLOAT32)                \
        RUN(FLOAT32, FLOAT32);                 \
    else if ((S)->norm_dtype == FLOAT32)       \
        RUN(BFLOAT16, FLOAT32);                \
    else                                       \
        RUN(BFLOAT16, BFLOAT16);

/* The mean of `size` values. */
INLINE float mean_of(const void *x, int64_t size, const int dtype) {
    vec sums = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load_as(x, i, dtype);
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum += read_as(x, i, dtype);
    return sum / (float)size;
}

/* The mean square of their distances from `mean`. */
INLINE float mean_square(const void *x, int64_t size, float mean, const int dtype) {
    vec squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec value = load_as(x, i, dtype) - mean;
        squares += value * value;
    }
    float sum = sum_lanes(squares);
    for (; i < size; i++) {
        float value = read_as(x, i, dtype) - mean;
        sum += value * value;
    }
    return sum / (float)size;
}

/* y = norm(x) over `size` values, or (y + norm(x)) * scale where it `adds`; see
 * core/runtime/kernels/rms_norm.py. */
INLINE void norm(const void *x, Norm by, void *y, int64_t size, float eps, float scale,
                 const int dtype, const int weight_dtype, const int kind, const int adds) {
    float mean = kind == LAYER_NORM ? mean_of(x, size, dtype) : 0.0f;
    float factor = 1.0f / sqrtf(mean_square(x, size, mean, dtype) + eps);
    int64_t whole = size / LANES * LANES, i;
    for (i = 0; i < whole; i += LANES) {
        vec normed = (load_as(x, i, dtype) - mean) * factor * load_as(by.weight, i, weight_dtype);
        if (kind == LAYER_NORM && by.bias) normed += load_as(by.bias, i, weight_dtype);
        store_as(y, i, adds ? (load_as(y, i, dtype) + normed) * scale : normed, dtype);
    }
    for (; i < size; i++) {
        float normed = (read_as(x, i, dtype) - mean) * factor * read_as(by.weight, i, weight_dtype);
        if (kind == LAYER_NORM && by.bias) normed += read_as(by.bias, i, weight_dtype);
        write_as(y, i, adds ? (read_as(y, i, dtype) + normed) * scale : normed, dtype);
    }
}

/* Normalize one row; `kind` is RMS_NORM or LAYER_NORM. */
void norm_row(const Step *s, const void *x, Norm by, void *y, int64_t size, float eps, int kind);

/* y = (y + norm(x)) * scale. */
void add_norm_row(const Step *s, const void *x, Norm by, void *y, int64_t size, float eps,
                  float scale, int kind);

/* Multiply values by a factor, in place. */
void scale_values(const Step *s, void *x, int64_t size, float scale);

/* y += x. */
void add_values(const Step *s, const void *x, void *y, int64_t size);

/* Rotate the first values of one head, in pairs that are adjacent or halves apart, in place. */
void rotate_pairs(const Glue *g, int64_t token, void *x, int is_adjacent);

/* Rotate one head, or the part of it that is rotated, in place, as the layer does. */
void rotate_head(const Glue *g, int64_t token, void *x);

/* Normalize and rotate a token's heads, and store its keys and values. */
void prepare_heads(const Glue *g, int64_t token);

/* Multiply a token's result of attention by the sigmoid of its gate. */
void gate_output_token(const Glue *g, int64_t token);

/* Multiply a token's result of a recurrent layer by the step's scale. */
void scale_mixed_token(const Glue *g, int64_t token);

/* The activation of a token's MLP, with or without a gate: from gate_up to gated. */
void gate_token(const Glue *g, int64_t token);

/* act(x) * input of a token's layer inputs, in place. */
void gate_input_token(const Glue *g, int64_t token);

/* Normalize a token of the residual stream: to normed. */
void norm_token(const Glue *g, int64_t token);

/* Run a function for every token of a step. */
void for_tokens(const Glue *g, const Norm *norm, PerToken run);

/* The input of a half of a layer: normalized by `run` where there is a norm before it. */
const void *open_half(const Glue *g, const Norm *norm, PerToken run);

/* The product of all tokens with a projection. */
Linear product_of(const Step *s, const void *x, int64_t num_inputs, Projection by, void *y,
                  int64_t num_outputs);

/* Compute a product, and add the changes by the rows' adapters. */
void multiply(const Step *s, const Linear *l, Projection by);

/* y = x times a projection, plus the residual if there is one. */
void project(const Step *s, const void *x, int64_t num_inputs, Projection by, const void *residual,
             void *y, int64_t num_outputs);

/* Add a part of a layer to the residual stream: directly, or after its own norm and then scaled. */
void project_back(const Glue *g, const void *x, int64_t num_inputs, Projection by,
                  const Norm *post_norm, float scale);

/* The attention of a layer with latents, whose arguments but queries and result are `a`. Returns 0, or
 * 1 when out of memory. */
int attend_latents(const Glue *g, Attention a);
