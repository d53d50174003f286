// From the weights that are not zero, as sorted positions in the whole tensor and values, to streams.
#include <stdlib.h>
#include "lanes.h"

typedef struct { int32_t length, id; } ranked_t;
static int by_length(const void *a, const void *b) {
  const ranked_t *p = a, *q = b;
  return p->length != q->length ? (p->length > q->length) - (p->length < q->length) : p->id - q->id;
}

typedef struct {
  int32_t out, in, kh, kw, groups;     // the convolution: channels out, channels in of a group, window, groups
  int32_t block, blocks, group, dense;  // input channels of a block, blocks, channels of a stream group
  int32_t parts;                        // threads that share the channels
  int64_t channel, pitch;               // bytes of the input's planes
} conv_t;

// Write one group: `ids` are its channels, `from` and `to` their ranges of weights. Returns its length.
static int64_t sparse_group(const conv_t *c, const int32_t *ids, const int64_t *from, const int64_t *to, const uint16_t *at,
                            const float *weights, uint16_t *offsets, float *values) {
  int64_t longest = 0;
  for (int g = 0; g < c->group; g++)
    if (to[ids[g]] - from[ids[g]] > longest) longest = to[ids[g]] - from[ids[g]];
  if (offsets)
    for (int g = 0; g < c->group; g++)
      for (int64_t k = 0, n = to[ids[g]] - from[ids[g]]; k < longest; k++) {
        offsets[k * c->group + g] = n ? at[from[ids[g]] + (k < n ? k : n - 1)] : 0;
        values[k * c->group + g] = k < n ? weights[from[ids[g]] + k] : 0;
      }
  return longest * c->group;
}
static int64_t dense_group(const conv_t *c, const int32_t *ids, const int64_t *from, const int64_t *to, const uint16_t *at,
                           const float *weights, uint16_t *offsets, float *values, int32_t *column) {
  int64_t n = 0;
  memset(column, -1, 65536 * sizeof *column);
  for (int g = 0; g < c->group; g++)
    for (int64_t k = from[ids[g]]; k < to[ids[g]]; k++)
      if (column[at[k]] < 0) {
        if (offsets) offsets[n] = at[k];
        column[at[k]] = n++;
      }
  if (offsets) {
    memset(values, 0, n * c->group * sizeof *values);
    for (int g = 0; g < c->group; g++)
      for (int64_t k = from[ids[g]]; k < to[ids[g]]; k++) values[column[at[k]] * c->group + g] = weights[k];
  }
  return n;
}

// Returns the number of offsets (values: as many, or `group` times as many if dense); with offsets = NULL it only
// counts. -1: no memory. `ids` and `starts` are those of step_t; `part` says where each thread's channels begin.
int64_t conv_streams(const conv_t *c, const uint32_t *positions, const float *weights, int64_t count, const int32_t *part,
                     uint16_t *offsets, float *values, int32_t *starts, int32_t *ids) {
  const uint32_t window = c->kh * c->kw, row = c->in * window;
  int64_t *from = calloc((size_t)c->out * (c->blocks + 1), sizeof *from);  // (block, channel) -> its first weight
  uint16_t *at = malloc((count + 1) * sizeof *at);
  ranked_t *ranked = malloc((c->out + 1) * sizeof *ranked);
  int32_t *column = c->dense ? malloc(65536 * sizeof *column) : NULL;
  int64_t total = -1;
  if (!from || !at || !ranked || (c->dense && !column)) goto done;
  int64_t k = 0;
  for (int o = 0; o < c->out; o++) {
    const int first = o / (c->out / c->groups) * c->in;  // the first input channel of its group
    for (int b = 0; b < c->blocks; b++) {
      from[(int64_t)b * c->out + o] = k;
      for (; k < count && positions[k] - o * row < row; k++) {
        const uint32_t p = positions[k] - o * row, tap = p % window;
        const int channel = first + p / window - b * c->block;
        if (channel >= c->block && b < c->blocks - 1) break;
        if (offsets || c->dense) at[k] = (channel * c->channel + tap / c->kw * c->pitch + tap % c->kw * VB) / UNIT;
      }
    }
    from[(int64_t)c->blocks * c->out + o] = k;
  }
  total = 0;
  int32_t *id = ids;
  for (int b = 0; b < c->blocks; b++) {
    const int64_t *begin = from + (int64_t)b * c->out, *end = begin + c->out;
    for (int t = 0; t < c->parts; t++) {
      const int n = part[t + 1] - part[t];
      for (int i = 0; i < n; i++)
        ranked[i] = (ranked_t){(int32_t)(end[part[t] + i] - begin[part[t] + i]), part[t] + i};
      if (!c->dense && c->group > 1) qsort(ranked, n, sizeof *ranked, by_length);
      for (int i = 0; i < n; i += c->group) {
        for (int g = 0; g < c->group; g++) id[g] = ranked[i + g < n ? i + g : n - 1].id;  // the last one again
        uint16_t *o = offsets ? offsets + total : NULL;
        float *v = offsets ? values + total * (c->dense ? c->group : 1) : NULL;
        *starts++ = (int32_t)total;
        total += c->dense ? dense_group(c, id, begin, end, at, weights, o, v, column)
                          : sparse_group(c, id, begin, end, at, weights, o, v);
        id += c->group;
      }
    }
    *starts++ = (int32_t)total;
  }
done:
  free(from), free(at), free(ranked), free(column);
  return total;
}

// The rows of a matrix in slices of LANES, sorted by length. Returns the number of steps of all slices.
int64_t row_streams(int32_t out, int32_t in, int32_t dense, const uint32_t *positions, const float *weights, int64_t count,
                    uint16_t *offsets, float *values, int32_t *starts, int32_t *ids) {
  int64_t *from = calloc(out + 1, sizeof *from), k = 0, total = -1;
  ranked_t *ranked = malloc((out + 1) * sizeof *ranked);
  if (!from || !ranked) goto done;
  for (int o = 0; o < out; o++) {
    from[o] = k;
    while (k < count && positions[k] / in == (uint32_t)o) k++;
    ranked[o] = (ranked_t){dense ? in : (int32_t)(k - from[o]), o};
  }
  from[out] = k;
  if (!dense) qsort(ranked, out, sizeof *ranked, by_length);
  total = 0;
  for (int o = 0; o < out; o += LANES) {
    const int lanes = out - o < LANES ? out - o : LANES, longest = ranked[o + lanes - 1].length;
    starts[o / LANES] = (int32_t)total;
    for (int l = 0; l < LANES; l++) ids[o + l] = l < lanes ? ranked[o + l].id : -1;
    if (values) {
      memset(values + total * LANES, 0, (size_t)longest * LANES * sizeof *values);
      if (!dense) memset(offsets + total * LANES, 0, (size_t)longest * LANES * sizeof *offsets);
      for (int l = 0; l < lanes; l++)
        for (int64_t e = from[ids[o + l]], i = 0; e < from[ids[o + l] + 1]; e++, i++) {
          const int64_t at = (total + (dense ? positions[e] % in : i)) * LANES + l;
          values[at] = weights[e];
          if (!dense) offsets[at] = positions[e] % in;
        }
    }
    total += longest;
  }
  starts[(out + LANES - 1) / LANES] = (int32_t)total;
done:
  free(from), free(ranked);
  return total;
}
