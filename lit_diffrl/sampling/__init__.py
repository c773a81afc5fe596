"""Pure mathematics of sampling: no module, no device logic, torch only."""

from lit_diffrl.sampling.kernels import Kernel, Transition
from lit_diffrl.sampling.schedule import Schedule
from lit_diffrl.sampling.solvers import Step, sample

__all__ = ["Kernel", "Schedule", "Step", "Transition", "sample"]
