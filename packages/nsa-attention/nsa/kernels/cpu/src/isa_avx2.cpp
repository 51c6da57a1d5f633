#define NSA_NAMESPACE avx2
#include "wide_kernels.h"
