/* What the kernels are called with. `library.py` mirrors these structures. */
#pragma once

#include <stdint.h>

#include "vector.h"

typedef struct {
    const void *q, *k_pages, *v_pages;
    void *out;
    const int64_t *page_table, *context_lengths, *query_starts;
    int64_t num_rows, num_tokens, q_stride, table_stride;
    int32_t num_heads, num_kv_heads, head_dim, page_shift; /* a page holds 2^page_shift tokens */
    int32_t q_dtype, kv_dtype, window, num_threads;
    float scale;
} Attention;

/* Returns 0, or 1 when out of memory. */
int paged_attention(const Attention *a);

typedef struct {
    const bf16 *x, *weight, *bias, *residual;
    bf16 *y;
    int64_t num_rows, num_inputs, num_outputs;
    int32_t num_threads;
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

/* One layer of a decoder; weights packed, absent parts NULL. `qk_norm` is [2][head_dim]. */
typedef struct {
    const bf16 *input_norm, *qkv, *qkv_bias, *qk_norm, *out, *out_bias;
    const bf16 *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    void *k_pages, *v_pages;
    int32_t window, uses_rope;
} Layer;

/* A step through all layers. `attention` holds what every layer's attention has in common. `x` is
 * the residual stream, [num_tokens][hidden], and ends as the normalised hidden state. `scratch`
 * holds a token's normed, qkv, attended, gate-up and gated values, for every token. */
typedef struct {
    const Layer *layers;
    bf16 *x, *scratch;
    const bf16 *final_norm, *cos, *sin;
    const int64_t *write_slots;
    int64_t num_layers, hidden, intermediate, num_rotated;
    float eps, qk_eps;
    Attention attention;
} Step;

/* Returns 0, or 1 when out of memory. */
int decoder_step(const Step *s);
