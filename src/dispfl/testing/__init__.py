"""Tools for tests: the contract of methods, rounds from given states, a transport in memory, and a
virtual clock."""

from dispfl.testing.check_method import ContractError, check_method

__all__ = ["ContractError", "check_method"]
