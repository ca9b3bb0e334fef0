"""Small tables for tests of sites and runs."""


def small_table(pairs: int) -> str:
    """A CSV file with the columns a, b and y; `a` is below `b` in class x, above in class z."""
    lines = ["a,b,y"]
    for k in range(pairs):
        lines += [f"1,{2 + k / 100:g},x", f"2,{1 + k / 100:g},z"]
    return "\n".join(lines) + "\n"
