// Convolutions whose weights are streams of (offset, value): one entry for each weight that is not zero.
#include "steps.h"

// A tile of TH x TW output vectors for G output channels at once: G * TH * TW sums stay in registers. A sparse group
// has a stream for each of its channels, of equal length (padded with zeros) and interleaved; the channels of a dense
// group share their offsets and so each load. Input channels come in blocks that fit the L1 cache. The last tile of a
// row or column overlaps the one before rather than to stick out.
#define TILES(t, n, T)                                                                                               \
  for (int t = 0, t##_next; t < (n) && (t##_next = t + (T), 1);                                                      \
       t = t##_next > (n) - (T) && t##_next < (n) ? (n) - (T) : t##_next)
#define EACH(G, T) UNROLL for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < T; i++)
#define CONV(NAME, TH, TW, STRIDE, G, LOOP)                                                                          \
  static void NAME(const step_t *s, char *arena, int first, int last) {                                              \
    enum { T = TH * TW };                                                                                            \
    const int64_t pin = pitch(&s->in), pout = pitch(&s->out), pother = pitch(&s->other), sx = STRIDE;                \
    const uint16_t *const offsets = s->offsets;                                                                      \
    const float *const values = s->values;                                                                           \
    const char *input = origin(&s->in, arena) - s->py * pin - (int64_t)s->px * VB;                                   \
    TILES(ty, s->out.bh, TH) TILES(tx, s->out.bw, TW) for (int b = 0; b < s->blocks; b++) {                          \
      const char *x = input + b * s->block + ty * s->sy * pin + tx * sx * VB, *row[TH];                              \
      UNROLL for (int i = 0; i < TH; i++) row[i] = x + i * s->sy * pin;                                              \
      const int32_t *starts = s->starts + (int64_t)b * (s->groups + 1);                                              \
      const int activation = b == s->blocks - 1 ? s->activation : LINEAR_UNIT;                                       \
      char *tile = origin(&s->out, arena) + ty * pout + (int64_t)tx * VB, *y[G];                                     \
      const char *other = origin(&s->other, arena) + ty * pother + (int64_t)tx * VB, *z[G];                          \
      for (int o = first; o < last; o++) {                                                                           \
        const int32_t *id = s->ids + ((int64_t)b * s->groups + o) * G;                                               \
        vf sum[G][T];                                                                                                \
        UNROLL for (int g = 0; g < G; g++) y[g] = tile + id[g] * s->out.channel;                                     \
        if (b) EACH(G, T) sum[g][i] = LOAD(y[g] + i / TW * pout + i % TW * VB);                                      \
        else if (s->residual) {                                                                                      \
          UNROLL for (int g = 0; g < G; g++) z[g] = other + id[g] * s->other.channel;                                \
          EACH(G, T) sum[g][i] = s->bias[id[g]] + LOAD(z[g] + i / TW * pother + i % TW * VB);                        \
        } else EACH(G, T) sum[g][i] = (vf){0} + s->bias[id[g]];                                                      \
        LOOP(TH, TW, G)                                                                                              \
        if (activation == RELU) EACH(G, T) sum[g][i] = relu(sum[g][i]);                                              \
        else if (activation == GENERAL) EACH(G, T) sum[g][i] = activate(s, sum[g][i]);                               \
        EACH(G, T) STORE(y[g] + i / TW * pout + i % TW * VB, sum[g][i]);                                             \
      }                                                                                                              \
    }                                                                                                                \
  }
#define SPARSE(TH, TW, G)                                                                                            \
  for (int64_t k = starts[o], end = starts[o + 1]; k < end; k += G) UNROLL for (int g = 0; g < G; g++) {             \
    const float w = values[k + g];                                                                                \
    const int64_t at = (int64_t)offsets[k + g] * UNIT;                                                            \
    UNROLL for (int i = 0; i < TH * TW; i++) sum[g][i] += w * LOAD(row[i / TW] + at + i % TW * sx * VB);             \
  }
#define DENSE(TH, TW, G)                                                                                             \
  for (int64_t k = starts[o], end = starts[o + 1]; k < end; k++) {                                                   \
    const int64_t at = (int64_t)offsets[k] * UNIT;                                                                \
    vf x[TH * TW];                                                                                                   \
    UNROLL for (int i = 0; i < TH * TW; i++) x[i] = LOAD(row[i / TW] + at + i % TW * sx * VB);                       \
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < TH * TW; i++)                                      \
      sum[g][i] += values[k * G + g] * x[i];                                                                      \
  }

#define SUMS(T) (ACCUMULATORS / (T))
#define KERNELS(KERNEL, LOOP, TH, TW)                                                                                \
  CONV(KERNEL##_##TH##x##TW##_1, TH, TW, 1, SUMS(TH * TW), LOOP)                                                     \
  CONV(KERNEL##_##TH##x##TW##_2, TH, TW, 2, SUMS(TH * TW), LOOP)                                                     \
  CONV(KERNEL##_##TH##x##TW##_n, TH, TW, s->sx, SUMS(TH * TW), LOOP)
#define ROW(KERNEL, DENSE, TH, TW)                                                                                   \
  {KERNEL##_##TH##x##TW##_1, TH, TW, 1, DENSE}, {KERNEL##_##TH##x##TW##_2, TH, TW, 2, DENSE},                        \
      {KERNEL##_##TH##x##TW##_n, TH, TW, 0, DENSE}
#if ACCUMULATORS == 16
#define FOR_LARGE(F, ...) F(__VA_ARGS__, 2, 7) F(__VA_ARGS__, 4, 4) F(__VA_ARGS__, 2, 8)
#else
#define FOR_LARGE(F, ...)
#endif
KERNELS(sparse, SPARSE, 1, 1) KERNELS(sparse, SPARSE, 1, 2) KERNELS(sparse, SPARSE, 2, 2) KERNELS(sparse, SPARSE, 1, 4)
KERNELS(sparse, SPARSE, 1, 7) KERNELS(sparse, SPARSE, 2, 4)
KERNELS(dense, DENSE, 1, 1) KERNELS(dense, DENSE, 1, 2) KERNELS(dense, DENSE, 2, 2) KERNELS(dense, DENSE, 1, 4)
FOR_LARGE(KERNELS, sparse, SPARSE)

typedef struct { void (*run)(const step_t *, char *, int, int); int32_t th, tw, stride, dense; } kernel_t;
static const kernel_t kernels[] = {
    ROW(sparse, 0, 1, 1), ROW(sparse, 0, 1, 2), ROW(sparse, 0, 2, 2), ROW(sparse, 0, 1, 4),
    ROW(sparse, 0, 1, 7), ROW(sparse, 0, 2, 4),
    ROW(dense, 1, 1, 1),  ROW(dense, 1, 1, 2),  ROW(dense, 1, 2, 2),  ROW(dense, 1, 1, 4),
#if ACCUMULATORS == 16
    ROW(sparse, 0, 2, 7), ROW(sparse, 0, 4, 4), ROW(sparse, 0, 2, 8),
#endif
};

void convolve(const step_t *s, const call_t *call, int part, int end) {
  kernels[s->kernel].run(s, call->arena, s->group_of[part], s->group_of[end]);
}

// Describe kernel number `index` as (tile height, tile width, stride or 0 for any, dense, group); 0 when there is none.
int kernel(int index, int32_t *is) {
  if (index < 0 || index >= (int)(sizeof kernels / sizeof *kernels)) return 0;
  const kernel_t *k = &kernels[index];
  const int32_t row[] = {k->th, k->tw, k->stride, k->dense, SUMS(k->th * k->tw)};
  memcpy(is, row, sizeof row);
  return 1;
}
