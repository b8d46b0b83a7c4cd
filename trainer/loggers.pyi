"""What `trainer.loggers` has, which is served as Lightning's module of that name, for type checkers."""

from trainer.callbacks import CSVLogger as CSVLogger
from trainer.callbacks import MLFlowLogger as MLFlowLogger
from trainer.callbacks import TensorBoardLogger as TensorBoardLogger
from trainer.callbacks import WandbLogger as WandbLogger
from trainer.logger import Logger as Logger
