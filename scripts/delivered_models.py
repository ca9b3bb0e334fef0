"""How many copies of their models do devices deliver that do not wait? Nothing is trained.

    python scripts/delivered_models.py experiments/time/phones.toml hours_per_round=0.065 \\
      data.dir=DATA method.structure=channels

A peer sends each model to as many peers as it has neighbours. A copy that has not left when the
next model is finished is replaced by it. Prints for each class of devices the steps of a peer, the
share of its copies that arrive, and the mean staleness of the models that it averages.
"""

import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

from dispfl.config import compose
from dispfl.runs.async_clock import gossip_times, run_cost
from dispfl.runs.prepare import prepare


def main() -> None:
    config = tomllib.loads(Path(sys.argv[1]).read_text())
    experiment = compose(config, ["schedule=async", *sys.argv[2:]])
    _, _, context = prepare(experiment)
    times = gossip_times(context, run_cost(context))
    steps: Counter[str] = Counter()
    arrivals: Counter[str] = Counter()
    staleness: defaultdict[str, list[int]] = defaultdict(list)
    for _ in range(experiment.rounds):
        finished = times.advance()
        for step in finished.steps:
            steps[step.peer] += 1
            staleness[step.peer] += step.staleness.values()
        arrivals.update(arrival.sender for arrival in finished.arrivals)

    classes: defaultdict[str, list[str]] = defaultdict(list)
    for peer, name in times.fleet.class_of.items():
        classes[name].append(peer)
    degree = experiment.topology.connections(len(context.roster))
    for name, peers in classes.items():
        taken = fmean(steps[peer] for peer in peers)
        copies = degree * sum(steps[peer] for peer in peers)
        arrived = sum(arrivals[peer] for peer in peers) / copies
        stale = fmean(value for peer in peers for value in staleness[peer])
        print(f"{name}: {taken:.0f} steps, {arrived:.0%} of copies arrive, staleness {stale:.1f}")


if __name__ == "__main__":
    main()
