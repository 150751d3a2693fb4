/* For all other processors, and the choice among the versions. */
#define LANES 4
#define NAMED(name) name##_4
#include "mlp.h"
#include "mixture.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
DECLARED(8)
DECLARED(16)
#define CHOSEN(name) \
    (__builtin_cpu_supports("x86-64-v4") ? name##_16 : __builtin_cpu_supports("x86-64-v3") ? name##_8 : name##_4)
#else
#define CHOSEN(name) name##_4
#endif

int coterie_mlp(const struct stack *s, int64_t begin, int64_t end) { return CHOSEN(coterie_mlp)(s, begin, end); }
int coterie_mixture(const struct mixture *m, int64_t begin, int64_t end) { return CHOSEN(coterie_mixture)(m, begin, end); }
int coterie_midpoints(float *to, const float *models, const int64_t *ends, int64_t pairs, int64_t n, int64_t d) {
    return CHOSEN(coterie_midpoints)(to, models, ends, pairs, n, d);
}
