/* Leaves and histograms of binned rows: sums of two derivatives by client, tree, node, feature and bin. */

#include <math.h>
#include <stdint.h>

/* Split s of a tree: parent leaf, feature, threshold (a bin, or the bits of codes that go right), missing goes right. */
void coterie_tree_leaves(const uint8_t *bins, int64_t rows, int64_t features, const double *splits, int64_t trees,
                         int64_t count, const uint8_t *categorical, int64_t missing, int32_t *leaf) {
    for (int64_t tree = 0; tree < trees; tree++) {
        const double *own = splits + tree * count * 4;
        int64_t used = 0;
        while (used < count && own[4 * used] >= 0)
            used++;
        int64_t parent[256], feature[256], threshold[256], gone[256], kind[256];
        for (int64_t s = 0; s < used; s++) {
            parent[s] = (int64_t)own[4 * s], feature[s] = (int64_t)own[4 * s + 1];
            threshold[s] = (int64_t)own[4 * s + 2], gone[s] = own[4 * s + 3] > 0.5;
            kind[s] = categorical[feature[s]];
        }
        for (int64_t row = 0; row < rows; row++) {
            const uint8_t *x = bins + row * features;
            int64_t at = 0;
            for (int64_t s = 0; s < used; s++) {
                if (parent[s] != at)
                    continue;
                int64_t bin = x[feature[s]];
                int64_t right = kind[s] ? (threshold[s] >> (bin < 62 ? bin : 62)) & 1 : bin > threshold[s];
                if (bin == missing ? gone[s] : right)
                    at = s + 1;
            }
            leaf[row * trees + tree] = (int32_t)at;
        }
    }
}

/* Adds to sums [clients][trees][asked][features][bins][width] for the features first..last only; width is 2 or 3. */
void coterie_tree_histograms(const uint8_t *bins, const double *pairs, const int32_t *leaf, const int32_t *place,
                             int64_t clients, int64_t rows, int64_t features, int64_t trees, int64_t leaves,
                             int64_t asked, int64_t count, int64_t width, int64_t first, int64_t last,
                             double *sums) {
    const int64_t node = features * count * width, stride = count * width;
    for (int64_t client = 0; client < clients; client++)
        for (int64_t row = client * rows; row < (client + 1) * rows; row++) {
            const uint8_t *x = bins + row * features;
            for (int64_t tree = 0; tree < trees; tree++) {
                const int64_t slot = place[tree * leaves + leaf[row * trees + tree]];
                if (slot < 0)
                    continue;
                const double *own = pairs + (row * trees + tree) * width;
                const double g = own[0], h = own[1];
                if (h == 0.0 && g == 0.0)
                    continue; /* padding */
                double *cell = sums + ((client * trees + tree) * asked + slot) * node + first * stride;
                if (width == 2)
                    for (int64_t feature = first; feature < last; feature++, cell += stride) {
                        double *mine = cell + 2 * x[feature];
                        mine[0] += g;
                        mine[1] += h;
                    }
                else {
                    const double signed_g = own[2];
                    for (int64_t feature = first; feature < last; feature++, cell += stride) {
                        double *mine = cell + 3 * x[feature];
                        mine[0] += g;
                        mine[1] += h;
                        mine[2] += signed_g;
                    }
                }
            }
        }
}

/* Leaves of rows in trees with children: child[2 s], child[2 s + 1] are a split below, or -1 - leaf. */
void coterie_tree_walk(const double *x, int64_t rows, int64_t features, int64_t trees, int64_t count,
                       const int64_t *feature, const double *threshold, const uint8_t *missing, const int64_t *child,
                       const int64_t *start, const uint8_t *categorical, int64_t first, int64_t last, int64_t *leaf) {
    (void)rows;
    for (int64_t row = first; row < last; row++) {
        const double *own = x + row * features;
        for (int64_t tree = 0; tree < trees; tree++) {
            const int64_t base = tree * count;
            int64_t at = start[tree];
            while (at >= 0) {
                const int64_t s = base + at, f = feature[s];
                const double value = own[f];
                int64_t right;
                if (isnan(value))
                    right = missing[s];
                else if (categorical[f])
                    right = value >= 0 && value < 62 ? ((int64_t)threshold[s] >> (int64_t)value) & 1 : 0;
                else
                    right = value > threshold[s];
                at = child[2 * s + right];
            }
            leaf[row * trees + tree] = -1 - at;
        }
    }
}
