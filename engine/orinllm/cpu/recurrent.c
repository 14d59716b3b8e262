// Layers that keep a state of the sequence: convolutions, gated delta nets and Mamba-2. rows.c
// precedes this file in one text, encoder.c follows.
//
// Layout: states are floats; of a convolution [tap][channel], the oldest input first; of a delta
// net
//   [head][key dimension][value dimension]; of a Mamba-2 [head][dimension][state].
// Roles: a unit is a block of channels or a head, whose tokens come one after the other; each
//   sequence's states lie together in a slot. What is at
//   position 0 begins with a state of zeros.
// Units: sizes and strides count elements; positions count tokens.
// The struct is mirrored by ctypes in recurrent.py.
#define CHANNELS 64   // of a unit of a convolution
#define MAX_SIZE 512  // dimensions of a head, and of its keys

enum { CONVOLVE, DELTA, SCAN };

typedef struct {
  i64 kind;
  const float* in;  // rows: inputs of a convolution; q, k, v; or x, B, C
  i64 in_stride;
  const float* beside;  // rows: z
  i64 beside_stride;
  const float* gates;  // rows: a, then b of every head; or dt
  i64 gates_stride;
  float *state, *out;  // state: of the first slot
  float* behind;       // states behind a run's tokens, each token's slot_stride from the last one's
  i64 slot_stride, out_stride;
  const float *weights, *bias;            // weights: of a convolution, [tap][channel]
  const float *decay, *dt, *skip, *norm;  // by head, but for norm: ssm_a, ssm_dt, ssm_d, ssm_norm
  i64 channels, taps, gated;
  i64 heads, groups, size, width;  // groups: key heads, or groups of heads; width: keys or states
  double eps;
} RecurrentStruct;

// The tokens of a run: each one's position, and the slot of its sequence. `kept`: states behind all
// but the last one are kept, as some of them may be guessed wrong.
typedef struct {
  i64 n;
  const i64 *positions, *slots;
  i64 kept;
} Tokens;

// x, but not below `least` or above `most`; what is no number stays.
INLINED float8 within(float8 x, float least, float most) {
  const int8 low = x<least, high = x> most;
  const int8 ends = (low & (int8)((float8){0} + least)) | (high & (int8)((float8){0} + most));
  return (float8)(ends | ((int8)x & ~(low | high)));
}

// e^x to 1e-7: 2^n from the exponent bits, the rest by its series.
INLINED float8 exps_of(float8 x) {
  x = within(x, -87, 88);
  const float8 near = x * 1.44269504f + 0.5f;
  int8 n = __builtin_convertvector(near, int8);
  n += __builtin_convertvector(n, float8) > near;  // down: what is true is -1
  const float8 whole = __builtin_convertvector(n, float8);
  const float8 r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float8 p = (float8){0} + 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1;
  p = p * r + 1;
  return p * (float8)((n + 127) << 23);
}

static inline float exp_of(float x) { return exps_of((float8){0} + x)[0]; }

static inline float rms_scale(const float* x, i64 n, float eps) {
  vec acc = {0};
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) acc += load_float(x + i) * load_float(x + i);
  float sum = sum_of(acc);
  for (; i < n; i++) sum += x[i] * x[i];
  return 1.f / __builtin_sqrtf(sum / n + eps);
}

static inline float sigmoid(float x) { return 1 / (1 + exp_of(-x)); }

enum { STORE, ADD, RELU_SQUARED, SILU, GELU, GPT_OSS };  // from SILU on there is a gate

INLINED float8 activated(i64 epilogue, float8 g, float8 u) {
  if (epilogue == RELU_SQUARED) return within(u, 0, 3.4e38f) * within(u, 0, 3.4e38f);
  if (epilogue == SILU) return g / (1 + exps_of(-g)) * u;
  if (epilogue == GELU) {
    const float8 z = 0.7978845608f * (g + 0.044715f * g * g * g);
    return 0.5f * g * (2 - 2 / (exps_of(2 * z) + 1)) * u;  // tanh z = 1 - 2 / (e^2z + 1)
  }
  g = within(g, -3.4e38f, 7);
  return g / (1 + exps_of(-1.702f * g)) * (within(u, -7, 7) + 1);
}

// ln(1 + y) for y in [0, 1], by 2 artanh(y / (2 + y)), to 1e-7.
static inline float log_of_one_and(float y) {
  const float z = y / (2 + y), square = z * z;
  float p = 1.f / 15;
  p = p * square + 1.f / 13;
  p = p * square + 1.f / 11;
  p = p * square + 1.f / 9;
  p = p * square + 1.f / 7;
  p = p * square + 1.f / 5;
  p = p * square + 1.f / 3;
  p = p * square + 1;
  return 2 * z * p;
}

// ln(1 + e^x)
static inline float softplus(float x) {
  return (x > 0 ? x : 0) + log_of_one_and(exp_of(x > 0 ? -x : x));
}

static void zero(float* to, i64 n) {
  for (i64 i = 0; i < n; i++) to[i] = 0;
}

static float* state_of(const RecurrentStruct* r, const Tokens* tokens, i64 t) {
  return r->state + tokens->slots[t] * r->slot_stride;
}

// Keep n floats of the states behind token t, which are `state` now.
static void keep(const RecurrentStruct* r, const Tokens* tokens, i64 t, const float* state, i64 n) {
  if (!tokens->kept || t + 1 == tokens->n) return;
  float* behind = r->behind + t * r->slot_stride + (state - state_of(r, tokens, t));
  for (i64 i = 0; i < n; i++) behind[i] = state[i];
}

static void convolve(const RecurrentStruct* r, const Tokens* tokens, i64 unit) {
  const i64 first = unit * CHANNELS, left = r->channels - first;
  const i64 n = left < CHANNELS ? left : CHANNELS;
  float in[CHANNELS], sum[CHANNELS];
  for (i64 t = 0; t < tokens->n; t++) {
    const float* x = r->in + t * r->in_stride + first;
    float *state = state_of(r, tokens, t) + first, *out = r->out + t * r->out_stride + first;
    if (tokens->positions[t] == 0)
      for (i64 tap = 0; tap + 1 < r->taps; tap++) zero(state + tap * r->channels, n);
    for (i64 i = 0; i < n; i++) {
      in[i] = r->gated ? x[i] * x[i + 2 * r->channels] : x[i];
      sum[i] = r->bias ? r->bias[first + i] : 0;
    }
    for (i64 tap = 0; tap < r->taps; tap++) {
      float* kept = state + tap * r->channels;  // of the last tap: the input itself
      const float* past = tap + 1 < r->taps ? kept : in;
      const float* next = tap + 2 < r->taps ? kept + r->channels : in;
      const float* weights = r->weights + tap * r->channels + first;
      for (i64 i = 0; i < n; i++) sum[i] += weights[i] * past[i];
      if (tap + 1 < r->taps) {
        for (i64 i = 0; i < n; i++) kept[i] = next[i];
        keep(r, tokens, t, kept, n);
      }
    }
    for (i64 i = 0; i < n; i++)
      out[i] = r->gated ? x[i + r->channels] * sum[i] : sum[i] * sigmoid(sum[i]);
  }
}

// out = a head's q or k, divided by its length, and times `factor`.
static void unit_length(const RecurrentStruct* r, const float* x, float factor, float* out) {
  float sum = 0;
  for (i64 i = 0; i < r->size; i++) sum += x[i] * x[i];
  const float scale = factor / __builtin_sqrtf(sum + (float)r->eps);
  for (i64 i = 0; i < r->size; i++) out[i] = x[i] * scale;
}

static void delta(const RecurrentStruct* r, const Tokens* tokens, i64 head) {
  const i64 size = r->size, keys = r->groups * size;
  float q[MAX_SIZE], k[MAX_SIZE], change[MAX_SIZE], mixed[MAX_SIZE];
  for (i64 t = 0; t < tokens->n; t++) {
    const float *qkv = r->in + t * r->in_stride, *gates = r->gates + t * r->gates_stride;
    const float* z = r->beside + t * r->beside_stride + head * size;
    const float *of_key = qkv + head % r->groups * size, *v = qkv + 2 * keys + head * size;
    const float kept = exp_of(r->decay[head] * softplus(gates[head] + r->dt[head]));
    float* state = state_of(r, tokens, t) + head * size * size;
    const float written = sigmoid(gates[r->heads + head]);
    if (tokens->positions[t] == 0) zero(state, size * size);
    unit_length(r, of_key, 1 / __builtin_sqrtf(size), q);
    unit_length(r, of_key + keys, 1, k);
    zero(change, size);
    zero(mixed, size);
    for (i64 i = 0; i < size; i++)
      for (i64 j = 0; j < size; j++) {
        state[i * size + j] *= kept;
        change[j] += state[i * size + j] * k[i];
      }
    for (i64 j = 0; j < size; j++) change[j] = written * (v[j] - change[j]);
    for (i64 i = 0; i < size; i++)
      for (i64 j = 0; j < size; j++) {
        state[i * size + j] += k[i] * change[j];
        mixed[j] += state[i * size + j] * q[i];
      }
    keep(r, tokens, t, state, size * size);
    const float scale = rms_scale(mixed, size, (float)r->eps);
    float* out = r->out + t * r->out_stride + head * size;
    for (i64 j = 0; j < size; j++) out[j] = mixed[j] * scale * r->norm[j] * z[j] * sigmoid(z[j]);
  }
}

// What a group's norm makes of it is another operation: all its heads come first.
static void scan(const RecurrentStruct* r, const Tokens* tokens, i64 head) {
  const i64 size = r->size, width = r->width, group = head / (r->heads / r->groups);
  for (i64 t = 0; t < tokens->n; t++) {
    const float *x = r->in + t * r->in_stride, *b = x + r->heads * size + group * width;
    const float *c = b + r->groups * width, *z = r->beside + t * r->beside_stride + head * size;
    const float step = softplus(r->gates[t * r->gates_stride + head] + r->dt[head]);
    const float kept = exp_of(step * r->decay[head]);
    float* state = state_of(r, tokens, t) + head * size * width;
    float* out = r->out + t * r->out_stride + head * size;
    if (tokens->positions[t] == 0) zero(state, size * width);
    for (i64 i = 0; i < size; i++) {
      const float in = x[head * size + i];
      float *row = state + i * width, sum = r->skip[head] * in;
      for (i64 n = 0; n < width; n++) {
        row[n] = kept * row[n] + step * in * b[n];
        sum += row[n] * c[n];
      }
      out[i] = sum * z[i] * sigmoid(z[i]);
    }
    keep(r, tokens, t, state, size * width);
  }
}

// The groups of one token, each normed.
static void norm_groups(const RecurrentStruct* r, i64 t) {
  const i64 size = r->heads * r->size / r->groups;
  for (i64 group = 0; group < r->groups; group++) {
    float* x = r->out + t * r->out_stride + group * size;
    const float scale = rms_scale(x, size, (float)r->eps);
    for (i64 i = 0; i < size; i++) x[i] *= scale * r->norm[group * size + i];
  }
}

static i64 recurrent_units(const RecurrentStruct* r) {
  return r->kind == CONVOLVE ? (r->channels + CHANNELS - 1) / CHANNELS : r->heads;
}

static void recurrent(const RecurrentStruct* r, const Tokens* tokens, i64 unit) {
  (r->kind == CONVOLVE ? convolve : r->kind == DELTA ? delta : scan)(r, tokens, unit);
}
