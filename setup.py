"""Clear what an earlier build has left in build/: setuptools would pack modules that have been deleted since."""

import shutil

from setuptools import setup

shutil.rmtree("build/lib", ignore_errors=True)
setup()
