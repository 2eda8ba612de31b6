/* The threshold of top-k and top-p: see nucleus.c. */
#pragma once

#include <stdint.h>

/* The least weight that is kept, of `size` weights of at most 1 that add up to `mass`.
 * 0 < top_k < size, or 0: off; top_p >= 1: off. `scratch` is as large as `weights`. */
float find_threshold(const float *weights, int64_t size, double mass, int64_t top_k, float top_p,
                     float *scratch);
