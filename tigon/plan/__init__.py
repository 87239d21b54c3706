"""Estimates what a run on many GPUs would take in each layout, and ranks the layouts."""

from tigon.plan.cost import Job, Shapes, Step, estimate_step
from tigon.plan.gpu import GPU, Constants, find_gpu
from tigon.plan.layout import Layout
from tigon.plan.report import format_plan, read_job
from tigon.plan.search import LayoutPlan, estimate_memory, make_plan

__all__ = [
    "GPU", "Constants", "Job", "Layout", "LayoutPlan", "Shapes", "Step", "estimate_memory",
    "estimate_step", "find_gpu", "format_plan", "make_plan", "read_job",
]  # fmt: skip
