// As a library, for bench/cuda_check.py.
#include "cuda_emulation.h"
