"""The fused AdamW step and its low-precision states."""
