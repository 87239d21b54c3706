"""How kernels are to read and write, by the forms whose code is looked at."""

# Accesses of 16 bytes in the launches of each kernel; a number that falls means that Triton no
# longer knows of an alignment, and elements are moved one by one. AdamW in bfloat16 reads 4 tensors
# and writes 3 of 8 elements a thread, in float32 each by two accesses.
WIDE = {
    "adamw fp32: adamw._adamw_table_kernel": [14],
    "adamw bf16: adamw._adamw_table_kernel": [7],
    "adamw bf16, lines: adamw._adamw_table_kernel": [7],
    "adamw 8 bits: adamw._adamw_table_kernel": [3],  # weight and gradient; 8 codes are 8 bytes
    "squared_norm bf16: grad_norm._squares_kernel": [8],
    "fp8 rows: fp8._rows_kernel": [6],
    "fp8 both: fp8._maxima_kernel": [4],
    "fp8 both: fp8._tiles_kernel": [8],
    "fp8 both, known: fp8._tiles_kernel": [8, 6],
    "fp8 rows and maxima, 14336: fp8._rows_kernel": [2],  # it reads by asynchronous copies
    "fp8 gated silu: fp8._gated_rows_kernel": [2],
    "nf4 bf16: quantized._nf4_kernel": [5],
    "block fp8 e4m3: quantized._block_fp8_kernel": [6],
    "gated_act with product: gated_act._gated_act_backward_kernel": [0],  # 8 bytes
    "expert_rows: permute._spread_kernel": [8, 0],  # rows of tokens; few numbers of each
    "expert_rows: permute._combine_kernel": [4, 0],
    # without what it waits for
    "one_shot_sum torch.bfloat16: one_shot_all_reduce._one_shot_kernel": [4],
    "rms_norm again: rms_norm._forward_kernel": [6],
    "qk_norm_rope in place, bf16: rope._rope_kernel": [12],
    "qk_norm_rope in place, narrow: rope._rope_kernel": [0],  # fewer numbers than threads
    "qk_norm_rope bf16: rope._rope_kernel": [12, 16],  # forward and back
    "rescale and join: logits._rescale_kernel": [3, 3],
}
_FORMS = {name.rpartition(": ")[0] for name in WIDE}


def in_place(name: str) -> bool:
    """Where several threads may read one number: none may have been written over by then."""
    return "in place" in name and "rope" in name


def looked_at(form: str) -> bool:
    return form in _FORMS or in_place(form)
