"""Matrix products: bfloat16, FP8, quantized weights, LoRA, and the GEMV of decoding."""
