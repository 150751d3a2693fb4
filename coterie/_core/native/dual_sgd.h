/* Local SGD of generalised linear models in the span of each client's rows; see coterie/models/fast/dual_sgd.py.

A client's rows are scored, its steps taken and its rows added up while they are in the cache. Vectors are as wide as the
processor's: gcc keeps wider ones in memory. So this file is included once for each width, LANES, to define DUAL_SGD and GLM_GRADIENT. */
#include "lanes.h"
#include "dual_sgd_work.h"
#include <stdlib.h>

#define TALL 4                           /* rows, or vectors of columns, in a tile of registers */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDE 5 /* outputs in a tile, of 32 registers */
#else
#define WIDE 3 /* of 16 */
#endif

/* DO(count, ...) for as many outputs as are left, a number that the compiler knows. */
#define FOR_OUTPUTS(left, DO, ...)                                                                                     \
    switch (left) {                                                                                                    \
    case 1: DO(1, __VA_ARGS__); break;                                                                                 \
    case 2: DO(2, __VA_ARGS__); break;                                                                                 \
    case 3: DO(3, __VA_ARGS__); break;                                                                                 \
    case 4: DO((WIDE < 4 ? WIDE : 4), __VA_ARGS__); break;                                                             \
    default: DO(WIDE, __VA_ARGS__);                                                                                    \
    }

typedef float four __attribute__((vector_size(16)));

INLINE int64_t rounded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

INLINE four folded(lanes vector) {
    four part[LANES / 4];
    memcpy(part, &vector, sizeof vector);
    UNROLLED for (int half = LANES / 8; half; half /= 2)
        UNROLLED for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* The sums of four vectors. */
INLINE four sums(const lanes *vectors) {
    four a = folded(vectors[0]), b = folded(vectors[1]), c = folded(vectors[2]), d = folded(vectors[3]);
    four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

/* A table [outputs, columns] in whole vectors: the last has the last columns, with zeros for those that came before. */
INLINE void pack(const float *table, int64_t outputs, int64_t columns, float *packed) {
    int64_t length = rounded(columns), whole = columns / LANES * LANES, rest = columns - whole;
    for (int64_t o = 0; o < outputs; o++, table += columns, packed += length) {
        memcpy(packed, table, whole * sizeof *table);
        if (rest) {
            memset(packed + whole, 0, (LANES - rest) * sizeof *table);
            memcpy(packed + length - rest, table + whole, rest * sizeof *table);
        }
    }
}

/* Inner products of a few rows with a few outputs of a table. */
INLINE void score_tile(
    const int rows, const int outputs, const float *const *x, int64_t columns, const float *packed, float *to, int64_t step
) {
    lanes sum[WIDE][TALL] = {{{0}}};
    int64_t length = rounded(columns);
    for (int64_t c = 0; c < length; c += LANES) {
        int64_t at = c + LANES <= columns ? c : columns - LANES;
        lanes table[WIDE];
        UNROLLED for (int o = 0; o < outputs; o++) table[o] = load(packed + o * length + c);
        UNROLLED for (int r = 0; r < rows; r++) {
            lanes row = load(x[r] + at);
            UNROLLED for (int o = 0; o < outputs; o++) sum[o][r] += table[o] * row;
        }
    }
    UNROLLED for (int o = 0; o < outputs; o++) {
        four scores = sums(sum[o]);
        memcpy(to + o * step, &scores, rows * sizeof *to);
    }
}

INLINE void score_rows(
    const int outputs, const float *const *x, int64_t rows, int64_t columns, const float *packed, float *to, int64_t step
) {
    int64_t r = 0;
    for (; r + TALL <= rows; r += TALL) score_tile(TALL, outputs, x + r, columns, packed, to + r, step);
    for (; r < rows; r++) score_tile(1, outputs, x + r, columns, packed, to + r, step);
}

/* to [outputs, step] = table times rows [rows, columns], with zeros up to `step`. */
INLINE void score(
    const float *const *x, int64_t rows, int64_t columns, const float *packed, int64_t outputs, float *to, int64_t step
) {
    memset(to, 0, outputs * step * sizeof *to);
    for (int64_t o = 0; o < outputs; o += WIDE)
        FOR_OUTPUTS(outputs - o, score_rows, x, rows, columns, packed + o * rounded(columns), to + o * step, step)
}

/* What is added up: to [outputs, columns] += shares [outputs, step] times `count` rows. */
typedef struct {
    const float *const *rows;
    int64_t count, columns;
    const float *shares;
    int64_t step, outputs;
    float *to;
    int64_t ahead; /* from a row to one that will be read next, which is fetched; 0: nothing is */
    int fresh;     /* whether nothing is there yet to be added to */
} sum_of_rows;

/* A few vectors of columns for outputs from o on; the first `skip` lanes are there already. */
INLINE void add_tile(
    const int outputs, const int vectors, const sum_of_rows *s, int64_t o, int64_t column, int64_t skip
) {
    lanes sum[WIDE][TALL] = {{{0}}};
    const float *shares = s->shares + o * s->step;
    int64_t step = s->step, ahead = o ? 0 : s->ahead;
    for (int64_t b = 0; b < s->count; b++) {
        const float *row = s->rows[b] + column;
        float share[WIDE];
        UNROLLED for (int i = 0; i < outputs; i++) share[i] = shares[i * step + b];
        UNROLLED for (int v = 0; v < vectors; v++) {
            lanes values = load(row + v * LANES);
            UNROLLED for (int i = 0; i < outputs; i++) sum[i][v] += share[i] * values;
            if (ahead) __builtin_prefetch(row + ahead + v * LANES, 0, 2);
        }
    }
    UNROLLED for (int i = 0; i < outputs; i++) UNROLLED for (int v = 0; v < vectors; v++) {
        float *to = s->to + (o + i) * s->columns + column + v * LANES;
        if (skip && s->fresh) memcpy(&sum[i][v], to, skip * sizeof *to);
        else if (skip) memset(&sum[i][v], 0, skip * sizeof *to);
        store(to, s->fresh ? sum[i][v] : load(to) + sum[i][v]);
    }
}

INLINE void add_rows(const sum_of_rows *s) {
    int64_t c = 0;
    for (; c + TALL * LANES <= s->columns; c += TALL * LANES)
        for (int64_t o = 0; o < s->outputs; o += WIDE) FOR_OUTPUTS(s->outputs - o, add_tile, TALL, s, o, c, 0)
    for (; c < s->columns; c += LANES) {
        int64_t at = c + LANES <= s->columns ? c : s->columns - LANES;
        for (int64_t o = 0; o < s->outputs; o += WIDE) FOR_OUTPUTS(s->outputs - o, add_tile, 1, s, o, at, c - at)
    }
}

/* From scores [outputs, length] to what the losses' slopes in them are without the labels. */
INLINE void predict(int64_t loss, int64_t outputs, float *scores, int64_t length) {
    for (int64_t b = 0; b < length; b += LANES) {
        float *of = scores + b;
        if (loss == LOGISTIC) store(of, 1.0f / (1.0f + exponential(-load(of))));
        if (loss != SOFTMAX) continue;
        lanes most = load(of), sum = {0};
        for (int64_t o = 1; o < outputs; o++) {
            lanes score = load(of + o * length);
            most = choose(score > most, score, most);
        }
        for (int64_t o = 0; o < outputs; o++) {
            lanes power = exponential(load(of + o * length) - most);
            store(of + o * length, power);
            sum += power;
        }
        lanes share = 1.0f / sum;
        for (int64_t o = 0; o < outputs; o++) store(of + o * length, load(of + o * length) * share);
    }
}

/* What labels add to the slopes of a row in its outputs, which are `step` apart; returns whether there is such a label. */
INLINE int subtract_label(
    int64_t loss, int64_t integers, const void *y, int64_t row, int64_t outputs, float *slopes, int64_t step
) {
    if (loss != SOFTMAX) {
        slopes[0] -= integers ? (float)((const int64_t *)y)[row] : ((const float *)y)[row];
        return 1;
    }
    int64_t label = integers ? ((const int64_t *)y)[row] : -1;
    if (label < 0 || label >= outputs) return 0;
    slopes[label * step] -= 1;
    return 1;
}

/* kernel [rows, width] = inner products of rows [rows, columns]; returns whether there was memory for it. */
static int multiply(const float *x, int64_t rows, int64_t columns, float *kernel, int64_t width) {
    float *packed = aligned_alloc(sizeof(lanes), (rows * rounded(columns) + LANES) * sizeof *packed);
    const float **each = malloc((rows + 1) * sizeof *each);
    if (packed && each) {
        for (int64_t r = 0; r < rows; r++) each[r] = x + r * columns;
        pack(x, rows, columns, packed);
        score(each, rows, columns, packed, rows, kernel, width);
    }
    int made = packed && each;
    free(packed);
    free(each);
    return made;
}

/* Memory for one client after the other. */
typedef struct {
    float *packed, *now, *middle, *slopes, *shares; /* scores at the model and at its centre; slopes of a minibatch */
    const float **rows;
    int64_t *drawn;
    lanes witness;
    int fresh; /* whether no table is packed yet */
} room;

INLINE int64_t which(const dual_sgd_work *s, int64_t k) { return s->at ? s->at[k] : k; }

/* Whether there is such a client, and its rows. */
INLINE int there(const dual_sgd_work *s, int64_t who) {
    if (who < 0 || who >= s->everybody) return 0;
    int64_t first = s->start[who], size = s->size[who];
    return first >= 0 && size >= 0 && size <= s->largest && first <= s->rows - size;
}

INLINE void witness(room *m, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) m->witness += load(values + i);
}

/* The finaliser of SplitMix64, as in coterie/_core/randomness.py. */
INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

#define GOLDEN 0x9E3779B97F4A7C15

/* `batch` of 0..size-1, or each once if there are no more; returns how many they are. */
static int64_t draw(uint64_t key, int64_t size, int64_t batch, int64_t *rows) {
    if (size <= batch) {
        for (int64_t b = 0; b < size; b++) rows[b] = b;
        return size;
    }
    for (int64_t b = 0; b < batch; b++) rows[b] = (mixed(key += GOLDEN) >> 33) * (uint64_t)size >> 31;
    return batch;
}

/* now [outputs, wide] += sign times what slopes [outputs, length] change in the scores by way of the last column. */
static void add_last(
    const dual_sgd_work *s, room *m, const float *last, int64_t size, int64_t length, int64_t batch, float sign
) {
    int64_t outputs = s->outputs, columns = s->columns, wide = rounded(size);
    for (int64_t o = 0; o < outputs; o++) {
        float sum = 0;
        for (int64_t b = 0; b < batch; b++) sum += m->slopes[o * length + b] * last[m->drawn[b] * columns];
        for (int64_t r = 0; r < size; r++) m->now[o * wide + r] += sign * sum * last[r * columns];
    }
}

/* The steps of client k, and `shares` [outputs, size] of its rows in what they change. */
static int64_t descend(const dual_sgd_work *s, room *m, int64_t k, float *shares) {
    int64_t who = which(s, k), outputs = s->outputs, size = s->size[who], first = s->start[who], wide = rounded(size);
    int64_t length = rounded(size < s->batch ? size : s->batch);
    const float *kernel = s->kernels + who * s->largest * s->width, *last = s->x + (first + 1) * s->columns - 1;
    const float *importance = s->importance ? s->importance + k * s->importance_step : NULL;
    sum_of_rows moves = {m->rows, 0, wide, m->slopes, length, outputs, m->now, 0, 0};
    memset(shares, 0, outputs * size * sizeof *shares);
    for (int64_t t = 0; t < s->steps; t++) {
        if (t) {
            if (s->keeps != 1) {
                for (int64_t i = 0; i < outputs * wide; i++) m->now[i] *= s->keeps;
                for (int64_t i = 0; i < outputs * size; i++) shares[i] *= s->keeps;
            }
            if (s->centres)
                for (int64_t i = 0; i < outputs * wide; i++) m->now[i] += s->pulled * m->middle[i];
            if (s->moving != LAST) add_rows(&moves);
            if (s->moving != ALL) add_last(s, m, last, size, length, moves.count, s->moving == LAST ? 1 : -1);
        }
        uint64_t key = mixed(s->keys[k] + (s->number + t * s->every + 1) * GOLDEN);
        int64_t batch = moves.count = draw(key, size, s->batch, m->drawn);
        float pace = -s->lr * (1.0f / batch * (s->summed ? size : 1));
        memset(m->slopes, 0, outputs * length * sizeof *shares);
        for (int64_t b = 0; b < batch; b++) {
            m->rows[b] = kernel + m->drawn[b] * s->width;
            for (int64_t o = 0; o < outputs; o++) m->slopes[o * length + b] = m->now[o * wide + m->drawn[b]];
        }
        predict(s->loss, outputs, m->slopes, length);
        for (int64_t b = 0; b < batch; b++) {
            int64_t row = m->drawn[b];
            if (!subtract_label(s->loss, s->integers, s->y, first + row, outputs, m->slopes + b, length))
                return OUT_OF_RANGE;
            for (int64_t o = 0; o < outputs; o++) {
                m->slopes[o * length + b] *= importance ? pace * importance[row] : pace;
                shares[o * size + row] += m->slopes[o * length + b];
            }
        }
        for (int64_t o = 0; o < outputs; o++)
            for (int64_t b = batch; b < length; b++) m->slopes[o * length + b] = 0;
        witness(m, m->slopes, outputs * length);
    }
    return FINE;
}

/* What all rows of a client change in a table: those of its columns that move. */
static void add_moves(const dual_sgd_work *s, const sum_of_rows *sum) {
    int64_t last = s->columns - 1;
    float before[s->outputs];
    for (int64_t o = 0; o < s->outputs; o++) before[o] = sum->to[o * s->columns + last];
    if (s->moving != LAST) add_rows(sum);
    for (int64_t o = 0; o < s->outputs && s->moving != ALL; o++) {
        for (int64_t r = 0; r < sum->count && s->moving == LAST; r++)
            before[o] += sum->shares[o * sum->step + r] * sum->rows[r][last];
        sum->to[o * s->columns + last] = before[o];
    }
}

/* What is asked of client k, for the sum of its part. */
static int64_t compute(const dual_sgd_work *s, room *m, int64_t k, float *shares, float *total) {
    int64_t outputs = s->outputs, columns = s->columns, d = outputs * columns, who = which(s, k);
    int64_t first = s->start[who], size = s->size[who], wide = rounded(size);
    const float *x = s->x + first * columns, *table = s->tables + k * s->table_step;
    const float *centre = s->centres ? s->centres + k * s->centre_step : NULL;
    for (int64_t r = 0; r < size; r++) m->rows[r] = x + r * columns;
    if (s->keys) {
        if (!__atomic_load_n(s->made + who, __ATOMIC_ACQUIRE)) {
            if (!multiply(x, size, columns, s->kernels + who * s->largest * s->width, s->width)) return NO_MEMORY;
            __atomic_store_n(s->made + who, 1, __ATOMIC_RELEASE);
        }
        if (m->fresh || s->table_step || (centre && centre != table)) pack(table, outputs, columns, m->packed);
        m->fresh = 0;
        score(m->rows, size, columns, m->packed, outputs, m->now, wide);
        witness(m, m->now, outputs * wide);
        if (centre == table)
            memcpy(m->middle, m->now, outputs * wide * sizeof *m->now);
        else if (centre) {
            pack(centre, outputs, columns, m->packed);
            score(m->rows, size, columns, m->packed, outputs, m->middle, wide);
            witness(m, m->middle, outputs * wide);
        }
        int64_t problem = descend(s, m, k, shares);
        if (problem) return problem;
    }
    for (int64_t r = 0; r < size; r++) m->rows[r] = x + r * columns;
    sum_of_rows sum = {m->rows, size, columns, shares, size, outputs, NULL, 0, 0};
    if (k + 1 < s->clients) sum.ahead = (s->start[which(s, k + 1)] - first) * columns;
    if (s->models) {
        sum.to = s->models + k * d;
        for (int64_t i = 0; i < d; i++) sum.to[i] = s->share * table[i];
        if (centre)
            for (int64_t i = 0; i < d; i++) sum.to[i] += s->centre_share * centre[i];
        add_moves(s, &sum);
    }
    if (s->weights) {
        for (int64_t i = 0; i < outputs * size; i++) m->shares[i] = shares[i] * s->weights[k];
        sum.shares = m->shares, sum.to = total;
        add_moves(s, &sum);
    }
    return FINE;
}

int64_t DUAL_SGD(const dual_sgd_work *s, int part) {
    int64_t columns = rounded(s->columns), wide = rounded(s->largest), length = rounded(s->batch);
    int64_t most = s->largest > s->batch ? s->largest : s->batch;
    float *memory = aligned_alloc(sizeof(lanes), s->outputs * (columns + 3 * wide + length) * sizeof *memory);
    room m = {.packed = memory, .rows = malloc(most * sizeof *m.rows), .fresh = 1};
    m.drawn = malloc(s->batch * sizeof *m.drawn);
    int64_t problem = memory && m.rows && m.drawn ? FINE : NO_MEMORY;
    m.now = m.packed + s->outputs * columns;
    m.middle = m.now + s->outputs * wide;
    m.shares = m.middle + s->outputs * wide;
    m.slopes = m.shares + s->outputs * wide;
    int64_t rows = 0, before = 0;
    for (int64_t k = 0; k < s->clients && !problem; k++) {
        if (!there(s, which(s, k))) problem = OUT_OF_RANGE;
        else rows += s->size[which(s, k)];
    }
    for (int64_t k = 0; k < s->clients && !problem; k++) {
        int64_t size = s->size[which(s, k)], middle = 2 * before + size; /* of its rows, twice */
        if (middle * s->parts >= 2 * rows * part && middle * s->parts < 2 * rows * (part + 1))
            problem = compute(s, &m, k, s->shares + s->outputs * before, s->totals + part * s->outputs * s->columns);
        before += size;
    }
    if (s->keys) s->witness[part] = sums((lanes[TALL]){m.witness})[0];
    free(memory);
    free(m.rows);
    free(m.drawn);
    return problem;
}

/* The gradients of a stack, one client after the other. Rows are read where they are, and are in the cache the second time. */
int64_t GLM_GRADIENT(const glm_gradient_work *s) {
    int64_t outputs = s->outputs, columns = s->columns, d = outputs * columns, length = rounded(s->rows);
    float *packed = aligned_alloc(sizeof(lanes), outputs * (rounded(columns) + length) * sizeof *packed);
    const float **rows = malloc((s->rows + 1) * sizeof *rows);
    int64_t problem = packed && rows ? FINE : NO_MEMORY;
    float *slopes = packed + outputs * rounded(columns);
    for (int64_t k = 0; k < s->clients && !problem; k++) {
        const int64_t *drawn = s->drawn ? s->drawn + k * s->rows : NULL;
        for (int64_t b = 0; b < s->rows; b++) {
            int64_t row = drawn ? drawn[b] : k * s->rows + b;
            if (drawn && (row < 0 || row >= s->total)) problem = OUT_OF_RANGE;
            rows[b] = s->x + row * columns;
        }
        if (problem) break;
        if (!k || s->table_step) pack(s->tables + k * s->table_step, outputs, columns, packed);
        score(rows, s->rows, columns, packed, outputs, slopes, length);
        predict(s->loss, outputs, slopes, length);
        for (int64_t b = 0; b < s->rows; b++) {
            int64_t row = drawn ? drawn[b] : k * s->rows + b;
            if (!subtract_label(s->loss, s->integers, s->y, row, outputs, slopes + b, length)) problem = OUT_OF_RANGE;
            for (int64_t o = 0; o < outputs; o++) slopes[o * length + b] *= s->weight[k * s->rows + b];
        }
        add_rows(&(sum_of_rows){rows, s->rows, columns, slopes, length, outputs, s->gradients + k * d, 0, 1});
    }
    free(packed);
    free(rows);
    return problem;
}
