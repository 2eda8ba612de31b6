/* The functions of the library and their arguments, which `arguments.py` mirrors. */
#pragma once

#include <stdint.h>

#include "states.h"

/* Pages have the layout of pages.h, those of latents without `v_pages`: their first `value_dim` values
 * are also the value, and the result has as many for each head. Scales are those of INT8 pages, otherwise
 * NULL. `blocks`, if given, are [2][num_tokens]: the first and the last position of the block that a
 * token sees as a whole. A window of 0 is unlimited; a negative one is a chunk, which begins at a
 * multiple of its size. Scores are multiplied by `scale`, then limited to +-`soft_cap` by tanh; 0 is no
 * cap. `sinks`, if given, are [num_heads]: scores of an additional key without a value. The result is
 * multiplied by `out_scale`. */
typedef struct {
    const void *q;
    void *k_pages, *v_pages;
    bf16 *k_scales, *v_scales;
    void *out;
    const int64_t *page_table, *context_lengths, *query_starts, *blocks;
    const float *sinks;
    int64_t num_rows, num_tokens, q_stride, table_stride;
    int32_t num_heads, num_kv_heads, head_dim, value_dim;
    int32_t page_shift; /* a page holds 2^page_shift tokens */
    int32_t q_dtype, kv_dtype, window, num_threads;
    float scale, soft_cap, out_scale;
} Attention;

/* Returns 0, or 1 when out of memory. */
int paged_attention(const Attention *a);

/* The choice of `num_chosen` keys for each token by an index, whose keys are latents of one kind
 * (core/runtime/kernels/key_index.py). `slots` are [num_tokens][num_chosen], in the order of positions, of
 * which `lengths`, [num_tokens], are used; `starts` count the tokens from 0 on. `weights` are those of the
 * index's heads, [num_tokens][num_heads]. `ranks` are memory for `num_ranked` tokens at a time, of
 * `rank_stride` keys each. */
typedef struct {
    float *weights;
    uint32_t *ranks;
    int64_t *slots, *lengths;
    const int64_t *starts;
    int64_t num_chosen, num_ranked, rank_stride;
} Choice;

/* Choose keys for the queries of `a`; a token's scores are those of heads times its weights, summed. */
void choose_keys(const Attention *a, const Choice *c);

/* The arguments of attention over chosen latents: every token is a row, and every slot a page. */
Attention over_chosen(Attention a, const Choice *c);

/* Store one token's key and value for one head, or its latents, of type `q_dtype`, in its slot. */
void store_head(const Attention *a, int64_t slot, int64_t head, const void *k, const void *v);

/* Store [num_tokens][num_kv_heads][head_dim] keys and values, of type `q_dtype`, in their slots;
 * of latents `k` alone is read. */
void write_pages(const Attention *a, const int64_t *slots, const void *k, const void *v);

/* Some outputs of a projection, packed: in the type of x (`pack_weight`), or in blocks of integers
 * (`pack_blocks`; blocks.h has the formats). */
typedef struct {
    const void *data;
    int64_t num_outputs;
    int32_t format;
} Weight;

/* Outputs of the weights lie one after the other. `bias` has the type of x, `residual` that of y. Rows
 * of x are `x_stride` values apart, those of y and the residual `y_stride`; 0: dense. `quantized` has `quantized_bytes` for each row of x if a weight is in blocks. */
typedef struct {
    const void *x, *bias, *residual;
    const Weight *weights;
    void *y, *quantized;
    int64_t num_rows, num_inputs, num_outputs, x_stride, y_stride;
    int32_t num_weights, dtype, y_dtype, num_threads;
} Linear;

INLINE int64_t x_stride_of(const Linear *l) { return l->x_stride ? l->x_stride : l->num_inputs; }

INLINE int64_t y_stride_of(const Linear *l) { return l->y_stride ? l->y_stride : l->num_outputs; }

void linear(const Linear *l);

/* Several products at once, of one type. Those with the same `quantized` have the same inputs. */
void linears(const Linear *l, int64_t num);

/* Some outputs that an adapter changes: those from `first` on, by the `rank` low values from `offset` on.
 * `up` is [rank][num_outputs]. */
typedef struct {
    const void *up;
    int64_t first, num_outputs, offset, rank;
} LowRankPart;

/* The low-rank change of a projection by one adapter, in the type of x: `down`, [rank][num_inputs],
 * makes the low values. A rank of 0 is no change. */
typedef struct {
    const void *down;
    const LowRankPart *parts;
    int64_t rank, num_parts;
} LowRank;

/* Rows of one adapter, `num_rows` of `AdaptedRows` from `first` on. */
typedef struct {
    int64_t adapter, first, num_rows;
} AdaptedBlock;

/* The rows that have an adapter, in blocks. */
typedef struct {
    const int64_t *rows;
    const AdaptedBlock *blocks;
    int64_t num_blocks;
} AdaptedRows;

/* Add the changes of rows to the result of a projection; `adapters` has one of every adapter. */
void add_low_rank(const Linear *l, const LowRank *adapters, const AdaptedRows *rows);

/* Bytes of one quantized row of inputs. */
int64_t quantized_bytes(int64_t num_inputs);

/* Pack rows of a GGUF file, which are whole blocks, into `packed_block_bytes`. */
int64_t packed_block_bytes(int64_t num_outputs, int64_t num_inputs, int32_t format);
void pack_blocks(const void *rows, int64_t num_outputs, int64_t num_inputs, int32_t format,
                 void *packed, int32_t num_threads);

/* The weights of some outputs, [num_rows][num_inputs]: of blocks, or of plain numbers as they are. */
void read_rows(const void *packed, int64_t num_inputs, int32_t format, const int64_t *ids,
               int64_t num_rows, void *rows, int32_t dtype, int32_t num_threads);
void read_packed_rows(const void *packed, int64_t num_inputs, int32_t dtype, const int64_t *ids,
                      int64_t num_rows, void *rows, int32_t num_threads);

/* Rows of `length`, one for each channel of each item: normalized over the row, scaled by 1 + gamma
 * and shifted by beta of the row, then through the snake with the channel's alpha. `dtype` is that
 * of `y`. */
typedef struct {
    const float *x, *gamma, *beta, *alpha;
    void *y;
    int64_t num_rows, num_channels, length;
    int32_t dtype, num_threads;
    float eps;
} Snake;

void snake(const Snake *s);

/* Samples of rows of logits. Each row has a slot: `shapes` are [num_slots][4], with a slot's
 * temperature, top-k (0: off, 1: the likeliest), top-p and min-p; `counts` [num_slots][size] and
 * `penalties` [num_slots][3] are used for rows with `is_penalized`. Rows of `logits` are `stride`
 * apart. Absent parts are NULL: edited scores, masks with a bit per token in little-endian words (of
 * all rows, or of one), penalties, uniform numbers below 1, without which all rows take the likeliest
 * token. Ids are in range whatever a row holds. */
typedef struct {
    const float *logits, *edited, *shapes, *penalties;
    const char *const *masks;
    const int32_t *counts;
    const uint8_t *is_penalized;
    const int64_t *slots;
    const double *uniforms;
    int64_t *token_ids;
    uint8_t *is_finite;
    int64_t num_rows, size, stride;
    int32_t num_threads;
} SampleRows;

/* Returns 0, or 1 when out of memory. */
int sample_rows(const SampleRows *d);

/* The weights and the bias of one projection, and its change by every adapter, or NULL. */
typedef struct {
    const Weight *weights;
    const void *bias;
    const LowRank *adapters;
    int64_t num_weights;
} Projection;

enum { SILU = 0, GELU_TANH = 1, CLAMPED_SILU = 2, RELU2 = 3, XIELU = 4 };

/* The activation of an MLP; the limits of the clamped kind are those of core/runtime/kernels/gated.py, the
 * rates of xIELU (above 0 `alpha`) those of core/runtime/layers/xielu.py.
 * Its input is multiplied by `in_scale`, its result, with the factor if there is one, by `out_scale`. */
typedef struct {
    int32_t activation;
    float alpha, limit, negative, beta, eps, in_scale, out_scale;
} Gate;

enum { SOFTMAX = 0, SIGMOID = 1 };

/* A mixture of experts (core/runtime/layers/moe.py); rules of the choice are those of
 * core/runtime/kernels/routing.py. Experts have a gate, or only the activation. `correction` is [num_experts], and so are `gate_up` and `down`.
 * Absent parts are NULL, with 0 as the size of an absent shared expert. */
typedef struct {
    Projection router, shared_gate, shared_gate_up, shared_down;
    const Projection *gate_up, *down;
    const float *correction;
    int64_t num_experts, intermediate, shared_intermediate;
    int32_t num_chosen, scoring, renormalizes, scales_inputs, has_blocks, has_gate;
    int32_t num_groups, num_chosen_groups, num_group_scores;
    float scale;
    Gate gate;
} Mixture;

/* Bytes of memory for a mixture of so many tokens. */
int64_t mixture_bytes(const Mixture *x, int64_t num_tokens, int64_t hidden, int32_t dtype);

/* The inputs and the result of one layer's mixture, rows of `hidden` values. The sum of experts is
 * multiplied by `out_scale`. `scratch` has `mixture_bytes`. */
typedef struct {
    const Mixture *mixture;
    const void *x, *residual; /* no residual: NULL */
    void *y, *scratch;
    int64_t num_tokens, hidden;
    Gate shared_gate;
    int32_t dtype, num_threads;
    float out_scale;
} Mix;

void mix(const Mix *m);

/* The weight of a norm, absent with NULL, and its bias, if it has one. */
typedef struct {
    const void *weight, *bias;
} Norm;

enum { RMS_NORM = 0, LAYER_NORM = 1 };

/* Properties of a layer. It reads the cells of an earlier layer, and projects no keys; pairs that are
 * rotated are adjacent; all its query heads are normalized as one row, and all key heads; heads are
 * normalized after their rotation; by a layer norm; its queries are multiplied by the step's scales; its
 * result is multiplied by the sigmoid of as many values, which `qkv` has last; its cells are in pages of
 * layers with a window. */
enum {
    READS_CELLS = 1,
    ADJACENT_PAIRS = 2,
    JOINT_NORM = 4,
    NORM_AFTER_ROTATION = 8,
    LAYER_NORM_OF_HEADS = 16,
    SCALED_QUERIES = 32,
    GATED_OUTPUT = 64,
    WINDOW_PAGES = 128,
};

/* An index of keys (core/runtime/layers/key_index.py): its own keys, queries and weights of heads, and
 * the pages of its keys. */
typedef struct {
    Projection key, queries, weights;
    Norm key_norm;
    void *k_pages;
    bf16 *k_scales;
    int32_t num_heads, head_dim, has_adjacent_pairs;
    float scale, eps;
} KeyIndex;

/* Latent attention (core/runtime/layers/latent_attention.py). `down` makes the `query_inputs` and the row
 * of `kv_rank` and rotated values; `q_up`, if any, makes the queries. `absorb` and `expand` have a
 * weight for each head: to queries in the space of rows, and from results in it. Layers without an
 * `index` attend to the keys that the last one with an index has chosen. */
typedef struct {
    Projection down, q_up, absorb, expand;
    Norm q_norm, kv_norm;
    const KeyIndex *index;
    int64_t query_inputs, kv_rank;
    int32_t nope_dim, rope_dim, value_dim;
    float eps;
} Latents;

#define MOST_STREAMS 8

/* What a layer of several residual streams has (core/runtime/layers/altup.py). `router` has a row for
 * each stream, with the norm's weights and the scale of its product in it; `predict` has the weights of
 * each pair of streams, `correct` of each stream; `scale` is that of the gate's input. */
typedef struct {
    Projection laurel_left, laurel_right;
    Norm laurel_norm;
    const float *router, *predict, *correct, *scale;
    int64_t laurel_rank;
} AltUp;

/* One layer of a decoder, the `number`-th; absent parts NULL. A layer has attention, or a recurrent
 * part between `recurrent_in` and `recurrent_out`, or both, which read the same normed input, or
 * neither; and it may have no MLP. `decays` and `gates` make a and z of low values (states.h). The result of attention is multiplied by `attention_scale`. `head_norms` has a row of weights for
 * each query and key head, `value_norm` one for all values. Rotations are rows of the step's first or
 * second table, or none: `rotation` is 0, 1 or -1. `scale_of_result` multiplies the residual stream
 * after the layer's last norm. Gates of an MLP count from `gate_deviations` standard deviations over
 * their mean on, unless it is 0. */
typedef struct {
    Projection qkv, out, recurrent_in, recurrent_out, decays, gates;
    Projection gate_up, down, input_gate, input_projection;
    Norm input_norm, attention_post_norm, mlp_norm, mlp_post_norm, input_post_norm;
    const void *head_norms, *value_norm;
    const float *sinks;
    void *k_pages, *v_pages;
    bf16 *k_scales, *v_scales;
    const Mixture *mixture; /* in the place of `gate_up` and `down` */
    const Gate *gate; /* in the place of the step's */
    const Latents *latents; /* in the place of `qkv`; `head_dim` is that of rows */
    const Recurrent *recurrent;
    const AltUp *altup;
    int32_t number, num_heads, num_kv_heads, head_dim, window, rotation, intermediate, flags;
    float scale, attention_scale, soft_cap, head_eps, value_eps, scale_of_result, gate_deviations;
} Layer;

/* A step through some layers. `attention` holds the arguments that all layers share; its
 * `q_dtype` is the type of everything except norms, which have `norm_dtype`. `x` is the residual
 * stream, [num_tokens][hidden]; with a `final_norm` it ends as the normalized hidden state.
 * `cos` and `sin` are tables of [num_tokens][num_rotated], `query_scales` of [num_tokens]. Outputs of
 * attention and MLP are multiplied by `residual_scale`; in a parallel block both read the same input.
 * Where layers with a window have pages of their own, `window_table` and `window_slots` are theirs. In a
 * step with more keys than an index chooses, `choice` has the memory of the choice.
 *
 * A model with layer inputs has them as [num_tokens][num_inputs][input_size]; with an
 * `input_projection` they are rows of a table to which that of `x` is added first.
 *
 * A model of several residual streams has them as [num_tokens][num_streams][hidden]. With a `spread` they
 * are made of `x` first; with a final norm they end in `x`, each but the first through its projection of
 * `gather`.
 *
 * `scratch` holds a token's normed, qkv, attended, gate-up and gated values, of the widest layer, for
 * every token, and `quantized` its quantized inputs of the widest projection. `mixture_scratch` has
 * the most `mixture_bytes` of any layer. */
typedef struct {
    const Layer *layers;
    void *x, *scratch, *quantized, *mixture_scratch, *layer_inputs, *streams;
    Norm final_norm, inputs_norm;
    Projection input_projection, spread;
    const Projection *gather;
    const void *cos[2], *sin[2];
    const float *query_scales;
    const int64_t *write_slots, *window_table, *window_slots;
    const StateRows *state_rows; /* of a model with recurrent layers */
    const AdaptedRows *adapted_rows; /* NULL where no row has an adapter */
    const Choice *choice;
    int64_t num_layers, hidden, num_rotated[2], num_inputs, input_size, num_streams;
    int64_t qkv_width, mixed_width, gate_up_width;
    Gate gate;
    int32_t norm_kind, norm_dtype, has_gate, is_parallel;
    float eps, inputs_eps, residual_scale;
    Attention attention;
} Step;

/* Returns 0, or 1 when out of memory. */
int decoder_step(const Step *s);
