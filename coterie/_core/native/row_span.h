/* Models in the span of each client's rows, one operation at a time; see coterie/models/fast/row_span.py. It follows dual_sgd.h,
whose tiles it takes, and is included once for each width, to define ROW_SPAN. */

/* Inner products of rows, made when they are first needed; NULL if there is no memory. */
static const float *kernel_of(const row_span_work *s, int64_t who) {
    float *kernel = s->kernels + who * s->largest * s->width;
    if (__atomic_load_n(s->made + who, __ATOMIC_ACQUIRE)) return kernel;
    if (!multiply(s->x + s->start[who] * s->columns, s->size[who], s->columns, kernel, s->width)) return NULL;
    __atomic_store_n(s->made + who, 1, __ATOMIC_RELEASE);
    return kernel;
}

/* The slopes of drawn rows, added up by rows, and what they change in the scores of all rows. */
static int64_t take_slopes(const row_span_work *s, int64_t k, const float **rows, int64_t *drawn, float *moved, float *slopes) {
    int64_t who = s->at ? s->at[k] : k, outputs = s->outputs, size = s->size[who], wide = rounded(size);
    int64_t first = s->start[who], total = s->length, at = s->offset[k];
    int64_t length = rounded(size < s->batch ? size : s->batch);
    const float *kernel = kernel_of(s, who);
    if (!kernel) return NO_MEMORY;
    int64_t batch = draw(mixed(s->keys[k] + (s->number + 1) * GOLDEN), size, s->batch, drawn);
    float share = 1.0f / batch * (s->summed ? size : 1);
    memset(slopes, 0, outputs * length * sizeof *slopes);
    for (int64_t b = 0; b < batch; b++) {
        rows[b] = kernel + drawn[b] * s->width;
        for (int64_t o = 0; o < outputs; o++) slopes[o * length + b] = s->scores[o * total + at + drawn[b]];
    }
    predict(s->loss, outputs, slopes, length);
    for (int64_t o = 0; o < outputs; o++) memset(s->shares + o * total + at, 0, size * sizeof *slopes);
    for (int64_t b = 0; b < batch; b++) {
        if (!subtract_label(s->loss, s->integers, s->y, first + drawn[b], outputs, slopes + b, length)) return OUT_OF_RANGE;
        for (int64_t o = 0; o < outputs; o++) {
            slopes[o * length + b] *= share;
            s->shares[o * total + at + drawn[b]] += slopes[o * length + b];
        }
    }
    add_rows(&(sum_of_rows){rows, batch, wide, slopes, length, outputs, moved, 0, 1});
    for (int64_t o = 0; o < outputs; o++) memcpy(s->moved + o * total + at, moved + o * wide, size * sizeof *moved);
    return FINE;
}

/* The gradient of all rows of client k, whose scores are `slopes` [outputs, wide], and sums [blocks, blocks] of the products of
   rows' gradients, (slopes of i, slopes of j) (row i, row j). `found` is room for [blocks, wide]. */
static int64_t take_noise(const row_span_work *s, int64_t k, const float *const *rows, float *slopes, float *found) {
    int64_t who = s->at ? s->at[k] : k, outputs = s->outputs, size = s->size[who], wide = rounded(size), blocks = s->blocks;
    int64_t first = s->start[who], d = outputs * s->columns;
    const int64_t *block = s->block + s->offset[k];
    const float *kernel = kernel_of(s, who);
    if (!kernel) return NO_MEMORY;
    predict(s->loss, outputs, slopes, wide);
    for (int64_t r = 0; r < size; r++) {
        if (!subtract_label(s->loss, s->integers, s->y, first + r, outputs, slopes + r, wide)) return OUT_OF_RANGE;
        if (block[r] < 0 || block[r] >= blocks) return OUT_OF_RANGE;
    }
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t r = 0; r < wide; r++) slopes[o * wide + r] = r < size ? slopes[o * wide + r] * (s->summed ? 1.0f : 1.0f / size) : 0;
    add_rows(&(sum_of_rows){rows, size, s->columns, slopes, wide, outputs, s->models + k * d, 0, 1});
    memset(found, 0, blocks * wide * sizeof *found);
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < wide; j += LANES) {
            lanes product = {0};
            for (int64_t o = 0; o < outputs; o++) product += slopes[o * wide + i] * load(slopes + o * wide + j);
            float *to = found + block[i] * wide + j;
            store(to, load(to) + product * load(kernel + i * s->width + j));
        }
    float *sums = s->sums + k * blocks * blocks;
    memset(sums, 0, blocks * blocks * sizeof *sums);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t r = 0; r < size; r++) sums[b * blocks + block[r]] += found[b * wide + r];
    return FINE;
}

/* What is asked of the clients from `first` to before `last`. */
int64_t ROW_SPAN(const row_span_work *s) {
    int64_t outputs = s->outputs, columns = s->columns, d = outputs * columns, wide = rounded(s->largest);
    int64_t most = s->largest > s->batch ? s->largest : s->batch, length = rounded(columns);
    int64_t rest = outputs * rounded(s->batch) + s->blocks * wide; /* slopes of a minibatch, or sums by blocks */
    float *packed = aligned_alloc(sizeof(lanes), (outputs * (length + wide) + rest + LANES) * sizeof *packed);
    const float **rows = malloc((most + 1) * sizeof *rows);
    int64_t *drawn = malloc((s->batch + 1) * sizeof *drawn), problem = packed && rows && drawn ? FINE : NO_MEMORY;
    float *moved = packed + outputs * length, *slopes = moved + outputs * wide;
    for (int64_t k = s->first; k < s->last && !problem; k++) {
        int64_t who = s->at ? s->at[k] : k;
        if (who < 0 || who >= s->everybody) problem = OUT_OF_RANGE;
        else if (s->start[who] < 0 || s->size[who] < 0 || s->size[who] > s->largest) problem = OUT_OF_RANGE;
        else if (s->start[who] > s->rows - s->size[who] || s->offset[k] + s->size[who] > s->length) problem = OUT_OF_RANGE;
        if (problem) break;
        int64_t size = s->size[who], at = s->offset[k];
        const float *x = s->x + s->start[who] * columns, *table = s->count ? s->tables[0] + k * s->steps[0] : NULL;
        if (s->keys) {
            problem = take_slopes(s, k, rows, drawn, moved, slopes);
            continue;
        }
        for (int64_t r = 0; r < size; r++) rows[r] = x + r * columns;
        if (s->block) {
            if (k == s->first || s->steps[0]) pack(table, outputs, columns, packed);
            score(rows, size, columns, packed, outputs, moved, rounded(size));
            problem = take_noise(s, k, rows, moved, slopes);
            continue;
        }
        sum_of_rows sum = {rows, size, columns, s->shares + at, s->length, outputs, NULL, 0, 0};
        if (k + 1 < s->last) sum.ahead = (s->start[s->at ? s->at[k + 1] : k + 1] - s->start[who]) * columns;
        if (s->models) {
            sum.to = s->models + k * d;
            if (table && table != sum.to) memcpy(sum.to, table, d * sizeof *table);
            sum.fresh = !table;
            add_rows(&sum);
        } else if (s->weights) {
            for (int64_t o = 0; o < outputs; o++)
                for (int64_t r = 0; r < size; r++)
                    moved[o * size + r] = s->shares[o * s->length + at + r] * s->weights[k];
            sum.shares = moved, sum.step = size, sum.to = s->totals;
            add_rows(&sum);
        } else {
            for (int64_t i = 0; i < s->count; i++) {
                float *to = s->scores + i * outputs * s->length + at;
                if (k == s->first || s->count > 1 || s->steps[0])
                    pack(s->tables[i] + k * s->steps[i], outputs, columns, packed);
                for (int64_t o = 0; o < outputs; o += WIDE)
                    FOR_OUTPUTS(
                        outputs - o, score_rows, rows, size, columns, packed + o * length, to + o * s->length, s->length
                    )
            }
        }
    }
    free(packed);
    free(rows);
    free(drawn);
    return problem;
}
