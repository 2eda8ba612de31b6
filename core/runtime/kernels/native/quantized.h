/* Products of rows quantized to bytes with weights in blocks: see quantized.c. */
#pragma once

#include "blocks.h"

#define TASK_ROWS 192 /* of a task: a multiple of the rows of every loop */

/* Quantize rows of x into `quantized`. */
void quantize_rows(const Linear *l);

/* sums[num][PANEL] += the products of `num` quantized rows, from `row` on, with a panel. */
void sum_blocks(const Linear *l, const Weight *weight, int64_t panel, int64_t row, int num,
                float *sums);
