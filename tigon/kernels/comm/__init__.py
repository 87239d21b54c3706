"""Communication kernels over symmetric memory."""
