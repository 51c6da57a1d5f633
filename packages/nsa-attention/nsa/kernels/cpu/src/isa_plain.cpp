#define NSA_NAMESPACE plain
#include "wide_kernels.h"
