"""The contract of methods: rules that make runs reproducible, fair and resumable.

    from dispfl.testing import check_method

    check_method(MyMethod())

All rules together take a few seconds. A rule that a method breaks, or in which it raises an
exception, is a `ContractError` whose sentence begins with the rule's name.
"""

import torch

from dispfl.core.rng import forked_generators
from dispfl.errors import RunError
from dispfl.methods.base import Method
from dispfl.testing.rules import RULES, BrokenRuleError, Rule


class ContractError(AssertionError):
    """A method breaks a rule of the contract; `rule` is the rule's name."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(f"{rule}: {sentence}")
        self.rule = rule


def check_method(method: Method) -> None:
    """Check a method against all rules; a `ContractError` names the first one that it breaks."""
    for rule in RULES:
        check_rule(rule, method)


def check_rule(rule: Rule, method: Method) -> None:
    """Check a method against one rule. The rule draws from no global generator of the caller."""
    threads = torch.get_num_threads()
    try:
        with forked_generators():
            rule(method)
    except BrokenRuleError as broken:
        raise ContractError(rule.__name__, str(broken)) from broken
    except RunError as failure:  # names the peer, the round and the method's function
        raise ContractError(rule.__name__, str(failure)) from (failure.__cause__ or failure)
    except Exception as problem:
        sentence = f"{method.name} raised {type(problem).__name__}: {problem}"
        raise ContractError(rule.__name__, sentence) from problem
    finally:
        torch.set_num_threads(threads)
