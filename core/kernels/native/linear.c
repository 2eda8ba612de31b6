/* y = x W^T (+ bias) (+ residual) in bfloat16, summed in float32; the weight packed by `pack_weight`.
 *
 * A weight is cut into panels of PANEL outputs, each [num_inputs / 2][PANEL][2]: the order in which
 * the processor's bfloat16 dot product reads it, so one row streams a weight from memory once and
 * more rows reuse a panel from cache. Every sum runs over the inputs in order, whatever the number
 * of rows, so a row's result does not depend on its batch mates.
 */
#include "kernels.h"

#define PANEL 32
#define ROWS 12

/* Not where there are AMX tiles: oneDNN drives those, and is faster from a few rows on. */
#if HAS_BF16_DOT && !defined(__AMX_BF16__)
int has_packed_linear(void) { return 1; }
#else
int has_packed_linear(void) { return 0; }
#endif

/* Outputs are filled up to a whole panel with zeros; `num_inputs` is even. */
void pack_weight(const bf16 *weight, int64_t num_outputs, int64_t num_inputs, bf16 *packed) {
    for (int64_t panel = 0; panel * PANEL < num_outputs; panel++)
        for (int64_t i = 0; i < num_inputs; i += 2)
            for (int64_t j = 0; j < PANEL; j++, packed += 2) {
                int64_t from = (panel * PANEL + j) * num_inputs + i;
                int is_stored = panel * PANEL + j < num_outputs;
                packed[0] = is_stored ? weight[from] : 0;
                packed[1] = is_stored ? weight[from + 1] : 0;
            }
}

#if HAS_BF16_DOT
static void finish_row(const Linear *l, int64_t row, int64_t first, vec low, vec high) {
    int64_t at = row * l->num_outputs + first;
    int count = (int)(l->num_outputs - first < PANEL ? l->num_outputs - first : PANEL);
    float sums[PANEL];
    store(sums, low);
    store(sums + LANES, high);
    if (count == PANEL) {
        for (int j = 0; j < PANEL; j += LANES) {
            vec y = load(sums + j);
            if (l->bias) y += load_bf16(l->bias + first + j);
            if (l->residual) y += load_bf16(l->residual + at + j);
            store_bf16(l->y + at + j, y);
        }
        return;
    }
    for (int j = 0; j < count; j++) {
        float y = sums[j];
        if (l->bias) y += read_as(l->bias, first + j, BFLOAT16);
        if (l->residual) y += read_as(l->residual, at + j, BFLOAT16);
        write_as(l->y, at + j, y, BFLOAT16);
    }
}

INLINE void project_rows(const Linear *l, const bf16 *panel, int64_t row, const int num,
                         int64_t first) {
    vec acc[ROWS][2];
    const bf16 *x = l->x + row * l->num_inputs;
    for (int m = 0; m < num; m++) acc[m][0] = acc[m][1] = splat(0.0f);
    for (int64_t i = 0; i < l->num_inputs; i += 2) {
        __m512bh w0 = (__m512bh)load_bits(panel + i * PANEL);
        __m512bh w1 = (__m512bh)load_bits(panel + i * PANEL + 2 * LANES);
        for (int m = 0; m < num; m++) {
            int32_t pair;
            memcpy(&pair, x + m * l->num_inputs + i, sizeof pair);
            __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
            acc[m][0] = (vec)_mm512_dpbf16_ps((__m512)acc[m][0], xs, w0);
            acc[m][1] = (vec)_mm512_dpbf16_ps((__m512)acc[m][1], xs, w1);
        }
    }
    for (int m = 0; m < num; m++) finish_row(l, row + m, first, acc[m][0], acc[m][1]);
}

static void project_panel(const Linear *l, int64_t index) {
    const bf16 *panel = l->weight + index * PANEL * l->num_inputs;
    int64_t first = index * PANEL, row = 0;
    for (; row + ROWS <= l->num_rows; row += ROWS) project_rows(l, panel, row, ROWS, first);
    switch (l->num_rows - row) {
#define CASE(N)                                  \
    case N:                                      \
        project_rows(l, panel, row, N, first);   \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
    }
}

void linear(const Linear *l) {
    int64_t num_panels = (l->num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(l->num_threads) schedule(static)
    for (int64_t index = 0; index < num_panels; index++) project_panel(l, index);
}
#else
void linear(const Linear *l) { (void)l; } /* never called: has_packed_linear() is 0 */
#endif
