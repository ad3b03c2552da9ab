"""Checks of arguments for code of one's own: a ValueError with one sentence, or the value.

The sentence names the argument, the rule and the value. ``Matrix`` is the type of all arrays of
real numbers.
"""

from flwr_perdl._checks import Matrix, check_array, check_choice, check_count, check_real

__all__ = ["Matrix", "check_array", "check_choice", "check_count", "check_real"]
