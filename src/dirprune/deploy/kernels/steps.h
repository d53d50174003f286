// The steps of a program. Each runs the parts [part, end) of its work: ranges of channels, or of slices of a matrix.
#pragma once
#include "lanes.h"
void convolve(const step_t *, const call_t *, int part, int end);
void frame(const step_t *, const call_t *, int part, int end);  // completes what a step has written
void pool(const step_t *, const call_t *, int part, int end);
void adapt(const step_t *, const call_t *, int part, int end);
void pointwise(const step_t *, const call_t *, int part, int end);
void relay(const step_t *, const call_t *, int part, int end);
void place(const step_t *, const call_t *, int part, int end);
void take(const step_t *, const call_t *, int part, int end);
void multiply(const step_t *, const call_t *, int part, int end);
void combine(const step_t *, const call_t *, int part, int end);
void gather_rows(const step_t *, const call_t *, int part, int end);
void scatter_rows(const step_t *, const call_t *, int part, int end);
