/* Recurrent layers: convolutions over a few tokens, and scans that carry a state from token to token.
 * `state_arguments.py` mirrors the structures. */
#pragma once

#include "vector.h"

/* The rows of a step. `starts` [num_rows + 1] are their first tokens. `slots` [num_rows] are the lines
 * of the states that they begin and end with; lines are `line_bytes` apart. `cuts` [num_cuts][3], in
 * order, are a row, a number of its tokens, and the line to which the state after these is copied. */
typedef struct {
    const int64_t *starts, *slots, *cuts;
    int64_t num_rows, num_cuts, line_bytes;
    int32_t num_threads;
} StateRows;

/* A convolution of each channel over the last `width` tokens: with `weight` [width][num_channels] and
 * an optional `bias`, in float32, then SiLU if it `activates`. The state has the last width - 1 inputs,
 * [width - 1][num_channels], as float32. */
typedef struct {
    const float *weight, *bias;
    void *state; /* of line 0 */
    int64_t num_channels;
    int32_t width, activates;
} Convolution;

enum { MAX_WIDTH = 8, MAX_HEAD = 256 };

/* The gated delta rule (Yang et al. 2024, arXiv:2412.06464). For each value head, with the query and
 * key of its group, normalized to length 1, and the state S [key_dim][value_dim] in float32:
 *
 *     S = exp(decay * softplus(a + dt_bias)) * S
 *     S = S + k (v - k S) * beta_scale * sigmoid(b)
 *     y = norm(q S / sqrt(key_dim)) * silu(z)
 *
 * or `* sigmoid(z)`. A head has `num_decays`: one of all its rows, or one of each, key_dim of them (Kimi
 * Delta Attention: arXiv:2510.26692). `decay` is [num_value_heads], `dt_bias` [num_value_heads][num_decays],
 * `norm` [value_dim]. */
typedef struct {
    const float *decay, *dt_bias, *norm;
    void *state; /* of line 0: [num_value_heads][key_dim][value_dim] */
    int32_t num_key_heads, num_value_heads, key_dim, value_dim, num_decays, low_rank, has_sigmoid_gate;
    float eps, beta_scale;
} DeltaRule;

/* Mamba 2's scan (Dao and Gu 2024, arXiv:2405.21060). For each head, with b and c of its group and the
 * state S [head_dim][state_dim] in float32:
 *
 *     step = min(max(softplus(step_scale * dt + dt_bias), least), most)
 *     S = exp(decay * step) * S + step * x b
 *     y = S c + skip * x
 *
 * Then the values of each group are multiplied by silu(gate_scale * z), normalized together if there is
 * a norm, and multiplied by `weight`. `decay`, `dt_bias` and `skip` are [num_heads], `weight` is
 * [num_heads * head_dim]. */
typedef struct {
    const float *decay, *dt_bias, *skip, *weight;
    void *state; /* of line 0: [num_heads][head_dim][state_dim] */
    int32_t num_heads, num_groups, head_dim, state_dim;
    float eps, least, most, gate_scale, step_scale;
    int32_t has_norm;
} Scan;

enum { SHORT_CONV = 0, DELTA_NET = 1, MAMBA_2 = 2 };

/* The recurrent part of a layer, between two projections. A token's inputs are one row of `in_width`
 * values, those of its result `out_width`:
 *
 * SHORT_CONV: b, c, x of num_channels each; the result is c * convolution(b * x)
 * DELTA_NET: q, k, v, all of which pass through the convolution; b; then `low_rank` values from which a
 *     is made and as many for z, unless it is 0 (decoder.c); a; z
 * MAMBA_2: z; x, b, c, all of which pass through the convolution; dt */
typedef struct {
    Convolution convolution;
    DeltaRule delta;
    Scan scan;
    int64_t in_width, out_width;
    int32_t kind, dtype;
} Recurrent;

/* Compute `out` [num_tokens][out_width]; parts of `in` [num_tokens][in_width] are overwritten. */
void recur(const Recurrent *r, const StateRows *rows, void *in, void *out);
