/* The activations of MLPs: see core/runtime/kernels/gated.py. */
#pragma once

#include "kernels.h"

/* silu(x), or gelu(x) by tanh, which are x times a logistic function; or relu(x)^2. */
INLINE vec activate(vec x, int activation) {
    const float slope = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
    if (activation == RELU2) {
        vec positive = blend(x > 0.0f, x, splat(0.0f));
        return positive * positive;
    }
    vec z = activation == SILU ? x : (x + 0.044715f * (x * x * x)) * slope;
    return x / (1.0f + exp_vec(-z));
}

INLINE vec xielu(vec x, const Gate *g) {
    vec least = blend(x < g->eps, x, splat(g->eps));
    vec below = (exp_vec(least) - 1.0f - x) * g->negative;
    return blend(x > 0.0f, x * x * g->alpha, below) + x * g->beta;
}

INLINE vec gate_lanes(vec x, vec up, const Gate *g) {
    x *= g->in_scale;
    if (g->activation == XIELU) return xielu(x, g) * up;
    if (g->activation != CLAMPED_SILU) return activate(x, g->activation) * up;
    vec most = splat(g->limit);
    x = blend(x > most, most, x);
    up = blend(up > most, most, blend(up < -most, -most, up));
    return x / (1.0f + exp_vec(-x * g->alpha)) * (up + 1.0f);
}

/* y[size] = gate(x, up) * scale; without `up` it is 1. */
INLINE void gate_as(const void *x, const void *up, void *y, int64_t size, Gate g, float scale,
                    const int dtype) {
    int64_t i = 0;
    scale *= g.out_scale;
    for (; i + LANES <= size; i += LANES) {
        vec factor = up ? load_as(up, i, dtype) : splat(1.0f);
        store_as(y, i, gate_lanes(load_as(x, i, dtype), factor, &g) * scale, dtype);
    }
    for (; i < size; i++) {
        vec factor = splat(up ? read_as(up, i, dtype) : 1.0f);
        write_as(y, i, gate_lanes(splat(read_as(x, i, dtype)), factor, &g)[0] * scale, dtype);
    }
}

static void gate_values(const void *x, const void *up, void *y, int64_t size, const Gate *g,
                        float scale, int dtype) {
    if (dtype == FLOAT32)
        gate_as(x, up, y, size, *g, scale, FLOAT32);
    else
        gate_as(x, up, y, size, *g, scale, BFLOAT16);
}

/* The gate and its factor are the halves of `gate_up`; without a gate it is only activated. */
INLINE void gate_row(const void *gate_up, void *y, int64_t size, const Gate *g, int has_gate, int dtype) {
    const char *up = has_gate ? (const char *)gate_up + size * size_of(dtype) : NULL;
    gate_values(gate_up, up, y, size, g, 1.0f, dtype);
}
