// Compares every kernel with plain loops, in C alone: for processors that are emulated and have no Python.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "lanes.h"

typedef struct {
  const step_t *steps; char *arena; const float *const *inputs; float *const *outputs; double *seconds;
  int64_t bytes, items; int32_t count, chunk, vectors;
} job_t;
typedef struct {
  int32_t out, channels, kh, kw, groups, block, blocks, group, dense, parts; int64_t channel, pitch;
} conv_t;
void *pool_open(int), pool_close(void *);
int run(void *, const job_t *), kernel(int, int32_t *), frame_moves(const planes_t *, move_t *, table_t *, int32_t *);
int64_t conv_streams(const conv_t *, const uint32_t *, const float *, int64_t, const int32_t *, uint16_t *, float *, int32_t *,
                     int32_t *);
int64_t row_streams(int32_t, int32_t, int32_t, const uint32_t *, const float *, int64_t, uint16_t *, float *, int32_t *, int32_t *);

enum { PLACE, CONV, TAKE = 6, GATHER, LINEAR, SCATTER = 10, C = 5, O = 19, MOST = 1 << 20 };
static float random_float(void) { return rand() / (float)RAND_MAX - .5f; }
static void *room(size_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }
static float w[O * 100], bias[O], values[MOST] __attribute__((aligned(64)));
static uint32_t positions[O * 100];
static float weights[O * 100];
static uint16_t offsets[MOST];
static int32_t starts[MOST], ids[MOST];
static int64_t sparse(int size) {
  int64_t n = 0;
  for (int i = 0; i < size; i++)
    if ((w[i] = rand() % 3 ? 0 : random_float()) != 0) positions[n] = i, weights[n++] = w[i];
  for (int o = 0; o < O; o++) bias[o] = random_float();
  return n;
}
static int worst(const float *found, const double *wanted, int n, const char *what) {
  for (int i = 0; i < n; i++)
    if (!(fabs(found[i] - wanted[i]) < 1e-5)) return printf("%s: %g, not %g, at %d\n", what, found[i], wanted[i], i), 1;
  return 0;
}
static void framed(step_t *s) {
  const planes_t *p = &s->out;
  const size_t n = (size_t)(p->top + p->bh + p->bottom) * (p->left + p->bw + p->right);
  int32_t count;
  move_t *move = room(n * sizeof *move);
  table_t *tables = room(n * sizeof *tables);
  s->moves = frame_moves(p, move, tables, &count), s->move = move, s->tables = tables;
}

static int convolution(void *pool, int index, const int32_t *k, int stride, int size) {
  const int h = 4 * k[0] * stride * GY - stride * 2 - 1, width = 2 * k[1] * stride * GX - 1, pad = size / 2;
  const int oh = (h + 2 * pad - size) / stride + 1, ow = (width + 2 * pad - size) / stride + 1;
  const int bh = (oh + GY - 1) / GY, bw = (ow + GX - 1) / GX;
  if (bh < k[0] || bw < k[1] || bh * stride * GY < h || bw * stride * GX < width) return 0;
  const int64_t n = sparse(O * C * size * size);
  planes_t in = {0, 0, C, h, width, bh * stride, bw * stride, pad, pad, pad, pad, 0}, out = {0, 0, O, oh, ow, bh, bw, 0, 0, 0, 0, 0};
  in.channel = (int64_t)(in.bh + 2 * pad) * (in.bw + 2 * pad) * VB, out.channel = (int64_t)bh * bw * VB;
  out.base = C * in.channel;
  const int32_t part[] = {0, O}, channels[] = {0, C}, groups[] = {0, (O + k[4] - 1) / k[4]};
  const conv_t conv = {O, C, size, size, 1, 3, 2, k[4], k[3], 1, in.channel, (int64_t)(in.bw + 2 * pad) * VB};
  conv_streams(&conv, positions, weights, n, part, offsets, values, starts, ids);
  step_t s[3] = {{.kind = PLACE, .out = in, .channel_of = channels},
                 {.kind = CONV, .kernel = index, .blocks = 2, .groups = groups[1], .activation = RELU, .dense = k[3], .kh = size,
                  .kw = size, .sy = stride, .sx = stride, .py = pad, .px = pad, .in = in, .out = out, .block = 3 * in.channel,
                  .offsets = offsets, .values = values, .bias = bias, .starts = starts, .ids = ids, .group_of = groups,
                  .channel_of = part},
                 {.kind = TAKE, .in = out, .channel_of = part}};
  framed(&s[0]), framed(&s[1]);
  float *x = room(sizeof(float) * C * h * width), *y = room(sizeof(float) * O * oh * ow);
  double *wanted = room(sizeof(double) * O * oh * ow);
  for (int i = 0; i < C * h * width; i++) x[i] = random_float();
  for (int o = 0; o < O; o++) for (int i = 0; i < oh; i++) for (int j = 0; j < ow; j++) {
    double sum = bias[o];
    for (int c = 0; c < C; c++) for (int r = 0; r < size; r++) for (int q = 0; q < size; q++) {
      const int a = i * stride - pad + r, b = j * stride - pad + q;
      if (a >= 0 && a < h && b >= 0 && b < width) sum += (double)w[((o * C + c) * size + r) * size + q] * x[(c * h + a) * width + b];
    }
    wanted[(o * oh + i) * ow + j] = sum > 0 ? sum : 0;
  }
  const int64_t bytes = out.base + O * out.channel;
  const float *inputs[] = {x};
  float *outputs[] = {y};
  const job_t job = {s, room(bytes), inputs, outputs, NULL, bytes, 1, 3, 1, 0};
  if (run(pool, &job)) return puts("outside"), 1;
  return worst(y, wanted, O * oh * ow, "convolution");
}

static int linear(void *pool, int rows, int dense) {
  enum { F = 83 };
  const int64_t n = sparse(O * F);
  row_streams(O, F, dense, positions, weights, n, offsets, values, starts, ids);
  float *sorted = room(sizeof(float) * (O + LANES));
  for (int i = 0; i < (O + LANES - 1) / LANES * LANES; i++) sorted[i] = ids[i] < 0 ? 0 : bias[ids[i]];
  const int32_t features[] = {0, F / 2, F}, out[] = {0, O / 2, O}, slices[] = {0, 1, (O + LANES - 1) / LANES};  // two threads
  const planes_t in = {.base = 0, .channels = F}, made = {.base = F, .channels = O};
  const step_t s[] = {{.kind = GATHER, .out = in, .channel_of = features},
                      {.kind = LINEAR, .dense = dense, .in = in, .out = made, .offsets = offsets, .values = values, .bias = sorted,
                       .starts = starts, .ids = ids, .group_of = slices, .channel_of = out},
                      {.kind = SCATTER, .in = made, .channel_of = out}};
  float *x = room(sizeof(float) * rows * F), *y = room(sizeof(float) * rows * O);
  double *wanted = room(sizeof(double) * rows * O);
  for (int i = 0; i < rows * F; i++) x[i] = random_float();
  for (int i = 0; i < rows * O; i++) {
    wanted[i] = bias[i % O];
    for (int f = 0; f < F; f++) wanted[i] += (double)w[i % O * F + f] * x[i / O * F + f];
  }
  const int vectors = rows > 1 ? (rows + LANES - 1) / LANES : 0, chunk = vectors ? vectors * LANES : 1;
  const int64_t bytes = ((int64_t)(F + O) * chunk * 4 + 63) / 64 * 64;
  const float *inputs[] = {x};
  float *outputs[] = {y};
  const job_t job = {s, room(2 * bytes), inputs, outputs, NULL, bytes, rows, 3, chunk, vectors};
  if (run(pool, &job)) return puts("outside"), 1;
  return worst(y, wanted, rows * O, "linear");
}

int main(void) {
  void *pool = pool_open(1), *two = pool_open(2);
  int32_t k[5];
  for (int index = 0; kernel(index, k); index++)
    for (int size = 1; size <= 3; size += 2)
      for (int stride = k[2] ? k[2] : 1; stride <= (k[2] ? k[2] : 3); stride++)
        if (convolution(pool, index, k, stride, size)) return printf("kernel %d, stride %d, size %d\n", index, stride, size), 1;
  for (int again = 0; again < 20; again++)
    for (int rows = 1; rows <= 16 * LANES; rows = rows * 2 + 1)
      for (int dense = 0; dense < 2; dense++)
        if (linear(two, rows, dense)) return printf("%d rows\n", rows), 1;
  pool_close(pool), pool_close(two);
  puts("ok");
}
