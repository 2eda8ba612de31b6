/* The gates of MLPs: see core/runtime/kernels/gated.py. */
#pragma once

#include "kernels.h"

/* silu(x), or gelu(x) by tanh: both are x times a logistic function. */
INLINE vec activate(vec x, int activation) {
    const float slope = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
    vec z = activation == SILU ? x : (x + 0.044715f * (x * x * x)) * slope;
    return x / (1.0f + exp_vec(-z));
}

INLINE vec gate_lanes(vec x, vec up, const Gate *g) {
    if (g->activation != CLAMPED_SILU) return activate(x, g->activation) * up;
    vec most = splat(g->limit);
    x = blend(x > most, most, x);
    up = blend(up > most, most, blend(up < -most, -most, up));
    return x / (1.0f + exp_vec(-x * g->alpha)) * (up + 1.0f);
}

/* y[size] = act(gate) * up, which are the halves of `gate_up`. */
INLINE void gate_as(const void *gate_up, void *y, int64_t size, const Gate *g, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec up = load_as(gate_up, size + i, dtype);
        store_as(y, i, gate_lanes(load_as(gate_up, i, dtype), up, g), dtype);
    }
    for (; i < size; i++) {
        vec x = splat(read_as(gate_up, i, dtype)), up = splat(read_as(gate_up, size + i, dtype));
        write_as(y, i, gate_lanes(x, up, g)[0], dtype);
    }
}

static void gate_row(const void *gate_up, void *y, int64_t size, const Gate *g, int dtype) {
    if (dtype == FLOAT32)
        gate_as(gate_up, y, size, g, FLOAT32);
    else
        gate_as(gate_up, y, size, g, BFLOAT16);
}
