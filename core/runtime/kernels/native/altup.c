/* Several residual streams of a decoder, of which a layer computes the first: see
 * core/runtime/layers/altup.py. The first stream is `x` of the step; its place among `streams` holds what
 * was predicted of it. */
#include "altup.h"

static void *stream_of(const Step *s, int64_t token, int64_t stream) {
    return token_of(s, s->streams, token * s->num_streams + stream, s->hidden);
}

/* The routes of a token: of each stream, tanh of a product with the normalized x. */
INLINE void route(const Glue *g, const void *x, float routes[LANES], const int dtype) {
    const Step *s = g->step;
    const AltUp *u = g->layer->altup;
    float factor = 1.0f / sqrtf(mean_square(x, s->hidden, 0.0f, dtype) + s->eps);
    vec scores = splat(0.0f);
    for (int64_t stream = 0; stream < s->num_streams; stream++) {
        const float *weight = u->router + stream * s->hidden;
        vec sums = splat(0.0f);
        int64_t i = 0;
        for (; i + LANES <= s->hidden; i += LANES) sums += load_as(x, i, dtype) * load(weight + i);
        float sum = sum_lanes(sums);
        for (; i < s->hidden; i++) sum += read_as(x, i, dtype) * weight[i];
        scores[stream] = sum * factor;
    }
    scores = 1.0f - 2.0f / (exp_vec(scores * 2.0f) + 1.0f);
    memcpy(routes, &scores, sizeof scores);
}

/* `num` sums over a token's routes. */
static void mix_routes(const float *weights, const float routes[LANES], int64_t num_streams, float *to,
                       int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        to[i] = 0.0f;
        for (int64_t stream = 0; stream < num_streams; stream++)
            to[i] += weights[i * num_streams + stream] * routes[stream];
    }
}

INLINE void predict(const Glue *g, int64_t token, const int dtype) {
    const Step *s = g->step;
    int64_t num = s->num_streams, size = s->hidden, i = 0;
    float routes[LANES], by[MOST_STREAMS * MOST_STREAMS];
    void *x = token_of(s, s->x, token, size), *streams = stream_of(s, token, 0);
    route(g, x, routes, dtype);
    mix_routes(g->layer->altup->predict, routes, num, by, num * num);
    for (int64_t stream = 0; stream < num; stream++) by[stream * num + stream] += 1.0f;
    convert(x, dtype, streams, dtype, size);
    for (; i + LANES <= size; i += LANES) {
        vec from[MOST_STREAMS];
        for (int64_t stream = 0; stream < num; stream++)
            from[stream] = load_as(streams, stream * size + i, dtype);
        for (int64_t stream = 0; stream < num; stream++) {
            vec sum = splat(0.0f);
            for (int64_t each = 0; each < num; each++) sum += from[each] * by[stream * num + each];
            store_as(streams, stream * size + i, sum, dtype);
        }
    }
    for (; i < size; i++) {
        float from[MOST_STREAMS];
        for (int64_t stream = 0; stream < num; stream++)
            from[stream] = read_as(streams, stream * size + i, dtype);
        for (int64_t stream = 0; stream < num; stream++) {
            float sum = 0.0f;
            for (int64_t each = 0; each < num; each++) sum += from[each] * by[stream * num + each];
            write_as(streams, stream * size + i, sum, dtype);
        }
    }
    convert(streams, dtype, x, dtype, size);
}

/* Also scales the corrected first stream for the gate of the layer's input: to normed. */
INLINE void correct(const Glue *g, int64_t token, const int dtype) {
    const Step *s = g->step;
    const AltUp *u = g->layer->altup;
    int64_t num = s->num_streams, size = s->hidden, i = 0;
    float routes[LANES], by[MOST_STREAMS];
    void *x = token_of(s, s->x, token, size), *streams = stream_of(s, token, 0);
    void *scaled = token_of(s, g->scratch->normed, token, size);
    route(g, x, routes, dtype);
    mix_routes(u->correct, routes, num, by, num);
    for (; i + LANES <= size; i += LANES) {
        vec first = load_as(streams, i, dtype), change = load_as(x, i, dtype) - first;
        vec corrected = first + change * (1.0f + by[0]);
        store_as(x, i, corrected, dtype);
        store_as(scaled, i, corrected * load(u->scale + i), dtype);
        for (int64_t stream = 1; stream < num; stream++) {
            vec other = load_as(streams, stream * size + i, dtype);
            store_as(streams, stream * size + i, other + change * (1.0f + by[stream]), dtype);
        }
    }
    for (; i < size; i++) {
        float first = read_as(streams, i, dtype), change = read_as(x, i, dtype) - first;
        float corrected = first + change * (1.0f + by[0]);
        write_as(x, i, corrected, dtype);
        write_as(scaled, i, corrected * u->scale[i], dtype);
        for (int64_t stream = 1; stream < num; stream++) {
            float other = read_as(streams, stream * size + i, dtype);
            write_as(streams, stream * size + i, other + change * (1.0f + by[stream]), dtype);
        }
    }
}

/* The factor that gives `y` the root mean square of `x`. */
INLINE float match(const void *x, const void *y, int64_t size, const int dtype) {
    float own = mean_square(y, size, 0.0f, dtype);
    return sqrtf(mean_square(x, size, 0.0f, dtype) / (own > 1e-5f ? own : 1e-5f));
}

INLINE void spread(const Glue *g, int64_t token, const int dtype) {
    const Step *s = g->step;
    const void *x = token_of(s, s->x, token, s->hidden);
    for (int64_t stream = 1; stream < s->num_streams; stream++) {
        void *y = stream_of(s, token, stream);
        scale_values(s, y, s->hidden, match(x, y, s->hidden, dtype));
    }
}

/* The products of the streams after the first lie one place before these. */
INLINE void gather(const Glue *g, int64_t token, const int dtype) {
    const Step *s = g->step;
    int64_t num = s->num_streams - 1, size = s->hidden, i = 0;
    void *x = token_of(s, s->x, token, size);
    const void *streams = stream_of(s, token, 0);
    float factors[MOST_STREAMS], share = 1.0f / (float)s->num_streams;
    for (int64_t stream = 0; stream < num; stream++)
        factors[stream] = match(x, stream_of(s, token, stream), size, dtype);
    for (; i + LANES <= size; i += LANES) {
        vec sum = load_as(x, i, dtype);
        for (int64_t stream = 0; stream < num; stream++)
            sum += load_as(streams, stream * size + i, dtype) * factors[stream];
        store_as(x, i, sum * share, dtype);
    }
    for (; i < size; i++) {
        float sum = read_as(x, i, dtype);
        for (int64_t stream = 0; stream < num; stream++)
            sum += read_as(streams, stream * size + i, dtype) * factors[stream];
        write_as(x, i, sum * share, dtype);
    }
}

#define PER_TOKEN(NAME)                                      \
    static void NAME##_token(const Glue *g, int64_t token) { \
        if (dtype_of(g->step) == FLOAT32)                    \
            NAME(g, token, FLOAT32);                         \
        else                                                 \
            NAME(g, token, BFLOAT16);                        \
    }
PER_TOKEN(predict)
PER_TOKEN(correct)
PER_TOKEN(spread)
PER_TOKEN(gather)

/* Add normed, and the norm of its low-rank product. */
static void add_laurel_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    void *x = token_of(s, s->x, token, s->hidden);
    add_values(s, token_of(s, g->scratch->normed, token, s->hidden), x, s->hidden);
    const void *y = token_of(s, g->scratch->qkv, token, s->hidden);
    add_norm_row(s, y, *g->norm, x, s->hidden, s->eps, 1.0f, RMS_NORM);
}

static void add_input_token(const Glue *g, int64_t token) {
    const Step *s = g->step;
    const void *y = token_of(s, g->scratch->normed, token, s->hidden);
    for (int64_t stream = 1; stream < s->num_streams; stream++)
        add_norm_row(s, y, *g->norm, stream_of(s, token, stream), s->hidden, s->eps, 1.0f, RMS_NORM);
}

/* ---- the step ---------------------------------------------------------------------------------- */

void open_streams(const Glue *g) {
    const Step *s = g->step;
    Linear l = product_of(s, s->x, s->hidden, s->spread, stream_of(s, 0, 1),
                          (s->num_streams - 1) * s->hidden);
    l.y_stride = s->num_streams * s->hidden;
    multiply(s, &l, s->spread);
    for_tokens(g, NULL, spread_token);
}

void close_streams(const Glue *g) {
    const Step *s = g->step;
    for (int64_t stream = 1; stream < s->num_streams; stream++) {
        Projection by = s->gather[stream - 1];
        Linear l = product_of(s, stream_of(s, 0, stream), s->hidden, by, stream_of(s, 0, stream - 1),
                              s->hidden);
        l.x_stride = l.y_stride = s->num_streams * s->hidden;
        multiply(s, &l, by);
    }
    for_tokens(g, NULL, gather_token);
}

void predict_streams(const Glue *g) { for_tokens(g, NULL, predict_token); }

void add_laurel(const Glue *g) {
    const Step *s = g->step;
    const Scratch *t = g->scratch;
    const AltUp *u = g->layer->altup;
    project(s, t->normed, s->hidden, u->laurel_left, NULL, t->gated, u->laurel_rank);
    project(s, t->gated, u->laurel_rank, u->laurel_right, NULL, t->qkv, s->hidden);
    for_tokens(g, &u->laurel_norm, add_laurel_token);
}

const void *correct_streams(const Glue *g) {
    for_tokens(g, NULL, correct_token);
    return g->scratch->normed;
}

void add_input_to_streams(const Glue *g) {
    const Step *s = g->step;
    const Layer *layer = g->layer;
    project(s, g->scratch->gated, s->input_size, layer->input_projection, NULL, g->scratch->normed,
            s->hidden);
    for_tokens(g, &layer->input_post_norm, add_input_token);
}
