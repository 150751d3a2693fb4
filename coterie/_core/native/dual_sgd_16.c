/* For processors with 32 registers of sixteen floats. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4")
#define LANES 16
#define DUAL_SGD coterie_dual_sgd_16
#define GLM_GRADIENT coterie_glm_gradient_16
#define ROW_SPAN coterie_row_span_16
#include "dual_sgd.h"
#include "row_span.h"
#endif
