"""Tools for tests: the contract of methods, tiny rounds, a transport in memory, a virtual clock."""

from dispfl.testing.check_method import ContractError, check_method

__all__ = ["ContractError", "check_method"]
