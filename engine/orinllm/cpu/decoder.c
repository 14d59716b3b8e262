// A language model on a CPU: a list of operations, each shared out among the cores. rows.c precedes
// this file in one text.
//
// Layout: activations are float, one row a token; weights as in rows.c; keys and values are 16-bit
//   floats, [kv head][position][dimension].
// Roles: an operation is so many units: rows of a matrix, heads or tokens. A core claims one after
//   the other, and goes on when all are done: no core waits for one that the system lets sleep
//   unless that one holds a unit. What a core needs alone lies in its `scratch`.
// Units: sizes count elements; positions count tokens.
// The structs are mirrored by ctypes in ../cpu_executor.py.
#define UNIT_ROWS 16  // rows of a matrix that are claimed at once
#define MAX_HEAD 512  // dimensions of a head
#define MAX_CHUNK 32  // tokens of a run
#define MAX_USED 32   // experts of a token

enum { EMBED, MATMUL, KEYS, ATTEND, NORM_ADD, EXPERTS_GATED, EXPERTS_DOWN };
enum { STORE, ADD, SILU, GELU, GPT_OSS };
enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

// A matrix, its bias (or 0), and where its products go: out[token * stride + row].
typedef struct {
  const signed char* weights;
  const float* bias;
  float* out;
  i64 rows, stride;
  Layout layout;
} Part;

typedef struct {
  i64 kind;
  const float *in, *norm;  // rows of `cols` at in[token * in_stride]; norm: RMS norm of each, or 0
  i64 in_stride, cols, n_parts, epilogue, last_only;
  Part parts[3];
  double scale, eps;
  // Attention. in: queries or keys; second: values; table: cos and sin by position.
  const float *second, *table, *sinks;
  half *keys, *values;
  i64 heads, kv_heads, head_dim, length, window, pairs, interleaved;
  // Experts. router: logits, one row a token.
  const float* router;
  i64 experts, used, gating, normalized;
} Op;

typedef struct {
  i64 n_tokens, start, n_ops;
  const Op* ops;
  int* progress;   // of each operation: units claimed, units done; zeros at the start
  float* scratch;  // of core c: from c * scratch_size on: normed inputs or scores, then rows
  i64 scratch_size, rows_at;  // rows_at: where in it the float rows of weights begin
  i64 tokens[MAX_CHUNK];
} Run;

// e^x to 1e-7: 2^n from the exponent bits, the rest by its series.
static inline float exp_of(float x) {
  x = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
  const float n = __builtin_floorf(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1;
  p = p * r + 1;
  const int bits = ((int)n + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  return p * power;
}

static inline float rms_scale(const float* x, i64 n, float eps) {
  float sum = 0;
  for (i64 i = 0; i < n; i++) sum += x[i] * x[i];
  return 1.f / __builtin_sqrtf(sum / n + eps);
}

static inline void give_way(int spins) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
  if (spins % 1024 == 1023) {  // more threads than cores: sched_yield
    long ret;
    __asm__ volatile("syscall" : "=a"(ret) : "a"(24L) : "rcx", "r11", "memory");
  }
#elif defined(__aarch64__)
  __asm__ volatile("yield");
  if (spins % 1024 == 1023) {
    register long x0 __asm__("x0") = 0, x8 __asm__("x8") = 124;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8) : "memory");
  }
#endif
}

static inline float activated(i64 epilogue, float g, float u) {
  if (epilogue == SILU) return g / (1 + exp_of(-g)) * u;
  if (epilogue == GELU) {
    const float z = 0.7978845608f * (g + 0.044715f * g * g * g);
    return 0.5f * g * (2 - 2 / (exp_of(2 * z) + 1)) * u;  // tanh z = 1 - 2 / (e^2z + 1)
  }
  g = g > 7 ? 7 : g;
  u = u > 7 ? 7 : u < -7 ? -7 : u;
  return g / (1 + exp_of(-1.702f * g)) * (u + 1);
}

// What one matrix, or gate and up together, is multiplied by, and where the products go.
typedef struct {
  i64 n;  // rows of activations
  const float* in[MAX_CHUNK];
  i64 out[MAX_CHUNK];       // which row of `out` each goes to
  float factor[MAX_CHUNK];  // of ADD
} Batch;

static inline void finish(const Op* op, float* to, float y, float g, float f) {
  if (op->epilogue == STORE)
    *to = y;
  else if (op->epilogue == ADD)
    *to += f * y;
  else
    *to = activated(op->epilogue, g, y);
}

// Four rows of a part, from `row` on; those of several tokens also as floats.
typedef struct {
  const Part* part;
  const signed char* packed[ROWS];
  float* floats;
} Rows;

static Rows rows_of(const Op* op, const Part* part, i64 expert, i64 row, float* floats) {
  Rows rows = {part, {0}, floats};
  for (int r = 0; r < ROWS; r++) {
    const i64 at = row + r < part->rows ? row + r : part->rows - 1;
    rows.packed[r] = part->weights + (expert * part->rows + at) * part->layout.row_bytes;
    if (floats) unpack(&part->layout, rows.packed[r], op->cols, floats + r * op->cols);
  }
  return rows;
}

static void sums_of(const Rows* rows, const float* const* x, i64 n, i64 cols,
                    float (*sums)[TOKENS]) {
  if (n > 1)
    with_four(rows->floats, x, cols, sums);
  else
    with_one(&rows->part->layout, rows->packed, x[0], cols, sums);
}

// Rows of one unit of part `index`, of expert `expert` in a stack. With an activation the part is
// up, and the one before it gate. `space` holds 2 * ROWS rows of floats.
static void product(const Op* op, int index, const Batch* batch, i64 expert, i64 unit,
                    float* space) {
  const int gated = op->epilogue >= SILU;
  const Part* part = &op->parts[index];
  const i64 rows = part->rows, at = expert * rows;
  const i64 end = (unit + 1) * UNIT_ROWS < rows ? (unit + 1) * UNIT_ROWS : rows;
  for (i64 first = unit * UNIT_ROWS; first < end; first += ROWS) {
    float* floats = batch->n > 1 ? space : 0;
    const Rows w = rows_of(op, part, expert, first, floats);
    Rows gate;
    if (gated) gate = rows_of(op, part - 1, expert, first, floats ? space + ROWS * op->cols : 0);
    for (i64 i = 0; i < batch->n; i += TOKENS) {
      const i64 n = batch->n - i < TOKENS ? batch->n - i : TOKENS;
      const float* x[TOKENS];
      float sums[ROWS][TOKENS], gates[ROWS][TOKENS];
      for (int t = 0; t < TOKENS; t++) x[t] = batch->in[t < n ? i + t : i];
      sums_of(&w, x, n, op->cols, sums);
      if (gated) sums_of(&gate, x, n, op->cols, gates);
      for (int r = 0; r < ROWS && first + r < rows; r++)
        for (int t = 0; t < n; t++) {
          const i64 row = first + r;
          const float y = sums[r][t] + (part->bias ? part->bias[at + row] : 0);
          float g = 0;
          if (gated) g = gates[r][t] + (part[-1].bias ? part[-1].bias[at + row] : 0);
          float* to = part->out + batch->out[i + t] * part->stride + row;
          finish(op, to, y, g, batch->factor[i + t]);
        }
    }
  }
}

// The inputs of all tokens, normed into the core's scratch where the operation has a norm.
static i64 inputs(const Op* op, const Run* run, float* scratch, const float** in) {
  const i64 first = op->last_only ? run->n_tokens - 1 : 0;
  for (i64 t = first; t < run->n_tokens; t++) {
    const float* x = op->in + t * op->in_stride;
    if (op->norm) {
      float* normed = scratch + (t - first) * op->cols;
      const float scale = rms_scale(x, op->cols, op->eps);
      for (i64 i = 0; i < op->cols; i++) normed[i] = x[i] * scale * op->norm[i];
      x = normed;
    }
    in[t - first] = x;
  }
  return run->n_tokens - first;
}

static i64 units_of(const Part* part) { return (part->rows + UNIT_ROWS - 1) / UNIT_ROWS; }

static void matmul(const Op* op, const Batch* batch, i64 unit, float* space) {
  int index = op->epilogue >= SILU;
  while (unit >= units_of(&op->parts[index])) unit -= units_of(&op->parts[index++]);
  product(op, index, batch, 0, unit, space);
}

// Experts and weights of one token, from its router's logits.
static void route(const Op* op, const float* logits, i64* chosen, float* weights) {
  float most = logits[0], all = 0, sum = 0;
  for (i64 e = 1; e < op->experts; e++) most = logits[e] > most ? logits[e] : most;
  if (op->gating == SOFTMAX)
    for (i64 e = 0; e < op->experts; e++) all += exp_of(logits[e] - most);
  for (i64 k = 0; k < op->used; k++) {
    i64 best = -1;
    for (i64 e = 0; e < op->experts; e++) {
      int taken = 0;
      for (i64 j = 0; j < k; j++) taken |= chosen[j] == e;
      if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
    }
    chosen[k] = best;
    weights[k] =
        op->gating == SIGMOID ? 1 / (1 + exp_of(-logits[best])) : exp_of(logits[best] - most);
    sum += weights[k];
  }
  const int divided = op->normalized || op->gating == SOFTMAX_OF_CHOSEN;
  const float by = divided ? sum : op->gating == SOFTMAX ? all : 1;
  for (i64 k = 0; k < op->used; k++) weights[k] *= op->scale / by;
}

// What a core works out once an operation, before its first unit.
typedef struct {
  Batch batch;  // of a product: every token
  i64 chosen[MAX_CHUNK][MAX_USED];
  float weights[MAX_CHUNK][MAX_USED];
} Prepared;

static void prepare(const Op* op, const Run* run, float* scratch, Prepared* to) {
  Batch* batch = &to->batch;
  if (op->kind == MATMUL || op->kind == EXPERTS_GATED)
    batch->n = inputs(op, run, scratch, batch->in);
  if (op->kind == MATMUL)
    for (i64 t = 0; t < batch->n; t++) {
      batch->out[t] = t;
      batch->factor[t] = op->scale;
    }
  if (op->kind == EXPERTS_GATED || op->kind == EXPERTS_DOWN)
    for (i64 t = 0; t < run->n_tokens; t++)
      route(op, op->router + t * op->experts, to->chosen[t], to->weights[t]);
}

// Rows of one unit of gate and up of the chosen experts, one row of out a token and slot; or of
// down, added to the token.
static void mixture(const Op* op, const Run* run, const Prepared* prepared, i64 unit,
                    float* space) {
  const int down = op->kind == EXPERTS_DOWN;
  for (i64 e = 0; e < op->experts; e++) {
    Batch batch;
    batch.n = 0;
    for (i64 t = 0; t < run->n_tokens; t++)
      for (i64 k = 0; k < op->used; k++)
        if (prepared->chosen[t][k] == e) {
          const i64 slot = t * op->used + k;
          batch.in[batch.n] = down ? op->in + slot * op->in_stride : prepared->batch.in[t];
          batch.out[batch.n] = down ? t : slot;
          batch.factor[batch.n++] = prepared->weights[t][k];
        }
    if (batch.n) product(op, down ? 0 : 1, &batch, e, unit, space);
  }
}

// out = a head normed, where there is a norm, and turned by its position.
static void turned(const Op* op, const float* x, i64 position, float* out) {
  const float scale = op->norm ? rms_scale(x, op->head_dim, op->eps) : 1;
  for (i64 i = 0; i < op->head_dim; i++) out[i] = op->norm ? x[i] * scale * op->norm[i] : x[i];
  const float* cos = op->table + position * 2 * op->pairs;
  const float* sin = cos + op->pairs;
  for (i64 i = 0; i < op->pairs; i++) {
    const i64 at = op->interleaved ? 2 * i : i, with = op->interleaved ? 2 * i + 1 : i + op->pairs;
    const float a = out[at], b = out[with];
    out[at] = a * cos[i] - b * sin[i];
    out[with] = b * cos[i] + a * sin[i];
  }
}

static void keys(const Op* op, const Run* run, i64 unit) {
  const i64 t = unit / op->kv_heads, h = unit % op->kv_heads, position = run->start + t;
  const i64 from = t * op->in_stride + h * op->head_dim;
  const i64 to = (h * op->length + position) * op->head_dim;
  float key[MAX_HEAD];
  turned(op, op->in + from, position, key);
  for (i64 i = 0; i < op->head_dim; i++) {
    op->keys[to + i] = (half)key[i];
    op->values[to + i] = (half)op->second[from + i];
  }
}

static float score(const float* q, const half* key, i64 n) {
  vec acc = {0};
  i64 i = 0;
  for (; i + LANES <= n; i += LANES) acc += load_float(q + i) * load_half(key + i);
  float sum = sum_of(acc);
  for (; i < n; i++) sum += q[i] * (float)key[i];
  return sum;
}

static void attend(const Op* op, const Run* run, float* scores, i64 unit) {
  const i64 size = op->head_dim, group = op->heads / op->kv_heads;
  const i64 t = unit / op->heads, h = unit % op->heads, position = run->start + t;
  const i64 base = h / group * op->length * size;
  const i64 first = op->window && position >= op->window ? position - op->window + 1 : 0;
  float q[MAX_HEAD], mixed[MAX_HEAD], most = op->sinks ? op->sinks[h] : -3.4e38f;
  turned(op, op->in + t * op->in_stride + h * size, position, q);
  for (i64 p = first; p <= position; p++) {
    scores[p - first] = score(q, op->keys + base + p * size, size) * (float)op->scale;
    most = scores[p - first] > most ? scores[p - first] : most;
  }
  float sum = op->sinks ? exp_of(op->sinks[h] - most) : 0;
  for (i64 i = 0; i < size; i++) mixed[i] = 0;
  for (i64 p = first; p <= position; p++) {
    const float weight = exp_of(scores[p - first] - most);
    const half* value = op->values + base + p * size;
    sum += weight;
    for (i64 i = 0; i < size; i++) mixed[i] += weight * (float)value[i];
  }
  float* out = op->parts[0].out + t * op->parts[0].stride + h * size;
  for (i64 i = 0; i < size; i++) out[i] = mixed[i] / sum;
}

static void embed(const Op* op, const Run* run, i64 t) {
  const Part* part = &op->parts[0];
  float* out = part->out + t * part->stride;
  unpack(&part->layout, part->weights + run->tokens[t] * part->layout.row_bytes, op->cols, out);
  for (i64 i = 0; i < op->cols; i++) out[i] *= (float)op->scale;
}

static void norm_add(const Op* op, i64 t) {
  const float* x = op->in + t * op->in_stride;
  float* out = op->parts[0].out + t * op->parts[0].stride;
  const float scale = rms_scale(x, op->cols, op->eps) * op->scale;
  for (i64 i = 0; i < op->cols; i++) out[i] += x[i] * scale * op->norm[i];
}

static i64 all_units(const Op* op, const Run* run) {
  i64 units = 0;
  if (op->kind == EMBED || op->kind == NORM_ADD) return run->n_tokens;
  if (op->kind == KEYS) return run->n_tokens * op->kv_heads;
  if (op->kind == ATTEND) return run->n_tokens * op->heads;
  for (int index = op->epilogue >= SILU; index < op->n_parts; index++)
    units += units_of(&op->parts[index]);
  return units;
}

// The only symbol that is not static: tinygrad's loader begins at the start of the code.
void decoder(Run* run, int core) {
  float* scratch = run->scratch + core * run->scratch_size;
  for (i64 i = 0; i < run->n_ops; i++) {
    const Op* op = &run->ops[i];
    int *claimed = run->progress + 2 * i, *done = claimed + 1, prepared = 0;
    const i64 units = all_units(op, run);
    Prepared mine;
    for (;;) {
      const i64 unit = __atomic_fetch_add(claimed, 1, __ATOMIC_RELAXED);
      if (unit >= units) break;
      if (!prepared++) prepare(op, run, scratch, &mine);
      if (op->kind == EMBED)
        embed(op, run, unit);
      else if (op->kind == MATMUL)
        matmul(op, &mine.batch, unit, scratch + run->rows_at);
      else if (op->kind == KEYS)
        keys(op, run, unit);
      else if (op->kind == ATTEND)
        attend(op, run, scratch, unit);
      else if (op->kind == NORM_ADD)
        norm_add(op, unit);
      else
        mixture(op, run, &mine, unit, scratch + run->rows_at);
      __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
    }
    for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < units; spins++) give_way(spins);
  }
}
