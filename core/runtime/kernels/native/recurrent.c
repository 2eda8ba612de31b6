/* Recurrent layers: states.h. A row's tokens are computed one after the other, each with the same
 * operations in the same order, so that no result depends on chunks or on other rows. */
#include "states.h"

#include "pool.h"

#define CHANNELS 64 /* of a task of a convolution */

/* A task of one row: tokens [first, end) of the step, and the first of the row's cuts. */
typedef struct {
    const StateRows *rows;
    int64_t row, first, end, cut;
} RowTask;

static RowTask row_task(const StateRows *rows, int64_t row) {
    RowTask t = {rows, row, rows->starts[row], rows->starts[row + 1], 0};
    while (t.cut < rows->num_cuts && rows->cuts[3 * t.cut] < row) t.cut++;
    return t;
}

/* The line to which the state goes after the token, or -1. */
INLINE int64_t next_line(RowTask *t, int64_t token) {
    const int64_t *cut = t->rows->cuts + 3 * t->cut;
    if (t->cut == t->rows->num_cuts || cut[0] != t->row || t->first + cut[1] != token + 1) return -1;
    t->cut++;
    return cut[2];
}

INLINE void *line_of(const StateRows *rows, void *state, int64_t line) {
    return (char *)state + line * rows->line_bytes;
}

INLINE void *value_at(void *values, int64_t index, int dtype) {
    return (char *)values + index * size_of(dtype);
}

/* ---- convolution ------------------------------------------------------------------------------- */

typedef struct {
    const Recurrent *r;
    const StateRows *rows;
    void *in, *out;
    int64_t num_parts; /* of the channels, or heads of a scan */
} Work;

INLINE vec load_some(const void *p, int64_t index, int64_t num, int dtype) {
    vec x = splat(0.0f);
    if (num == LANES) return load_as(p, index, dtype);
    for (int64_t i = 0; i < num; i++) x[i] = read_as(p, index + i, dtype);
    return x;
}

INLINE void store_some(void *p, int64_t index, vec x, int64_t num, int dtype) {
    if (num == LANES)
        store_as(p, index, x, dtype);
    else
        for (int64_t i = 0; i < num; i++) write_as(p, index + i, x[i], dtype);
}

/* As a value of this type would be. */
INLINE vec rounded(vec x, int dtype) {
    return dtype == FLOAT32 ? x : (vec)(__builtin_convertvector(to_bf16(x), uvec) << 16);
}

/* Up to LANES channels of one row. A short convolution multiplies its inputs and its results. */
INLINE void convolve_lanes(const Work *w, RowTask t, int64_t channel, int64_t num, const int dtype,
                           const int width) {
    const Recurrent *r = w->r;
    const Convolution *c = &r->convolution;
    const int is_short = r->kind == SHORT_CONV;
    int64_t size = c->num_channels;
    int64_t first = is_short ? 2 * size : r->kind == MAMBA_2 ? r->out_width : 0;
    int64_t x_place = first + channel, y_place = is_short ? channel : x_place;
    int64_t y_stride = is_short ? r->out_width : r->in_width;
    void *slot = line_of(t.rows, c->state, t.rows->slots[t.row]);
    vec window[MAX_WIDTH - 1], weight[MAX_WIDTH], bias = splat(0.0f);
    if (c->bias) bias = load_some(c->bias, channel, num, FLOAT32);
    for (int k = 0; k < width; k++) weight[k] = load_some(c->weight, k * size + channel, num, FLOAT32);
    for (int k = 0; k < width - 1; k++) window[k] = load_some(slot, k * size + channel, num, FLOAT32);
    for (int64_t token = t.first; token < t.end; token++) {
        void *in = value_at(w->in, token * r->in_width, dtype);
        vec x = load_some(in, x_place, num, dtype), sum = bias;
        if (is_short) x = rounded(x * load_some(in, channel, num, dtype), dtype);
        for (int k = 0; k < width - 1; k++) sum += window[k] * weight[k];
        sum += x * weight[width - 1];
        for (int k = 0; k + 1 < width - 1; k++) window[k] = window[k + 1];
        if (width > 1) window[width - 2] = x;
        if (c->activates) sum = sum / (1.0f + exp_vec(-sum));
        if (is_short) sum = rounded(sum, dtype) * load_some(in, size + channel, num, dtype);
        store_some(value_at(is_short ? w->out : w->in, token * y_stride, dtype), y_place, sum, num, dtype);
        int64_t line = next_line(&t, token);
        if (line >= 0)
            for (int k = 0; k < width - 1; k++)
                store_some(line_of(t.rows, c->state, line), k * size + channel, window[k], num, FLOAT32);
    }
    for (int k = 0; k < width - 1; k++) store_some(slot, k * size + channel, window[k], num, FLOAT32);
}

INLINE void convolve_as(const Work *w, RowTask t, int64_t channel, int64_t num, const int dtype) {
    int width = w->r->convolution.width;
    if (width == 4)
        convolve_lanes(w, t, channel, num, dtype, 4);
    else if (width == 3)
        convolve_lanes(w, t, channel, num, dtype, 3);
    else
        convolve_lanes(w, t, channel, num, dtype, width);
}

static void convolve_part(void *context, int64_t index, int worker) {
    const Work *w = context;
    RowTask t = row_task(w->rows, index / w->num_parts);
    int64_t first = index % w->num_parts * CHANNELS, num_channels = w->r->convolution.num_channels;
    (void)worker;
    for (int64_t i = first; i < first + CHANNELS && i < num_channels; i += LANES) {
        int64_t num = num_channels - i < LANES ? num_channels - i : LANES;
        if (w->r->dtype == FLOAT32)
            convolve_as(w, t, i, num, FLOAT32);
        else
            convolve_as(w, t, i, num, BFLOAT16);
    }
}

/* ---- gated delta rule -------------------------------------------------------------------------- */

static float sigmoid(float x) { return 1.0f / (1.0f + exp_vec(splat(-x))[0]); }

/* As torch computes it: above 20 it is x in float32. */
static float softplus(float x) { return x > 20.0f ? x : log1pf(exp_vec(splat(x))[0]); }

/* A head of a query or key in float32, of length `scale`. */
static void load_unit(const void *from, int64_t index, int64_t size, int dtype, float scale, float *to) {
    vec squares = splat(0.0f);
    float sum;
    int64_t i = 0;
    convert(value_at((void *)from, index, dtype), dtype, to, FLOAT32, size);
    for (; i + LANES <= size; i += LANES) squares += load(to + i) * load(to + i);
    for (sum = sum_lanes(squares); i < size; i++) sum += to[i] * to[i];
    sum = scale / sqrtf(sum + 1e-6f);
    for (i = 0; i < size; i++) to[i] *= sum;
}

/* As `softplus`, without a branch: log(1 + e^-|x|) = 2 artanh(s) as a series, whose s is 1/3 at most. */
INLINE vec softplus_vec(vec x) {
    ivec bits = (ivec)x, is_negative = bits >> 31;
    vec power = exp_vec((vec)(bits | (int32_t)0x80000000)), s = power / (2.0f + power), square = s * s;
    vec sum = splat(1.0f / 15.0f);
    for (int divisor = 13; divisor > 0; divisor -= 2) sum = sum * square + 1.0f / (float)divisor;
    return (vec)(bits & ~is_negative) + 2.0f * s * sum;
}

/* The vectors of a token's update of a head. `read` is the key as the state is read by it before it
 * decays: then `kept` scales what is read. */
typedef struct {
    float q[MAX_HEAD], k[MAX_HEAD], read[MAX_HEAD], decays[MAX_HEAD], values[MAX_HEAD];
    float kept, beta;
} Update;

/* The decays of a head's rows: one of all, or one of each. */
static void load_decays(const DeltaRule *d, const void *in, int64_t place, int64_t head, int dtype,
                        Update *u) {
    const float *bias = d->dt_bias + head * d->num_decays;
    if (d->num_decays == 1) {
        u->kept = exp_vec(splat(d->decay[head] * softplus(read_as(in, place, dtype) + bias[0])))[0];
        for (int i = 0; i < d->key_dim; i++) u->read[i] = u->k[i], u->decays[i] = u->kept;
        return;
    }
    u->kept = 1.0f;
    for (int64_t i = 0; i < d->key_dim; i += LANES) {
        int64_t num = d->key_dim - i < LANES ? d->key_dim - i : LANES;
        vec step = softplus_vec(load_some(in, place + i, num, dtype) + load_some(bias, i, num, FLOAT32));
        vec decay = exp_vec(d->decay[head] * step);
        store_some(u->decays, i, decay, num, FLOAT32);
        store_some(u->read, i, load_some(u->k, i, num, FLOAT32) * decay, num, FLOAT32);
    }
}

/* Update NUM registers of columns of a head's state; their values become the results. */
#define UPDATE_COLUMNS(NUM)                                                                 \
    {                                                                                       \
        reg kept[NUM], delta[NUM], sum[NUM];                                                \
        for (int j = 0; j < NUM; j++) kept[j] = sum[j] = (reg){0};                          \
        for (int64_t i = 0; i < key_dim; i++)                                               \
            for (int j = 0; j < NUM; j++)                                                   \
                kept[j] += load_reg(state + i * value_dim + column + j * REG) * u->read[i]; \
        for (int j = 0; j < NUM; j++)                                                       \
            delta[j] = (load_reg(values + column + j * REG) - kept[j] * u->kept) * u->beta; \
        for (int64_t i = 0; i < key_dim; i++)                                               \
            for (int j = 0; j < NUM; j++) {                                                 \
                float *place = state + i * value_dim + column + j * REG;                    \
                reg changed = load_reg(place) * u->decays[i] + delta[j] * u->k[i];          \
                store_reg(place, changed);                                                  \
                sum[j] += changed * u->q[i];                                                \
            }                                                                               \
        for (int j = 0; j < NUM; j++) store_reg(values + column + j * REG, sum[j]);         \
    }

static void update_head(float *state, Update *u, int64_t key_dim, int64_t value_dim) {
    float *values = u->values;
    int64_t column = 0;
    for (; column + 4 * REG <= value_dim; column += 4 * REG) UPDATE_COLUMNS(4)
    for (; column + REG <= value_dim; column += REG) UPDATE_COLUMNS(1)
    for (; column < value_dim; column++) {
        float kept = 0.0f, sum = 0.0f;
        for (int64_t i = 0; i < key_dim; i++) kept += state[i * value_dim + column] * u->read[i];
        float delta = (values[column] - kept * u->kept) * u->beta;
        for (int64_t i = 0; i < key_dim; i++) {
            float *place = state + i * value_dim + column;
            *place = *place * u->decays[i] + delta * u->k[i];
            sum += *place * u->q[i];
        }
        values[column] = sum;
    }
}

/* y = norm(x) * silu(z), or sigmoid(z). */
static void gate_head(const DeltaRule *d, const float *x, const void *z, void *y, int dtype) {
    int64_t size = d->value_dim, i = 0;
    vec squares = splat(0.0f);
    float sum;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (sum = sum_lanes(squares); i < size; i++) sum += x[i] * x[i];
    float factor = 1.0f / sqrtf(sum / (float)size + d->eps);
    for (i = 0; i + LANES <= size; i += LANES) {
        vec gate = load_as(z, i, dtype), top = d->has_sigmoid_gate ? splat(1.0f) : gate;
        store_as(y, i, load(x + i) * factor * load(d->norm + i) * (top / (1.0f + exp_vec(-gate))), dtype);
    }
    for (; i < size; i++) {
        float gate = read_as(z, i, dtype), top = d->has_sigmoid_gate ? 1.0f : gate;
        write_as(y, i, x[i] * factor * d->norm[i] * top * sigmoid(gate), dtype);
    }
}

static void delta_head(void *context, int64_t index, int worker) {
    const Work *w = context;
    const Recurrent *r = w->r;
    const DeltaRule *d = &r->delta;
    RowTask t = row_task(w->rows, index / w->num_parts);
    int64_t head = index % w->num_parts, key_dim = d->key_dim, value_dim = d->value_dim;
    int64_t group = head / (d->num_value_heads / d->num_key_heads), num_keys = d->num_key_heads * key_dim;
    int64_t b_place = 2 * num_keys + d->num_value_heads * value_dim, dtype = r->dtype;
    int64_t a_place = b_place + d->num_value_heads + 2 * d->low_rank;
    int64_t z_place = a_place + d->num_value_heads * d->num_decays;
    int64_t state_bytes = key_dim * value_dim * (int64_t)sizeof(float);
    char *states = (char *)d->state + head * state_bytes;
    float *state = line_of(w->rows, states, w->rows->slots[t.row]), scale = 1.0f / sqrtf((float)key_dim);
    Update u;
    (void)worker;
    for (int64_t token = t.first; token < t.end; token++) {
        char *in = value_at(w->in, token * r->in_width, dtype);
        void *y = value_at(w->out, token * r->out_width + head * value_dim, dtype);
        u.beta = d->beta_scale * sigmoid(read_as(in, b_place + head, dtype));
        load_unit(in, group * key_dim, key_dim, dtype, scale, u.q);
        load_unit(in, num_keys + group * key_dim, key_dim, dtype, 1.0f, u.k);
        load_decays(d, in, a_place + head * d->num_decays, head, dtype, &u);
        convert(value_at(in, 2 * num_keys + head * value_dim, dtype), dtype, u.values, FLOAT32, value_dim);
        update_head(state, &u, key_dim, value_dim);
        gate_head(d, u.values, value_at(in, z_place + head * value_dim, dtype), y, dtype);
        int64_t line = next_line(&t, token);
        if (line >= 0) memcpy(line_of(w->rows, states, line), state, state_bytes);
    }
}

/* ---- Mamba 2 ----------------------------------------------------------------------------------- */

static void scan_head(void *context, int64_t index, int worker) {
    const Work *w = context;
    const Recurrent *r = w->r;
    const Scan *s = &r->scan;
    RowTask t = row_task(w->rows, index / w->num_parts);
    int64_t head = index % w->num_parts, head_dim = s->head_dim, size = s->state_dim, dtype = r->dtype;
    int64_t group = head / (s->num_heads / s->num_groups), x_place = r->out_width + head * head_dim;
    int64_t b_place = 2 * r->out_width + group * size, c_place = b_place + s->num_groups * size;
    int64_t dt_place = 2 * r->out_width + 2 * s->num_groups * size + head;
    int64_t state_bytes = head_dim * size * (int64_t)sizeof(float);
    float b[MAX_HEAD], c[MAX_HEAD];
    char *states = (char *)s->state + head * state_bytes;
    float *state = line_of(w->rows, states, w->rows->slots[t.row]);
    (void)worker;
    for (int64_t token = t.first; token < t.end; token++) {
        void *in = value_at(w->in, token * r->in_width, dtype);
        void *y = value_at(w->out, token * r->out_width + head * head_dim, dtype);
        float step = softplus(read_as(in, dt_place, dtype) * s->step_scale + s->dt_bias[head]);
        step = step < s->least ? s->least : step > s->most ? s->most : step;
        float decay = exp_vec(splat(s->decay[head] * step))[0];
        convert(value_at(in, b_place, dtype), dtype, b, FLOAT32, size);
        convert(value_at(in, c_place, dtype), dtype, c, FLOAT32, size);
        for (int64_t i = 0; i < head_dim; i++) {
            float *own = state + i * size, x = read_as(in, x_place + i, dtype), added = x * step;
            vec sums = splat(0.0f);
            float sum;
            int64_t j = 0;
            for (; j + LANES <= size; j += LANES) {
                vec changed = load(own + j) * decay + load(b + j) * added;
                store(own + j, changed);
                sums += changed * load(c + j);
            }
            for (sum = sum_lanes(sums); j < size; j++) {
                own[j] = own[j] * decay + b[j] * added;
                sum += own[j] * c[j];
            }
            write_as(y, i, sum + s->skip[head] * x, dtype);
        }
        int64_t line = next_line(&t, token);
        if (line >= 0) memcpy(line_of(w->rows, states, line), state, state_bytes);
    }
}

INLINE vec gated_lanes(const void *y, const void *z, int64_t i, float scale, int dtype) {
    vec gate = load_as(z, i, dtype) * scale;
    return load_as(y, i, dtype) * (gate / (1.0f + exp_vec(-gate)));
}

static float gated_value(const void *y, const void *z, int64_t i, float scale, int dtype) {
    float gate = read_as(z, i, dtype) * scale;
    return read_as(y, i, dtype) * gate * sigmoid(gate);
}

/* A group of a token's results, in place: norm(y * silu(z)), or without the norm. */
static void finish_group(void *context, int64_t index, int worker) {
    const Work *w = context;
    const Recurrent *r = w->r;
    const Scan *s = &r->scan;
    int64_t token = index / s->num_groups, group = index % s->num_groups, dtype = r->dtype;
    int64_t size = r->out_width / s->num_groups, first = group * size, i = 0;
    const void *z = value_at(w->in, token * r->in_width + first, dtype);
    void *y = value_at(w->out, token * r->out_width + first, dtype);
    const float *weight = s->weight + first, scale = s->gate_scale;
    vec squares = splat(0.0f);
    float sum;
    (void)worker;
    for (; i + LANES <= size; i += LANES) {
        vec value = gated_lanes(y, z, i, scale, dtype);
        squares += value * value;
    }
    for (sum = sum_lanes(squares); i < size; i++) {
        float value = gated_value(y, z, i, scale, dtype);
        sum += value * value;
    }
    float factor = s->has_norm ? 1.0f / sqrtf(sum / (float)size + s->eps) : 1.0f;
    for (i = 0; i + LANES <= size; i += LANES)
        store_as(y, i, gated_lanes(y, z, i, scale, dtype) * factor * load(weight + i), dtype);
    for (; i < size; i++)
        write_as(y, i, gated_value(y, z, i, scale, dtype) * factor * weight[i], dtype);
}

/* ------------------------------------------------------------------------------------------------ */

static void for_parts(Work *w, int64_t num_parts, Task run) {
    w->num_parts = num_parts;
    run_tasks(w->rows->num_rows * num_parts, w->rows->num_threads, run, w);
}

void recur(const Recurrent *r, const StateRows *rows, void *in, void *out) {
    Work w = {.r = r, .rows = rows, .in = in, .out = out};
    for_parts(&w, (r->convolution.num_channels + CHANNELS - 1) / CHANNELS, convolve_part);
    if (r->kind == DELTA_NET) for_parts(&w, r->delta.num_value_heads, delta_head);
    if (r->kind == MAMBA_2) {
        for_parts(&w, r->scan.num_heads, scan_head);
        int64_t num_tokens = rows->starts[rows->num_rows];
        run_tasks(num_tokens * r->scan.num_groups, rows->num_threads, finish_group, &w);
    }
}
