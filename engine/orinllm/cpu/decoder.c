// A language model on a CPU: a list of operations, each shared out among the cores. packed.c,
// rows.c, recurrent.c and encoder.c precede this file in one text.
//
// Layout: activations are float, one row a token; weights as in packed.c; keys and values are
// 16-bit
//   floats, [slot][kv head][position][dimension]. The tokens of a run may be of several sequences,
//   each in a slot of its own; those of one sequence are in order.
// Roles: an operation is so many units: rows of a matrix, heads or tokens. A core claims one after
//   the other, and goes on when all are done: no core waits for one that the system lets sleep
//   unless that one holds a unit. What a core needs alone lies in its `scratch`.
// Units: sizes count elements; positions count tokens.
// The structs are mirrored by ctypes in program.py.
#define UNIT_ROWS 16   // rows of a matrix that are claimed at once
#define MAX_HEAD 512   // dimensions of a head
#define MAX_CHUNK 512  // tokens of a run, of all sequences
#define MAX_USED 32    // experts of a token

enum {
  EMBED,
  MATMUL,
  KEYS,
  ATTEND,
  NORM_ADD,
  EXPERTS_GATED,
  EXPERTS_DOWN,
  RECURRENT,
  NORM_GROUPS,
  ACTIVATE,
  SCALE,
  LAYERS,
  DEEPSTACK,
  MERGE,
  ENCODE
};
enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

// A matrix, its bias (or 0), and where its products go: out[token * stride + row]. Of stacked
// experts `stacked` rows are between the first ones of two: more than `rows` of a fused tensor.
typedef struct {
  const u8* weights;
  const float* bias;
  float* out;
  i64 rows, stride;
  Layout layout;
  i64 stacked;
} MatrixPartStruct;

typedef struct {
  i64 kind;
  const float *in, *norm;  // rows of `cols` at in[token * in_stride]; norm: RMS norm of each, or 0
  i64 in_stride, cols, n_parts, epilogue, wanted_only;
  MatrixPartStruct parts[3];
  double scale, eps, softcap;  // softcap: of scores, or 0
  // Attention. in: queries or keys; second: values; table: cos and sin by position.
  const float *second, *table, *sinks;
  half *keys, *values;
  i64 heads, kv_heads, head_dim, length, window, pairs, interleaved;
  const float* factors;  // of scores, one for each `every` positions; or 0
  i64 every;
  // Experts. router: logits, one row a token.
  const float* router;
  i64 experts, used, gating, normalized;
  const float* choice;             // of experts: added to what they are chosen by; or 0
  i64 head_stride, gated, v_norm;  // head_stride: of queries, which a gate may follow
  const float* by;                 // of ADD: the sigmoid of its elements is a factor; or 0
  i64 by_stride;
  const RecurrentStruct* recurrent;
  const i64* axes;  // of a position in three parts, which part each pair turns by; or 0: it is one
  const float* scales;  // of experts: factors of their weights; or 0
  const StageStruct* stage;   // of an encoder
} OpStruct;

typedef struct {
  i64 n_tokens, n_wanted, n_ops, kept;  // kept: states behind each token are (Tokens)
  const OpStruct* ops;
  int* progress;   // of each operation: units claimed, units done; zeros at the start
  float* scratch;  // of core c: from c * scratch_size on: inputs or scores
  i64 scratch_size;
  i64 tokens[MAX_CHUNK];  // below 0: its embedding is there already, a picture's
  i64 positions[MAX_CHUNK], slots[MAX_CHUNK];
  i64 wanted[MAX_CHUNK];    // which tokens' logits, in this order
  i64 ahead[MAX_CHUNK];     // tokens behind it that it sees, too: a picture's
  i64 turns[3][MAX_CHUNK];  // positions in three parts, where models have them
} RunStruct;

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

INLINED float_rows activated_rows(i64 epilogue, float_rows g, float_rows u) {
#pragma unroll
  for (int r = 0; r < ROWS; r += 8) {
    float8 gate, up;
    __builtin_memcpy(&gate, (float*)&g + r, sizeof gate);
    __builtin_memcpy(&up, (float*)&u + r, sizeof up);
    up = activated(epilogue, gate, up);
    __builtin_memcpy((float*)&u + r, &up, sizeof up);
  }
  return u;
}

// What one matrix, or gate and up together, is multiplied by, and where the products go.
typedef struct {
  i64 n;  // rows of activations
  Input in[MAX_CHUNK];
  i64 out[MAX_CHUNK];       // which row of `out` each goes to
  float factor[MAX_CHUNK];  // of ADD
} Batch;

// sums[row of activations] of ROWS rows of a part, from `row` on, with their biases.
static void sums_of(const MatrixPartStruct* part, const Batch* batch, i64 expert, i64 row, i64 cols,
                    float_rows* sums) {
  const u8* rows[ROWS];
  float_rows bias = {0};
  for (int r = 0; r < ROWS; r++) {
    const i64 at = row + r < part->rows ? row + r : part->rows - 1;
    rows[r] = part->weights + (expert * part->stacked + at) * part->layout.row_bytes;
    if (part->bias) bias[r] = part->bias[expert * part->rows + at];
  }
  tile(&part->layout, rows, batch->in, batch->n, cols, sums);
  if (part->bias)
    for (i64 t = 0; t < batch->n; t++) sums[t] += bias;
}

// Rows of one unit of part `index`, of expert `expert` in a stack. With an activation the part is
// up, and the one before it gate.
static void product(const OpStruct* op, int index, const Batch* batch, i64 expert, i64 unit) {
  const int gated = op->epilogue >= SILU;
  const int adds = op->epilogue == ADD || op->kind == EXPERTS_DOWN;
  const MatrixPartStruct* part = &op->parts[index];
  const i64 end = (unit + 1) * UNIT_ROWS < part->rows ? (unit + 1) * UNIT_ROWS : part->rows;
  for (i64 first = unit * UNIT_ROWS; first < end; first += ROWS) {
    const i64 rows = end - first < ROWS ? end - first : ROWS;
    float_rows sums[MAX_CHUNK], gates[MAX_CHUNK];
    sums_of(part, batch, expert, first, op->cols, sums);
    if (gated) sums_of(part - 1, batch, expert, first, op->cols, gates);
    for (i64 t = 0; t < batch->n; t++) {
      float* to = part->out + batch->out[t] * part->stride + first;
      float_rows y = sums[t], now;
      if (op->epilogue >= RELU_SQUARED) y = activated_rows(op->epilogue, gated ? gates[t] : y, y);
      if (rows == ROWS) {
        __builtin_memcpy(&now, to, sizeof now);
        now = adds ? now + batch->factor[t] * y : y;
        __builtin_memcpy(to, &now, sizeof now);
      } else
        for (i64 r = 0; r < rows; r++) to[r] = adds ? to[r] + batch->factor[t] * y[r] : y[r];
    }
  }
}

static int any_packed(const OpStruct* op) {
  int found = 0;
  for (int i = 0; i < op->n_parts; i++) found |= op->parts[i].layout.type != HALVES;
  return found;
}

// The inputs of all tokens, or of the wanted ones; in the core's scratch they are normed where the
// operation has a norm, and rounded where rows are packed.
static i64 inputs(const OpStruct* op, const RunStruct* run, float* scratch, Input* in) {
  const i64 n = op->wanted_only ? run->n_wanted : run->n_tokens;
  const int packed = any_packed(op);
  for (i64 t = 0; t < n; t++, scratch += op->cols + floats_for_rounded_inputs(op->cols)) {
    const float* x = op->in + (op->wanted_only ? run->wanted[t] : t) * op->in_stride;
    if (op->norm) {
      const float scale = rms_scale(x, op->cols, op->eps);
      for (i64 i = 0; i < op->cols; i++) scratch[i] = x[i] * scale * op->norm[i];
      x = scratch;
    }
    in[t] = packed ? rounded(x, op->cols, scratch + op->cols) : (Input){x, 0, 0, 0};
  }
  return n;
}

static i64 units_of(const MatrixPartStruct* part) {
  return (part->rows + UNIT_ROWS - 1) / UNIT_ROWS;
}

static void matmul(const OpStruct* op, const Batch* batch, i64 unit) {
  int index = op->epilogue >= SILU;
  while (unit >= units_of(&op->parts[index])) unit -= units_of(&op->parts[index++]);
  product(op, index, batch, 0, unit);
}

// What an expert is chosen by: its logit, or its weight and a bias.
static inline float choosing(const OpStruct* op, const float* logits, i64 e) {
  return op->choice ? sigmoid(logits[e]) + op->choice[e] : logits[e];
}

// Experts and weights of one token, from its router's logits.
static void route(const OpStruct* op, const float* logits, i64* chosen, float* weights) {
  float most = logits[0], all = 0, sum = 0;
  for (i64 e = 1; e < op->experts; e++) most = logits[e] > most ? logits[e] : most;
  if (op->gating == SOFTMAX)
    for (i64 e = 0; e < op->experts; e++) all += exp_of(logits[e] - most);
  for (i64 k = 0; k < op->used; k++) {
    i64 best = -1;
    for (i64 e = 0; e < op->experts; e++) {
      int taken = 0;
      for (i64 j = 0; j < k; j++) taken |= chosen[j] == e;
      if (!taken && (best < 0 || choosing(op, logits, e) > choosing(op, logits, best))) best = e;
    }
    chosen[k] = best;
    weights[k] = op->gating == SIGMOID ? sigmoid(logits[best]) : exp_of(logits[best] - most);
    sum += weights[k];
  }
  const int divided = op->normalized || op->gating == SOFTMAX_OF_CHOSEN;
  const float by = divided ? sum : op->gating == SOFTMAX ? all : 1;
  for (i64 k = 0; k < op->used; k++)
    weights[k] *= op->scale / by * (op->scales ? op->scales[chosen[k]] : 1);
}

// What a core works out once an operation, before its first unit.
typedef struct {
  Batch batch;  // of a product: every token
  i64 chosen[MAX_CHUNK][MAX_USED];
  float weights[MAX_CHUNK][MAX_USED];
} Prepared;

static void prepare(const OpStruct* op, const RunStruct* run, float* scratch, Prepared* to) {
  Batch* batch = &to->batch;
  if (op->kind == MATMUL || op->kind == EXPERTS_GATED)
    batch->n = inputs(op, run, scratch, batch->in);
  if (op->kind == MATMUL)
    for (i64 t = 0; t < batch->n; t++) {
      batch->out[t] = t;
      batch->factor[t] = op->scale * (op->by ? sigmoid(op->by[t * op->by_stride]) : 1);
    }
  if (op->kind == EXPERTS_GATED || op->kind == EXPERTS_DOWN)
    for (i64 t = 0; t < run->n_tokens; t++)
      route(op, op->router + t * op->experts, to->chosen[t], to->weights[t]);
}

// Rows of one unit of gate and up of the chosen experts, one row of out a token and slot; or of
// down, added to the token, or to zeros where the operation does not add.
static void mixture(const OpStruct* op, const RunStruct* run, const Prepared* prepared, i64 unit,
                    float* scratch) {
  const int down = op->kind == EXPERTS_DOWN, packed = any_packed(op);
  if (down && op->epilogue == STORE)
    for (i64 t = 0; t < run->n_tokens; t++)
      for (i64 r = unit * UNIT_ROWS; r < (unit + 1) * UNIT_ROWS && r < op->parts[0].rows; r++)
        op->parts[0].out[t * op->parts[0].stride + r] = 0;
  for (i64 e = 0; e < op->experts; e++) {
    Batch batch;
    batch.n = 0;
    for (i64 t = 0; t < run->n_tokens; t++)
      for (i64 k = 0; k < op->used; k++)
        if (prepared->chosen[t][k] == e) {
          const i64 slot = t * op->used + k;
          batch.in[batch.n] = prepared->batch.in[t];
          if (down) {
            const float* x = op->in + slot * op->in_stride;
            float* space = scratch + batch.n * floats_for_rounded_inputs(op->cols);
            batch.in[batch.n] = packed ? rounded(x, op->cols, space) : (Input){x, 0, 0, 0};
          }
          batch.out[batch.n] = down ? t : slot;
          batch.factor[batch.n++] = prepared->weights[t][k];
        }
    if (batch.n) product(op, op->n_parts - 1, &batch, e, unit);
  }
}

// out = a head normed, where there is a norm, and turned by its position.
static void turned(const OpStruct* op, const RunStruct* run, i64 t, const float* x, float* out) {
  const float scale = op->norm ? rms_scale(x, op->head_dim, op->eps) : 1;
  for (i64 i = 0; i < op->head_dim; i++) out[i] = op->norm ? x[i] * scale * op->norm[i] : x[i];
  for (i64 i = 0; i < op->pairs; i++) {
    const i64 position = op->axes ? run->turns[op->axes[i]][t] : run->positions[t];
    const float* cos = op->table + position * 2 * op->pairs + i;
    const float* sin = cos + op->pairs;
    const i64 at = op->interleaved ? 2 * i : i, with = op->interleaved ? 2 * i + 1 : i + op->pairs;
    const float a = out[at], b = out[with];
    out[at] = a * *cos - b * *sin;
    out[with] = b * *cos + a * *sin;
  }
}

// Where a token's sequence has its keys, or its values, of a head.
static i64 at_of(const OpStruct* op, const RunStruct* run, i64 t, i64 h) {
  return (run->slots[t] * op->kv_heads + h) * op->length * op->head_dim;
}

static void keys(const OpStruct* op, const RunStruct* run, i64 unit) {
  const i64 t = unit / op->kv_heads, h = unit % op->kv_heads, position = run->positions[t];
  const i64 from = t * op->in_stride + h * op->head_dim;
  const i64 to = at_of(op, run, t, h) + position * op->head_dim;
  float key[MAX_HEAD];
  const float* value = op->second + from;
  const float scale = op->v_norm ? rms_scale(value, op->head_dim, op->eps) : 1;
  turned(op, run, t, op->in + from, key);
  for (i64 i = 0; i < op->head_dim; i++) {
    op->keys[to + i] = (half)key[i];
    op->values[to + i] = (half)(value[i] * scale);
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

// c tanh(x / c); tanh z = 1 - 2 / (e^2z + 1)
static inline float capped(float x, float c) { return c - 2 * c / (exp_of(2 * x / c) + 1); }

// The sum of n rows of `size` values, each times its weight, of so many vectors of a row.
INLINED void mix_vectors(const float* weights, const half* values, i64 n, i64 size, int vectors,
                         float* mixed) {
  vec acc[4] = {{0}};
  for (i64 p = 0; p < n; p++)
#pragma unroll
    for (int v = 0; v < vectors; v++)
      acc[v] += weights[p] * load_half(values + p * size + v * LANES);
  __builtin_memcpy(mixed, acc, vectors * sizeof *acc);
}

static void mix(const float* weights, const half* values, i64 n, i64 size, float* mixed) {
  i64 i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    mix_vectors(weights, values + i, n, size, 4, mixed + i);
  for (; i + LANES <= size; i += LANES) mix_vectors(weights, values + i, n, size, 1, mixed + i);
  for (; i < size; i++) {
    mixed[i] = 0;
    for (i64 p = 0; p < n; p++) mixed[i] += weights[p] * (float)values[p * size + i];
  }
}

// x[i] = e^(x[i] - most), and their sum; up to LANES - 1 floats behind the n become 0.
static float exps(float* x, i64 n, float most) {
  vec sum = {0};
  for (i64 i = n; i % LANES; i++) x[i] = -3.4e38f;
  for (i64 i = 0; i < n; i += 8) {
    float8 v;
    __builtin_memcpy(&v, x + i, sizeof v);
    v = exps_of(v - most);
    __builtin_memcpy(x + i, &v, sizeof v);
  }
  for (i64 i = n; i % LANES; i++) x[i] = 0;
  for (i64 i = 0; i < n; i += LANES) sum += load_float(x + i);
  return sum_of(sum);
}

static void attend(const OpStruct* op, const RunStruct* run, float* scores, i64 unit) {
  const i64 size = op->head_dim, group = op->heads / op->kv_heads;
  const i64 t = unit / op->heads, h = unit % op->heads, position = run->positions[t];
  const i64 last = position + run->ahead[t];
  const i64 base = at_of(op, run, t, h / group);
  const i64 first = op->window && position >= op->window ? position - op->window + 1 : 0;
  float q[MAX_HEAD], mixed[MAX_HEAD], most = op->sinks ? op->sinks[h] : -3.4e38f;
  const float scale = (float)op->scale * (op->factors ? op->factors[position / op->every] : 1);
  const float* query = op->in + t * op->in_stride + h * op->head_stride;
  turned(op, run, t, query, q);
  const i64 n = last - first + 1;
  for (i64 p = 0; p < n; p++) {
    scores[p] = score(q, op->keys + base + (first + p) * size, size) * scale;
    if (op->softcap) scores[p] = capped(scores[p], op->softcap);
  }
  for (i64 p = 0; p < n; p++) most = scores[p] > most ? scores[p] : most;
  const float sink = op->sinks ? exp_of(op->sinks[h] - most) : 0;
  const float sum = sink + exps(scores, n, most);
  mix(scores, op->values + base + first * size, n, size, mixed);
  float* out = op->parts[0].out + t * op->parts[0].stride + h * size;
  for (i64 i = 0; i < size; i++)
    out[i] = mixed[i] / sum * (op->gated ? sigmoid(query[size + i]) : 1);
}

static void embed(const OpStruct* op, const RunStruct* run, i64 t) {
  const MatrixPartStruct* part = &op->parts[0];
  float* out = part->out + t * part->stride;
  if (run->tokens[t] < 0) return;
  unpack(&part->layout, part->weights + run->tokens[t] * part->layout.row_bytes, op->cols, out);
  for (i64 i = 0; i < op->cols; i++) out[i] *= (float)op->scale;
}

static void norm_add(const OpStruct* op, i64 t) {
  const float* x = op->in + t * op->in_stride;
  float* out = op->parts[0].out + t * op->parts[0].stride;
  const float scale = rms_scale(x, op->cols, op->eps) * op->scale;
  for (i64 i = 0; i < op->cols; i++) out[i] += x[i] * scale * op->norm[i];
}

// out += the norm of the sum of two rows' norms: of `in`, and of `second`, whose weights are `by`;
// those of the sum are the part's bias.
static void merge(const OpStruct* op, i64 t) {
  const float *a = op->in + t * op->in_stride, *b = op->second + t * op->in_stride;
  float* out = op->parts[0].out + t * op->parts[0].stride;
  const float of_a = rms_scale(a, op->cols, op->eps), of_b = rms_scale(b, op->cols, op->eps);
  float squares = 0;
  for (i64 i = 0; i < op->cols; i++) {
    const float sum = a[i] * of_a * op->norm[i] + b[i] * of_b * op->by[i];
    squares += sum * sum;
  }
  const float scale = 1 / __builtin_sqrtf(squares / op->cols + (float)op->eps);
  for (i64 i = 0; i < op->cols; i++) {
    const float sum = a[i] * of_a * op->norm[i] + b[i] * of_b * op->by[i];
    out[i] += sum * scale * op->parts[0].bias[i];
  }
}

// out = the activation of one token's elements, of those of `second` where there is one.
static void activate(const OpStruct* op, i64 t) {
  const float* x = op->in + t * op->in_stride;
  float* out = op->parts[0].out + t * op->parts[0].stride;
  for (i64 i = 0; i < op->cols; i++) {
    const float u = op->second ? op->second[t * op->by_stride + i] : x[i];
    out[i] = activated(op->epilogue, (float8){0} + x[i], (float8){0} + u)[0];
  }
}

static void scale_row(const OpStruct* op, i64 t) {
  float* out = op->parts[0].out + t * op->parts[0].stride;
  for (i64 i = 0; i < op->cols; i++) out[i] *= (float)op->scale;
}

static void add_picture(const OpStruct* op, const RunStruct* run, i64 t) {
  float* out = op->parts[0].out + t * op->parts[0].stride;
  if (run->tokens[t] < 0)
    for (i64 i = 0; i < op->cols; i++) out[i] += op->in[t * op->in_stride + i];
}

// A token's embeddings for each layer: those of a table, `second`, and those that a matrix made of
// its embedding, normed by layer, whose sum is times 1 / sqrt(2).
static void layers(const OpStruct* op, i64 t) {
  float* out = op->parts[0].out + t * op->parts[0].stride;
  for (i64 first = 0; first < op->parts[0].stride; first += op->cols) {
    float* x = out + first;
    const float* table = op->second + t * op->parts[0].stride + first;
    const float scale = rms_scale(x, op->cols, (float)op->eps);
    for (i64 i = 0; i < op->cols; i++)
      x[i] = 0.70710678f * (x[i] * scale * op->norm[i] + (float)op->scale * table[i]);
  }
}

static i64 all_units(const OpStruct* op, const RunStruct* run) {
  i64 units = 0;
  if (op->wanted_only && !run->n_wanted) return 0;
  if (op->kind == RECURRENT) return recurrent_units(op->recurrent);
  if (op->kind == ENCODE) return stage_units(op->stage);
  if (op->kind == EMBED || op->kind == NORM_ADD || op->kind > RECURRENT) return run->n_tokens;
  if (op->kind == KEYS) return run->n_tokens * op->kv_heads;
  if (op->kind == ATTEND) return run->n_tokens * op->heads;
  for (int index = op->epilogue >= SILU; index < op->n_parts; index++)
    units += units_of(&op->parts[index]);
  return units;
}

static void compute(const OpStruct* op, const RunStruct* run, float* scratch, const Prepared* mine,
                    i64 unit) {
  const Tokens tokens = {run->n_tokens, run->positions, run->slots, run->kept};
  switch (op->kind) {
    case EMBED:
      embed(op, run, unit);
      break;
    case MATMUL:
      matmul(op, &mine->batch, unit);
      break;
    case KEYS:
      keys(op, run, unit);
      break;
    case ATTEND:
      attend(op, run, scratch, unit);
      break;
    case NORM_ADD:
      norm_add(op, unit);
      break;
    case RECURRENT:
      recurrent(op->recurrent, &tokens, unit);
      break;
    case NORM_GROUPS:
      norm_groups(op->recurrent, unit);
      break;
    case ACTIVATE:
      activate(op, unit);
      break;
    case SCALE:
      scale_row(op, unit);
      break;
    case LAYERS:
      layers(op, unit);
      break;
    case MERGE:
      merge(op, unit);
      break;
    case DEEPSTACK:
      add_picture(op, run, unit);
      break;
    case ENCODE:
      encode(op->stage, scratch, unit);
      break;
    default:
      mixture(op, run, mine, unit, scratch);
  }
}

// The only symbol that is not static: tinygrad's loader begins at the start of the code.
void decoder(RunStruct* run, int core) {
  float* scratch = run->scratch + core * run->scratch_size;
  for (i64 i = 0; i < run->n_ops; i++) {
    const OpStruct* op = &run->ops[i];
    int *claimed = run->progress + 2 * i, *done = claimed + 1, prepared = 0;
    const i64 units = all_units(op, run);
    Prepared mine;
    for (;;) {
      const i64 unit = __atomic_fetch_add(claimed, 1, __ATOMIC_RELAXED);
      if (unit >= units) break;
      if (!prepared++) prepare(op, run, scratch, &mine);
      compute(op, run, scratch, &mine, unit);
      __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
    }
    for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < units; spins++) give_way(spins);
  }
}
