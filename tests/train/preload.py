"""What ranks would import and read by themselves, in seconds, once in the process that they are
forked from; without curves of reports, whose drawing takes most of a second."""

import datasets  # noqa: F401
import pytest  # noqa: F401

from tests.train import ranks  # noqa: F401
from tigon.report import page
from tigon.settings.load import load_aliases

load_aliases()
page.charts = lambda _: iter(())

import scipy.io  # noqa: E402, F401 - which `datasets` imports to write rows; it may be missing
