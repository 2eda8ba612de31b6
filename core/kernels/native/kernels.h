/* What the kernels are called with. `library.py` mirrors these structures. */
#pragma once

#include <stdint.h>

#include "vector.h"

/* Pages lie as pages.h describes. `blocks`, where given, are [2][num_tokens]: the first and the last position of the block that a
 * token sees as a whole. A window of 0 has no end. */
typedef struct {
    const void *q;
    void *k_pages, *v_pages, *out;
    const int64_t *page_table, *context_lengths, *query_starts, *blocks;
    int64_t num_rows, num_tokens, q_stride, table_stride;
    int32_t num_heads, num_kv_heads, head_dim, page_shift; /* a page holds 2^page_shift tokens */
    int32_t q_dtype, kv_dtype, window, num_threads;
    float scale;
} Attention;

/* Returns 0, or 1 when out of memory. */
int paged_attention(const Attention *a);

/* Store one token's key and value for one head, of type `q_dtype`, in its slot. */
void store_head(const Attention *a, int64_t slot, int64_t head, const void *k, const void *v);

/* Store [num_tokens][num_kv_heads][head_dim] keys and values, of type `q_dtype`, in their slots. */
void write_pages(const Attention *a, const int64_t *slots, const void *k, const void *v);

/* `bias` has the type of x and weight, `residual` that of y. */
typedef struct {
    const void *x, *weight, *bias, *residual;
    void *y;
    int64_t num_rows, num_inputs, num_outputs;
    int32_t dtype, y_dtype, num_threads;
} Linear;

void linear(const Linear *l);

/* Rows of `length`, one for each channel of each item: normalised over the row, scaled by 1 + gamma
 * and shifted by beta, which are a row's, then through the snake with its channel's alpha. `dtype`
 * is that of `y`. */
typedef struct {
    const float *x, *gamma, *beta, *alpha;
    void *y;
    int64_t num_rows, num_channels, length;
    int32_t dtype, num_threads;
    float eps;
} Snake;

void snake(const Snake *s);

/* One layer of a decoder; weights packed, absent parts NULL. `qk_norm` is [2][head_dim]. Rotations
 * are rows of the step's first or second table, or none: `rotation` is 0, 1 or -1. */
typedef struct {
    const void *input_norm, *qkv, *qkv_bias, *qk_norm, *out, *out_bias, *attention_post_norm;
    const void *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias, *mlp_post_norm;
    void *k_pages, *v_pages;
    int32_t window, rotation;
} Layer;

enum { SILU = 0, GELU_TANH = 1 };

/* A step through some layers. `attention` holds what every layer's attention has in common; its
 * `q_dtype` is the type of everything but norms, which have `norm_dtype`. `x` is the residual
 * stream, [num_tokens][hidden]; with a `final_norm` it ends as the normalised hidden state.
 * `cos` and `sin` are tables of [num_tokens][num_rotated]. `scratch` holds a token's normed, qkv,
 * attended, gate-up and gated values, for every token. */
typedef struct {
    const Layer *layers;
    void *x, *scratch;
    const void *final_norm, *cos[2], *sin[2];
    const int64_t *write_slots;
    int64_t num_layers, hidden, intermediate, num_rotated[2];
    int32_t activation, norm_dtype;
    float eps, qk_eps;
    Attention attention;
} Step;

/* Returns 0, or 1 when out of memory. */
int decoder_step(const Step *s);
