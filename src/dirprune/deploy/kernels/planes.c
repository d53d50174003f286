// What happens to images besides convolutions.
#include "steps.h"

#if defined(__clang__) && LANES >= 8
#include <immintrin.h>
#endif
static inline vi permuted(vi v, vi lane) {
#if !defined(__clang__)
  return __builtin_shuffle(v, lane);
#elif LANES == 16
  return (vi)_mm512_permutexvar_epi32((__m512i)lane, (__m512i)v);
#elif LANES == 8
  return (vi)_mm256_permutevar8x32_epi32((__m256i)v, (__m256i)lane);
#else
  vi r;
  for (int l = 0; l < LANES; l++) r[l] = v[lane[l]];
  return r;
#endif
}
static int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// List what completes a channel of `p`: borders from the neighbouring blocks, `fill` outside the image. Returns the
// number of moves, and of tables in *count; `move` and `tables` have room for one each for every vector of a channel.
int frame_moves(const planes_t *p, move_t *move, table_t *tables, int32_t *count) {
  const int row = p->left + p->bw + p->right;
  int n = 0, known = 0;
  for (int y = -p->top; y < p->bh + p->bottom; y++)
    for (int x = -p->left; x < p->bw + p->right; x++) {
      const int dy = floor_div(y, p->bh), dx = floor_div(x, p->bw);
      const int from_y = y - dy * p->bh, from_x = x - dx * p->bw;
      table_t t;
      int same = dy == 0 && dx == 0;
      for (int l = 0; l < LANES; l++) {
        const int by = l / GX + dy, bx = l % GX + dx, py = by * p->bh + from_y, px = bx * p->bw + from_x;
        const int inside = by >= 0 && by < GY && bx >= 0 && bx < GX && py < p->height && px < p->width;
        t.lane[l] = inside ? by * GX + bx : 0;
        t.keep[l] = -inside;
        t.fill[l] = inside ? 0 : p->fill;
        same &= inside;
      }
      if (same) continue;
      int at = 0;
      while (at < known && memcmp(&tables[at], &t, sizeof t)) at++;
      if (at == known) tables[known++] = t;
      move[n++] = (move_t){(p->top + y) * row + p->left + x, (p->top + from_y) * row + p->left + from_x, at};
    }
  *count = known;
  return n;
}

// Complete channels that a step has just written; the moves within the block come from the vectors themselves, so
// that their order does not matter.
void frame(const step_t *s, const call_t *call, int part, int end) {
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++) {
    char *channel = call->arena + s->out.base + c * s->out.channel;
    for (int m = 0; m < s->moves; m++) {
      const move_t *move = &s->move[m];
      const table_t *t = &s->tables[move->table];
      const vi v = permuted((vi)LOAD(channel + (int64_t)move->from * VB), t->lane);
      STORE(channel + (int64_t)move->to * VB, (vf)((v & t->keep) | (vi)t->fill));
    }
  }
}

// Maximum, or with `scale` average, of a window that slides over the image; `scale` has
// a vector for each vector of the output.
void pool(const step_t *s, const call_t *call, int part, int end) {
  const int64_t pin = pitch(&s->in), pout = pitch(&s->out);
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++) {
    const char *input = origin(&s->in, call->arena) + c * s->in.channel - s->py * pin - (int64_t)s->px * VB;
    char *out = origin(&s->out, call->arena) + c * s->out.channel;
    for (int y = 0; y < s->out.bh; y++)
      for (int x = 0; x < s->out.bw; x++) {
        const char *corner = input + y * s->sy * pin + (int64_t)x * s->sx * VB;
        vf v = LOAD(corner);
        for (int i = 0; i < s->kh; i++)
          for (int j = !i; j < s->kw; j++) {
            const vf w = LOAD(corner + i * pin + (int64_t)j * VB);
            if (s->scale) v += w;
            else v = pick((v >= w) | (v != v), v, w);
          }
        if (s->scale) v *= *(const vf *)(s->scale + ((int64_t)y * s->out.bw + x) * LANES);
        STORE(out + y * pout + (int64_t)x * VB, activate(s, v));
      }
  }
}

// The average of each channel's whole image: vectors first, then their lanes.
static void mean(const step_t *s, const call_t *call, int first, int last) {
  const planes_t *in = &s->in;
  for (int c = first; c < last; c++) {
    const char *channel = origin(in, call->arena) + c * in->channel;
    vf sum = {0};
    float total = 0;
    for (int y = 0; y < in->bh; y++)
      for (int x = 0; x < in->bw; x++) sum += LOAD(channel + y * pitch(in) + (int64_t)x * VB);
    for (int l = 0; l < LANES; l++) total += sum[l];
    AT(pixel(&s->out, call->arena, c, 0, 0)) = total / ((float)in->height * in->width);
  }
}

// Average (dense = 1) or maximum of the parts of an image that make up height x width pixels of the output.
void adapt(const step_t *s, const call_t *call, int part, int end) {
  const planes_t *in = &s->in, *out = &s->out;
  const int first = s->channel_of[part], last = s->channel_of[end];
  if (s->dense && out->height == 1 && out->width == 1 && in->fill == 0) {
    mean(s, call, first, last);
    return;
  }
  for (int c = first; c < last; c++)
    for (int y = 0; y < out->height; y++)
      for (int x = 0; x < out->width; x++) {
        const int64_t y0 = (int64_t)y * in->height / out->height, x0 = (int64_t)x * in->width / out->width;
        const int64_t y1 = ((int64_t)(y + 1) * in->height + out->height - 1) / out->height;
        const int64_t x1 = ((int64_t)(x + 1) * in->width + out->width - 1) / out->width;
        float sum = 0, most = AT(pixel(in, call->arena, c, (int)y0, (int)x0));
        for (int64_t i = y0; i < y1; i++)
          for (int64_t j = x0; j < x1; j++) {
            const float v = AT(pixel(in, call->arena, c, (int)i, (int)j));
            sum += v;
            if (v > most || v != v) most = v;
          }
        AT(pixel(out, call->arena, c, y, x)) = s->dense ? sum / (float)((y1 - y0) * (x1 - x0)) : most;
      }
}

// activation(scale * image + bias + other), channel by channel.
void pointwise(const step_t *s, const call_t *call, int part, int end) {
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++) {
    const char *in = origin(&s->in, call->arena) + c * s->in.channel;
    const char *other = origin(&s->other, call->arena) + c * s->other.channel;
    char *out = origin(&s->out, call->arena) + c * s->out.channel;
    for (int y = 0; y < s->out.bh; y++)
      for (int x = 0; x < s->out.bw; x++) {
        vf v = LOAD(in + y * pitch(&s->in) + (int64_t)x * VB);
        if (s->scale) v = v * s->scale[c] + s->bias[c];
        if (s->residual) v += LOAD(other + y * pitch(&s->other) + (int64_t)x * VB);
        STORE(out + y * pitch(&s->out) + (int64_t)x * VB, activate(s, v));
      }
  }
}

// The same image in blocks of another size, or with something else around it. `ids` says for each lane of each vector
// of a block where its pixel lies in a channel of the input, in floats.
void relay(const step_t *s, const call_t *call, int part, int end) {
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++) {
    const float *in = (const float *)(origin(&s->in, call->arena) + c * s->in.channel);
    char *out = origin(&s->out, call->arena) + c * s->out.channel;
    const int32_t *from = s->ids;
    for (int y = 0; y < s->out.bh; y++)
      for (int x = 0; x < s->out.bw; x++, from += LANES) {
        vf v;
        for (int l = 0; l < LANES; l++) v[l] = AT(in + from[l]);
        STORE(out + y * pitch(&s->out) + (int64_t)x * VB, v);
      }
  }
}

// From the plain images of input number `kernel` to blocks.
void place(const step_t *s, const call_t *call, int part, int end) {
  const planes_t *p = &s->out;
  const int64_t size = (int64_t)p->height * p->width;
  const float *image = call->inputs[s->kernel] + call->item * p->channels * size;
  for (int c = s->channel_of[part]; c < s->channel_of[end]; c++)
    for (int y = 0; y < p->height; y++) {
      const float *row = image + c * size + (int64_t)y * p->width;
      for (int x0 = 0; x0 < p->width; x0 += p->bw) {
        char *to = (char *)pixel(p, call->arena, c, y, x0);
        for (int x = x0; x < p->width && x < x0 + p->bw; x++, to += VB) AT(to) = row[x];
      }
    }
}

// From blocks to the plain images of output number `kernel`.
void take(const step_t *s, const call_t *call, int part, int end) {
  const planes_t *p = &s->in;
  const int64_t size = (int64_t)p->height * p->width;
  const int first = s->channel_of[part], n = s->channel_of[end] - first;
  float *image = call->outputs[s->kernel] + (call->item * p->channels + first) * size;
  for (int y = 0; y < p->height; y++)
    for (int x = 0; x < p->width; x++) {
      const char *from = (const char *)pixel(p, call->arena, first, y, x);
      for (int c = 0; c < n; c++) image[c * size + (int64_t)y * p->width + x] = AT(from + c * p->channel);
    }
}
