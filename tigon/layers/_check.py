"""Checks of values that may be on a device: those of the kernels."""

from tigon.kernels._check import check, on_host

__all__ = ["check", "on_host"]
