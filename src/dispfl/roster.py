"""The peers' names in a simulation."""


def roster_names(count: int) -> list[str]:
    """`000`, `001`, ...: names whose alphabetical order is the roster's."""
    width = max(3, len(str(count - 1)))
    return [f"{k:0{width}d}" for k in range(count)]
