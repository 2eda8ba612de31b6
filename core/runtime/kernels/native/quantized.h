/* Products of rows quantized to bytes with weights in blocks: see quantized.c. */
#pragma once

#include "blocks.h"

#define TASK_ROWS 192 /* of a task: a multiple of the rows of every loop */

/* Tasks of several products, one after the other: `ends` has the end of those of each. */
typedef struct {
    const Linear *linears;
    const int64_t *ends;
    int64_t num;
} Tasks;

/* The product of a task, whose index becomes that among its own. */
INLINE const Linear *linear_of(const Tasks *t, int64_t *index) {
    int64_t low = 0, high = t->num - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (t->ends[middle] > *index)
            high = middle;
        else
            low = middle + 1;
    }
    if (low) *index -= t->ends[low - 1];
    return &t->linears[low];
}

/* Quantize the rows of products with weights in blocks into their `quantized`. */
void quantize_rows(const Linear *l, int64_t num);

/* sums[num][PANEL] += the products of `num` quantized rows, from `row` on, with a panel. */
void sum_blocks(const Linear *l, const Weight *weight, int64_t panel, int64_t row, int num,
                float *sums);
