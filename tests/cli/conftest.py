"""What the tests of the command line share."""

from program import dispfl

__all__ = ["dispfl"]
