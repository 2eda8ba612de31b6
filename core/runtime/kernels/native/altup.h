/* Several residual streams of a decoder. */
#pragma once

#include "glue.h"

#define LAUREL_SCALE 0.7071067811865476f /* of attention and the low-rank path together */

/* Make all streams of the embedded tokens. */
void open_streams(const Glue *g);

/* Make the hidden state of all streams of the last layer. */
void close_streams(const Glue *g);

/* Predict all streams of a layer. */
void predict_streams(const Glue *g);

/* Add the low-rank path of normed. */
void add_laurel(const Glue *g);

/* Correct all streams by what the layer has computed. Returns the input of its gate. */
const void *correct_streams(const Glue *g);

/* Add the layer's gated input to all streams but the first. */
void add_input_to_streams(const Glue *g);
