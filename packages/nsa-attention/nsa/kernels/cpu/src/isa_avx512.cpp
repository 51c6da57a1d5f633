#define NSA_NAMESPACE avx512
#include "wide_kernels.h"
