"""Engine: strategies, precision, checkpoints and exact resume for a loop that you write."""

from trainer.engine.engine import Engine as Engine
from trainer.engine.loader import EngineLoader as EngineLoader
from trainer.engine.model import EngineModule as EngineModule
from trainer.engine.model import EngineOptimizer as EngineOptimizer
