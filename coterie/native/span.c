/* Which of the versions of span.h suits this processor. */
#if defined(__aarch64__)
#define LANES 4
#define SPAN coterie_span_4
#include "span.h"
#endif

#include "span_work.h"
#include <stddef.h>

typedef int64_t span(const span_work *, int);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
span coterie_span_8, coterie_span_16;
#endif

static span *chosen(void) {
#if defined(__aarch64__)
    return coterie_span_4;
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) return coterie_span_16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return coterie_span_8;
#endif
    return NULL;
}

/* Whether there is one. */
int64_t coterie_span_suits(void) { return chosen() != NULL; }

int64_t coterie_span(const span_work *work, int part) { return chosen()(work, part); }
