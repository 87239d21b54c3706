"""What a run on many GPUs would take, on paper: its layouts, ranked."""

from tigon.plan.gpu import GPU, Constants, find_gpu
from tigon.plan.layout import Job, Layout
from tigon.plan.memory import weigh
from tigon.plan.report import read_job, show
from tigon.plan.search import Plan, make_plan
from tigon.plan.step import Step, step_of
from tigon.plan.work import Shapes

__all__ = [
    "GPU",
    "Constants",
    "Job",
    "Layout",
    "Plan",
    "Shapes",
    "Step",
    "find_gpu",
    "make_plan",
    "read_job",
    "show",
    "step_of",
    "weigh",
]
