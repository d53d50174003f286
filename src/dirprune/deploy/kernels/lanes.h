// How images lie in memory. A vector of LANES floats holds the same pixel of a GY x GX grid of blocks of one image:
// lane (by, bx) of vector (y, x) is pixel (by * bh + y, bx * bw + x). A neighbouring pixel is then another vector,
// never another lane, so that every tap of every convolution is one aligned load. Around a block lies a border, which
// repeats the pixels of the neighbouring blocks; the step that writes an image also writes its border.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES == 16 || defined(__aarch64__)
#define ACCUMULATORS 16  // vectors that stay in registers while a tile is summed
#else
#define ACCUMULATORS 8
#endif
#define GX (LANES == 4 ? 2 : 4)
#define GY (LANES / GX)
#define VB (LANES * 4)  // bytes of a vector
#define UNIT 8          // offsets in a stream count 8 bytes, which an address can scale by for nothing
#define UNROLL _Pragma("GCC unroll 32")

typedef float vf __attribute__((vector_size(VB), may_alias));
typedef int32_t vi __attribute__((vector_size(VB), may_alias));

#ifdef CHECKED  // debugging: every access is compared with the memory that the plan allowed
char *checked(const void *p, int64_t size);
#else
#define checked(p, size) ((char *)(p))
#endif
#define LOAD(p) (*(const vf *)checked(p, VB))
#define STORE(p, v) (*(vf *)checked(p, VB) = (v))
#define AT(p) (*(float *)checked(p, 4))

typedef struct {
  int64_t base, channel;             // bytes: from the arena to the first channel; from one channel to the next
  int32_t channels, height, width;   // of the image
  int32_t bh, bw;                    // of a block
  int32_t top, left, bottom, right;  // of the border, in vectors
  float fill;                        // what stands outside the image
} planes_t;

typedef struct { int32_t to, from, table; } move_t;  // vectors of a channel: one is copied to another through a table
typedef struct { vi lane, keep; vf fill; } table_t;   // where lanes come from, which of them are kept, what the rest is

enum { LINEAR_UNIT, RELU, GENERAL };  // activations

typedef struct {
  int32_t kind, kernel, blocks, groups, activation, residual, moves, dense;
  int32_t kh, kw, sy, sx, py, px;  // of a window
  float low, high, slope;          // GENERAL: below low the slope, above high constant
  planes_t in, out, other;         // in rows: base and channels alone
  int64_t block;                   // bytes from one block of input channels to the next
  const uint16_t *offsets;
  const float *values, *bias, *scale;
  const int32_t *starts, *ids, *group_of, *channel_of;  // the last two: where each thread's part begins
  const move_t *move;
  const table_t *tables;
} step_t;

typedef struct {
  char *arena;
  const float *const *inputs;
  float *const *outputs;
  int64_t item;           // which image, or which chunk of rows
  int32_t rows, vectors;  // of a chunk of rows; no vectors: a single row, plain
} call_t;

static inline int64_t pitch(const planes_t *p) { return (int64_t)(p->left + p->bw + p->right) * VB; }
static inline char *origin(const planes_t *p, char *arena) {
  return arena + p->base + p->top * pitch(p) + (int64_t)p->left * VB;
}
static inline float *pixel(const planes_t *p, char *arena, int c, int y, int x) {
  char *vector = origin(p, arena) + c * p->channel + (y % p->bh) * pitch(p) + (int64_t)(x % p->bw) * VB;
  return (float *)vector + y / p->bh * GX + x / p->bw;
}
static inline vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
static inline vf relu(vf v) { return (vf)((vi)v & ~(v < (vf){0})); }  // a NaN stays one
static inline vf activate(const step_t *s, vf v) {
  const vf z = {0};
  if (s->activation == LINEAR_UNIT) return v;
  if (s->activation == RELU) return relu(v);
  v = pick(v < z + s->low, z + s->low + s->slope * (v - s->low), v);
  return pick(v > z + s->high, z + s->high, v);
}
