/* Products of rows quantised to bytes with weights in blocks: see quantised.c. */
#pragma once

#include "blocks.h"

#define TASK_ROWS 192 /* that one task projects: a multiple of the rows of every loop */

/* Fill `quantised`. */
void quantise_rows(const Linear *l);

/* sums[num][PANEL] += the products of `num` quantised rows, from `row` on, with a panel. */
void sum_blocks(const Linear *l, const Weight *weight, int64_t panel, int64_t row, int num,
                float *sums);
