// The GGML types that the kernels read, one line each. Python reads this table too: no number
// stands twice. Source: ggml-common.h and ggml.h of llama.cpp 0.5.0.
//
// GGML_TYPE(name, id, values of a block, bytes of a block, bytes of an activation, row alignment)
//   bytes of an activation: 1 where the GEMV meets the weights with int8, 2 where it takes halves
//   row alignment: bytes that the start of each row must be a multiple of
GGML_TYPE(F16, 1, 32, 64, 2, 16)
GGML_TYPE(Q4_0, 2, 32, 18, 1, 2)
GGML_TYPE(Q4_1, 3, 32, 20, 1, 4)
GGML_TYPE(Q5_0, 6, 32, 22, 1, 2)
GGML_TYPE(Q5_1, 7, 32, 24, 1, 4)
GGML_TYPE(Q8_0, 8, 32, 34, 1, 2)
GGML_TYPE(Q2_K, 10, 256, 84, 1, 4)
GGML_TYPE(Q3_K, 11, 256, 110, 1, 2)
GGML_TYPE(Q4_K, 12, 256, 144, 1, 4)
GGML_TYPE(Q5_K, 13, 256, 176, 1, 4)
GGML_TYPE(Q6_K, 14, 256, 210, 1, 2)
GGML_TYPE(IQ4_NL, 20, 32, 18, 1, 2)
GGML_TYPE(IQ4_XS, 23, 256, 136, 1, 4)
GGML_TYPE(BF16, 30, 32, 64, 2, 16)
GGML_TYPE(MXFP4, 39, 32, 17, 1, 1)
