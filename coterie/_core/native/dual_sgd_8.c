/* For processors with sixteen registers of eight floats. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define DUAL_SGD coterie_dual_sgd_8
#define GLM_GRADIENT coterie_glm_gradient_8
#define ROW_SPAN coterie_row_span_8
#include "dual_sgd.h"
#include "row_span.h"
#endif
