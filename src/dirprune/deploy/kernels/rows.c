// Linear layers. A chunk of rows (tokens, or examples) lies in the arena plain if it is a single row, and otherwise
// feature by feature, each with `vectors` vectors whose lanes are rows.
#include "steps.h"

typedef float quad __attribute__((vector_size(16), may_alias));
static inline int64_t floats(const call_t *call) { return call->vectors ? (int64_t)call->vectors * LANES : 1; }
static inline char *at(const planes_t *p, const call_t *call) { return call->arena + p->base * floats(call) * 4; }

// The sums of a sparse slice for one row. Four inputs at a time are picked by plain loads: 1.6 times as fast as a gather
// where that is microcoded, and never much slower. There are four sums at least, to hide the latency of an addition.
static vf picked(const step_t *s, const float *x, int slice) {
  enum { QUADS = LANES / 4, ROUNDS = 4 / QUADS };
  quad sum[ROUNDS][QUADS] = {{{0}}};
  const float *w = s->values + (int64_t)s->starts[slice] * LANES;
  const uint16_t *c = s->offsets + (int64_t)s->starts[slice] * LANES;
  const int n = s->starts[slice + 1] - s->starts[slice];
#define PICK(R, K)                                                                                                   \
  UNROLL for (int q = 0; q < QUADS; q++) {                                                                           \
    uint64_t at;                                                                                                     \
    memcpy(&at, c + (int64_t)(K) * LANES + 4 * q, sizeof at);                                                        \
    sum[R][q] += *(const quad *)(w + (int64_t)(K) * LANES + 4 * q)                                                   \
                 * (quad){AT(x + (at & 65535)), AT(x + (at >> 16 & 65535)), AT(x + (at >> 32 & 65535)), AT(x + (at >> 48))}; \
  }
  int k = 0;
  for (; k + ROUNDS <= n; k += ROUNDS) UNROLL for (int r = 0; r < ROUNDS; r++) PICK(r, k + r)
  for (; k < n; k++) PICK(0, k)
  for (int r = 1; r < ROUNDS; r++) for (int q = 0; q < QUADS; q++) sum[0][q] += sum[r][q];
  vf v;
  memcpy(&v, sum[0], sizeof v);
  return v;
}
static vf summed(const step_t *s, const float *x, int slice) {  // the same of a dense slice
  vf sum[4] = {{0}};
  const float *w = s->values + (int64_t)s->starts[slice] * LANES;
  const int n = s->starts[slice + 1] - s->starts[slice];
  for (int k = 0; k < n; k++) sum[k & 3] += *(const vf *)(w + (int64_t)k * LANES) * AT(x + k);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One row. `ids` has -1 for what fills the last slice; biases are in the slices' order.
static void one_row(const step_t *s, const call_t *call, int first, int last) {
  const float *x = (const float *)at(&s->in, call), *other = (const float *)at(&s->other, call);
  float *y = (float *)at(&s->out, call);
  for (int slice = first; slice < last; slice++) {
    const int32_t *id = s->ids + slice * LANES;
    vf v = (s->dense ? summed(s, x, slice) : picked(s, x, slice)) + *(const vf *)(s->bias + slice * LANES);
    if (s->residual)
      for (int l = 0; l < LANES; l++)
        if (id[l] >= 0) v[l] += AT(other + id[l]);
    v = activate(s, v);
    if (id[LANES - 1] >= 0) UNROLL for (int l = 0; l < LANES; l++) AT(y + id[l]) = v[l];
    else for (int l = 0; l < LANES && id[l] >= 0; l++) AT(y + id[l]) = v[l];
  }
}

// Many rows: T vectors of rows for G outputs of a slice at once.
#define MANY(T)                                                                                                      \
  static void many_##T(const step_t *s, const call_t *call, int first, int last) {                                   \
    enum { G = ACCUMULATORS / T < LANES ? ACCUMULATORS / T : LANES };                                                \
    const int64_t feature = (int64_t)call->vectors * VB;                                                             \
    for (int t = 0, next; t < call->vectors; t = next > call->vectors - T && next < call->vectors                    \
                                                     ? call->vectors - T : next) {                                   \
      next = t + T;                                                                                                  \
      const char *x = at(&s->in, call) + (int64_t)t * VB, *other = at(&s->other, call) + (int64_t)t * VB;            \
      char *y = at(&s->out, call) + (int64_t)t * VB;                                                                 \
      for (int slice = first; slice < last; slice++)                                                                 \
        for (int lane = 0; lane < LANES; lane += G) {                                                                \
          const int32_t *id = s->ids + slice * LANES + lane;                                                         \
          vf sum[G][T];                                                                                              \
          UNROLL for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < T; i++) {                                    \
            sum[g][i] = (vf){0} + s->bias[slice * LANES + lane + g];                                                 \
            if (s->residual && id[g] >= 0) sum[g][i] += LOAD(other + id[g] * feature + i * VB);                      \
          }                                                                                                          \
          const int64_t end = (int64_t)s->starts[slice + 1] * LANES;                                                 \
          int64_t column = 0;                                                                                        \
          if (s->dense)                                                                                              \
            for (int64_t k = (int64_t)s->starts[slice] * LANES + lane; k < end; k += LANES, column++) {              \
              const char *in = x + column * feature;                                                                 \
              UNROLL for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < T; i++)                                  \
                sum[g][i] += s->values[k + g] * LOAD(in + i * VB);                                                   \
            }                                                                                                        \
          else                                                                                                       \
            for (int64_t k = (int64_t)s->starts[slice] * LANES + lane; k < end; k += LANES)                          \
              UNROLL for (int g = 0; g < G; g++) {                                                                   \
                const char *in = x + s->offsets[k + g] * feature;                                                    \
                UNROLL for (int i = 0; i < T; i++) sum[g][i] += s->values[k + g] * LOAD(in + i * VB);                \
              }                                                                                                      \
          UNROLL for (int g = 0; g < G; g++)                                                                         \
            if (id[g] >= 0) UNROLL for (int i = 0; i < T; i++)                                                       \
              STORE(y + id[g] * feature + i * VB, activate(s, sum[g][i]));                                           \
        }                                                                                                            \
    }                                                                                                                \
  }
MANY(1) MANY(2) MANY(4) MANY(8)
#if ACCUMULATORS == 16
MANY(16)
#endif

void multiply(const step_t *s, const call_t *call, int part, int end) {
  const int first = s->group_of[part], last = s->group_of[end], v = call->vectors;
  if (v == 0) one_row(s, call, first, last);
#if ACCUMULATORS == 16
  else if (v >= 16) many_16(s, call, first, last);
#endif
  else if (v >= 8) many_8(s, call, first, last);
  else if (v >= 4) many_4(s, call, first, last);
  else if (v >= 2) many_2(s, call, first, last);
  else many_1(s, call, first, last);
}

// activation(scale * x + bias + other), feature by feature.
void combine(const step_t *s, const call_t *call, int part, int end) {
  const int64_t n = floats(call);
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++)
    for (int64_t i = c * n; i < (c + 1) * n; i++) {
      float v = AT(at(&s->in, call) + i * 4);
      if (s->scale) v = v * s->scale[c] + s->bias[c];
      if (s->residual) v += AT(at(&s->other, call) + i * 4);
      AT(at(&s->out, call) + i * 4) = activate(s, (vf){0} + v)[0];
    }
}

// From the plain rows of input number `kernel`; rows that only fill the last vector are zero.
void gather_rows(const step_t *s, const call_t *call, int part, int end) {
  const int64_t n = floats(call);
  const float *rows = call->inputs[s->kernel] + call->item * s->out.channels;
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++)
    for (int64_t r = 0; r < n; r++)
      AT(at(&s->out, call) + (c * n + r) * 4) = r < call->rows ? rows[r * s->out.channels + c] : 0;
}

void scatter_rows(const step_t *s, const call_t *call, int part, int end) {
  const int64_t n = floats(call);
  float *rows = call->outputs[s->kernel] + call->item * s->in.channels;
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++)
    for (int64_t r = 0; r < call->rows; r++)
      rows[r * s->in.channels + c] = AT(at(&s->in, call) + (c * n + r) * 4);
}
