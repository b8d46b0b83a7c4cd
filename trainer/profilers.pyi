"""What `trainer.profilers` has, which is served as Lightning's module of that name, for type checkers."""

from trainer.callbacks import AdvancedProfiler as AdvancedProfiler
from trainer.callbacks import PassThroughProfiler as PassThroughProfiler
from trainer.callbacks import Profiler as Profiler
from trainer.callbacks import SimpleProfiler as SimpleProfiler
from trainer.callbacks import TorchProfiler

PyTorchProfiler = TorchProfiler
