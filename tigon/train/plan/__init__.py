"""What a run on many GPUs would take, on paper: its layouts, ranked."""

from tigon.train.plan.gpu import GPU, Constants, find_gpu
from tigon.train.plan.layout import Job, Layout
from tigon.train.plan.memory import weigh
from tigon.train.plan.report import read_job, show
from tigon.train.plan.search import Plan, make_plan
from tigon.train.plan.step import Step, step_of
from tigon.train.plan.work import Shapes

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
