"""Handwritten digits: the whole of a small project, from data to a trained classifier."""

from examples.digits.data import DigitsData
from examples.digits.module import Digits

__all__ = ["Digits", "DigitsData"]
