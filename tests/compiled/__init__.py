"""Every Triton kernel, compiled for a GPU in each of its forms; that needs none.

The launchers run as they are, with tensors on the CPU, and each launch compiles instead. A form has
other branches of a kernel than the others, or other dtypes, not only other sizes: each file beside
this one has those of some operators, and `branches` says what no form takes.
"""
