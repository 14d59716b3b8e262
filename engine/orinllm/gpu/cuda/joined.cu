// Parts of one launch, each of which waits for the blocks of the one before (gpu.cuh).
#include "attention.cu"
#include "gemv.cu"
