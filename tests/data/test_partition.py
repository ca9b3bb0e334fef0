"""Partitions: every peer gets the same number, no sample twice, and the classes that its partition
specifies."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dispfl.data.class_counts import Counts, fit_to_supply, unequal_sizes
from dispfl.data.partition import IID, ByColumn, Dirichlet, Grouped, Partition, Pathological
from dispfl.data.split import Split
from dispfl.errors import ConfigError, PartitionError
from dispfl.registry import PARTITIONS

ALPHAS = (0.01, 0.1, 0.3, 1.0, 100.0)
NOT_LABELS = (
    "The training labels must be one integer per sample, got torch.float32 of shape (4, 1)."
)
NO_CLASS_1 = (
    "Class 1 is assigned to peers but the test labels have none of it; "
    "add test samples of class 1 or remove it from the training data."
)


def labels_of(*class_sizes: int) -> Tensor:
    """Labels 0, 0, ..., 1, 1, ...: as many of each class as given."""
    return torch.repeat_interleave(
        torch.arange(len(class_sizes)), torch.tensor(class_sizes, dtype=torch.int64)
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts_of(partition: Partition, supply: list[int], peers: int, seed: int = 0) -> Counts:
    return partition.counts(np.array(supply), peers, rng=np.random.default_rng(seed))


def as_lists(split: Split) -> tuple[list[list[int]], list[list[int]]]:
    return [t.tolist() for t in split.train], [t.tolist() for t in split.test]


partitions = st.one_of(
    st.builds(IID),
    st.builds(Pathological, classes=st.integers(1, 3)),
    st.builds(Dirichlet, alpha=st.sampled_from(ALPHAS)),
    st.builds(Grouped, alpha=st.sampled_from(ALPHAS), groups=st.integers(1, 3)),
)
supplies = st.lists(st.integers(12, 90), min_size=3, max_size=12)


@settings(max_examples=60, deadline=None)
@given(partition=partitions, supply=supplies, peers=st.integers(3, 12), seed=st.integers(0, 999))
def test_no_training_sample_is_used_twice_and_peers_get_equally_many(
    partition: Partition, supply: list[int], peers: int, seed: int
) -> None:
    train_labels, test_labels = labels_of(*supply), labels_of(*[5] * len(supply))
    split = partition.split(train_labels, test_labels, peers, rng=seeded(seed))
    used = torch.cat(split.train)
    assert len(split.train) == len(split.test) == peers
    assert len(set(used.tolist())) == len(used) > 0
    assert 0 <= int(used.min()) <= int(used.max()) < sum(supply)
    assert len({len(rows) for rows in split.train}) == 1
    assert all(len(rows) == 100 for rows in split.test)


@settings(max_examples=60, deadline=None)
@given(
    alpha=st.sampled_from((0.001, *ALPHAS)),
    supply=st.lists(st.integers(0, 400), min_size=1, max_size=25).filter(
        lambda sizes: sum(sizes) >= 15
    ),
    peers=st.integers(1, 15),
    seed=st.integers(0, 999),
)
def test_dirichlet_uses_all_it_can_and_respects_the_supply_for_any_alpha(
    alpha: float, supply: list[int], peers: int, seed: int
) -> None:
    counts = counts_of(Dirichlet(alpha=alpha), supply, peers, seed)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == sum(supply) // peers).all()
    assert (counts.sum(axis=0) <= supply).all()


@settings(max_examples=40, deadline=None)
@given(partition=partitions, supply=supplies, n=st.integers(3, 6), seed=st.integers(0, 999))
def test_partition_samples_is_met_exactly(
    partition: Partition, supply: list[int], n: int, seed: int
) -> None:
    limited = partition.model_copy(update={"samples_per_peer": n})
    assert counts_of(limited, supply, 4, seed).sum(axis=1).tolist() == [n] * 4


BY_LABELS = {name: PARTITIONS[name] for name in PARTITIONS if name != "by_column"}


@pytest.mark.parametrize("name", BY_LABELS)
def test_same_seed_same_split_and_another_seed_another(name: str) -> None:
    train, test = labels_of(60, 60, 60), labels_of(20, 20, 20)
    first, again, different = (
        PARTITIONS[name]().split(train, test, 6, rng=seeded(s)) for s in (7, 7, 8)
    )
    assert as_lists(first) == as_lists(again)
    assert as_lists(first)[0] != as_lists(different)[0]
    assert as_lists(first)[1] != as_lists(different)[1]


def test_partitions_are_found_by_the_names_that_users_type() -> None:
    names = {"dirichlet": Dirichlet, "grouped": Grouped, "pathological": Pathological, "iid": IID}
    assert names | {"by_column": ByColumn} == PARTITIONS


def test_indices_are_ascending_and_own_their_memory() -> None:
    split = IID().split(labels_of(40, 40), labels_of(9, 9), 4, rng=seeded())
    for rows in (*split.train, *split.test):
        assert rows.dtype == torch.int64
        assert bool((rows.diff() >= 0).all())
        assert rows.untyped_storage().nbytes() == rows.nbytes


def test_label_counts_agree_with_the_assigned_counts() -> None:
    train = labels_of(4, 8)
    split = IID().split(train, labels_of(3, 3), 4, rng=seeded())
    assert split.label_counts(train, classes=3).tolist() == [[1, 2, 0]] * 4


def test_a_class_that_no_label_has_goes_to_nobody() -> None:
    for name, partition in BY_LABELS.items():
        counts = counts_of(partition(), [30, 0, 30, 30], peers=5)
        assert counts[:, 1].sum() == 0, name
        assert counts.sum() > 0, name


def test_iid_gives_a_tenth_of_each_class_to_each_of_ten_peers() -> None:
    assert counts_of(IID(), [10, 20, 70], peers=10).tolist() == [[1, 2, 7]] * 10


def test_iid_counts_differ_by_at_most_one_from_the_exact_share() -> None:
    counts = counts_of(IID(), [11, 23, 7, 60], peers=10)  # 101 samples: 10 a peer, one left over
    assert (counts.sum(axis=1) == 10).all()
    assert (np.abs(counts - np.array([11, 23, 7, 60]) / 10) <= 1).all()


def test_priors_stay_as_drawn_when_no_class_is_short() -> None:
    """With 20 samples per peer of 20,000 there is no shortage: doubling the supply changes
    nothing."""
    scarce, ample = ([size] * 4 for size in (5_000, 10_000))
    partition = Dirichlet(samples_per_peer=20)
    assert np.array_equal(
        counts_of(partition, scarce, peers=50), counts_of(partition, ample, peers=50)
    )


def test_fitting_to_the_supply_keeps_the_odds_between_peers() -> None:
    """Priors 1:1 and 4:1, all of 300 + 300 used: (100 / 200) / (200 / 100) = 1/4, as (1 / 1) / (4 /
    1)."""
    log_priors = np.log([[1.0, 1.0], [4.0, 1.0]])
    resolved = fit_to_supply(log_priors, np.array([300, 300]), np.array([300, 300]))
    assert resolved.tolist() == [[100, 200], [200, 100]]


def test_peers_that_compete_for_one_class_share_it_and_take_their_second_choice() -> None:
    """Priors this far apart cannot be fitted in bounded time: class 0 is halved, the second choice
    fills the rest."""
    log_priors = np.array([[0.0, -1e6, -2e6], [0.0, -2e6, -1e6]])
    resolved = fit_to_supply(log_priors, np.array([10, 10]), np.array([10, 10, 10]))
    assert resolved.tolist() == [[5, 5, 0], [5, 0, 5]]


def test_all_samples_are_assigned_when_everything_is_used() -> None:
    counts = counts_of(Dirichlet(alpha=0.3), [300, 100, 500, 100], peers=20)
    assert counts.sum(axis=0).tolist() == [300, 100, 500, 100]


def test_one_peer_gets_everything() -> None:
    assert counts_of(Dirichlet(alpha=0.01), [3, 9, 1], peers=1).tolist() == [[3, 9, 1]]


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution() -> None:
    """Dirichlet(1/2) over 2 classes: mean 1/2, variance 1/4 / (2 * 1/2 + 1) = 1/8."""
    counts = counts_of(Dirichlet(alpha=0.5, samples_per_peer=1000), [10**7, 10**7], peers=4000)
    share = counts[:, 0] / 1000
    assert share.mean() == pytest.approx(1 / 2, abs=0.03)
    assert share.var() == pytest.approx(1 / 8, abs=0.01)


def test_small_alpha_gives_nearly_one_class_a_peer_and_large_alpha_nearly_equal_peers() -> None:
    supply = [500] * 10
    one_class = counts_of(Dirichlet(alpha=0.01, samples_per_peer=50), supply, peers=10)
    alike = counts_of(Dirichlet(alpha=100, samples_per_peer=50), supply, peers=10)
    assert (one_class.max(axis=1) / 50).mean() > 0.9
    assert alike.max() <= 15  # 5 of each class, give or take


def test_peers_of_a_group_have_equal_counts_up_to_one() -> None:
    counts = counts_of(Grouped(groups=4, alpha=0.3), [500] * 10, peers=20)
    groups = counts.reshape(4, 5, 10)
    assert np.ptp(groups, axis=1).max() <= 1
    means = groups.mean(axis=1)
    assert all(
        np.abs(means[i] - means[j]).sum() > 25 for i in range(4) for j in range(i)
    )  # of 250 samples per peer


def test_ten_peers_in_four_groups_are_blocks_of_three_three_two_and_two() -> None:
    """Neighbours in the roster are in one group where their counts agree up to one."""
    counts = counts_of(Grouped(groups=4, alpha=0.3, samples_per_peer=96), [1000] * 6, peers=10)
    same_group = [bool(np.abs(a - b).max() <= 1) for a, b in pairwise(counts)]
    assert same_group == [True, True, False, True, True, False, True, False, True]


def test_one_group_that_uses_everything_is_iid() -> None:
    assert counts_of(Grouped(groups=1), [40, 80, 120], peers=8).tolist() == [[5, 10, 15]] * 8


def test_hundred_peers_hold_two_classes_each_with_250_samples_of_either() -> None:
    counts = counts_of(Pathological(classes=2), [5000] * 10, peers=100)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert set(counts.ravel().tolist()) == {0, 250}
    assert ((counts > 0).sum(axis=0) == 20).all()


@settings(max_examples=50, deadline=None)
@given(
    supply=st.lists(st.integers(30, 60), min_size=4, max_size=15),
    peers=st.integers(1, 20),
    classes=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_each_class_goes_to_equally_many_peers_and_is_equally_frequent_there(
    supply: list[int], peers: int, classes: int, seed: int
) -> None:
    counts = counts_of(Pathological(classes=classes), supply, peers, seed)
    held = counts > 0
    exact = peers * classes / len(supply)
    assert (held.sum(axis=1) == classes).all()
    assert set(held.sum(axis=0)) <= {int(np.floor(exact)), int(np.ceil(exact))}
    assert all(np.ptp(rows[rows > 0]) <= 1 for rows in counts)
    assert (counts.sum(axis=0) <= supply).all()


def test_everything_is_assigned_even_when_samples_do_not_divide_by_classes() -> None:
    """100 peers with 3 of 10 classes: 500 = 167 + 167 + 166, and each class must come out at 5000
    exactly."""
    for seed in range(5):
        counts = counts_of(Pathological(classes=3), [5000] * 10, peers=100, seed=seed)
        assert counts.sum(axis=0).tolist() == [5000] * 10
        assert set(counts[counts > 0].tolist()) == {166, 167}


def test_the_scarcest_class_limits_all_peers() -> None:
    """Four peers with both classes: the 8 of class 0 give 2 each, and class 1 one more than
    that."""
    assert counts_of(Pathological(classes=2), [8, 1000], peers=4).tolist() == [[2, 3]] * 4


def test_the_larger_classes_go_to_more_peers() -> None:
    """Three peers, one class each, two classes: class 1 is larger, so it goes to two."""
    counts = counts_of(Pathological(classes=1), [10, 20], peers=3)
    assert (counts > 0).sum(axis=0).tolist() == [1, 2]
    assert (counts.sum(axis=1) == 10).all()


def test_fewer_places_than_classes_leave_classes_unused() -> None:
    counts = counts_of(Pathological(classes=2), [6] * 10, peers=3)
    assert sorted((counts > 0).sum(axis=0).tolist()) == [0] * 4 + [1] * 6
    assert (counts.sum(axis=1) == 12).all()


def test_test_samples_have_the_proportions_of_the_training_samples() -> None:
    """3 : 1 : 0 in training makes 75, 25 and none of 100."""
    train, test = labels_of(3, 1), labels_of(200, 200, 200)
    split = IID().split(train, test, 1, rng=seeded())
    assert torch.bincount(test[split.test[0]], minlength=3).tolist() == [75, 25, 0]
    assert len(set(split.test[0].tolist())) == 100


def test_largest_remainders_complete_the_test_set() -> None:
    """2 : 2 : 3 of 10 is 2.86, 2.86 and 4.29: rounded to 3, 3 and 4."""
    test = labels_of(20, 20, 20)
    split = IID(test_samples_per_peer=10).split(labels_of(2, 2, 3), test, 1, rng=seeded())
    assert torch.bincount(test[split.test[0]]).tolist() == [3, 3, 4]


def test_too_few_test_images_are_repeated_evenly() -> None:
    """Seven of a class that has three: each twice and one of them a third time."""
    test = labels_of(3, 50)
    split = IID(test_samples_per_peer=14).split(labels_of(5, 5), test, 1, rng=seeded())
    times = torch.bincount(split.test[0], minlength=53)
    assert sorted(times[:3].tolist()) == [2, 2, 3]
    assert int(times[3:].max()) == 1
    assert int(times[3:].sum()) == 7


@pytest.mark.parametrize(
    ("partition", "supply", "peers", "beginning"),
    [
        (IID(), [4, 6], 12, "peers is 12 but there are 10 training samples; use at most 10."),
        (IID(), [4, 6], 0, "peers must be at least 1, got 0."),
        (
            IID(samples_per_peer=6),
            [4, 6],
            2,
            (
                "partition.samples_per_peer is 6 but 10 training samples give each of 2 peers at"
                " most 5;"
            ),
        ),
        (
            Grouped(groups=8),
            [40, 40],
            4,
            "partition.groups is 8 but peers is 4; use at most 4 groups.",
        ),
        (
            Pathological(classes=3),
            [9, 9],
            2,
            "partition.classes is 3 but the training labels have 2 classes;",
        ),
        (
            Pathological(classes=2),
            [3, 90],
            4,
            "partition.classes is 2 but for 4 peers some class has fewer training",
        ),
        (
            Pathological(samples_per_peer=6),
            [8, 99],
            4,
            "partition.samples_per_peer is 6 but 2 classes for each of 4 peers leave",
        ),
    ],
)
def test_a_request_that_the_supply_cannot_meet_is_refused(
    partition: Partition, supply: list[int], peers: int, beginning: str
) -> None:
    with pytest.raises(PartitionError) as refused:
        counts_of(partition, supply, peers)
    assert str(refused.value).startswith(beginning)


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        (labels_of(), labels_of(3), "The training labels are empty; give at least one sample."),
        (labels_of(3), labels_of(), "The test labels are empty; give at least one sample."),
        (torch.tensor([0, -1]), labels_of(3), "The training labels must count from 0, got -1."),
        (torch.zeros(4, 1), labels_of(3), NOT_LABELS),
        (labels_of(3, 3, 3), labels_of(3, 0, 3), NO_CLASS_1),
        (labels_of(3, 3), labels_of(3), NO_CLASS_1),
    ],
)
def test_labels_that_cannot_be_split_are_refused(
    train: Tensor, test: Tensor, sentence: str
) -> None:
    with pytest.raises(PartitionError) as refused:
        Dirichlet().split(train, test, 1, rng=seeded())
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("kind", "values", "beginning"),
    [
        (Dirichlet, {"alpha": 0}, "partition.alpha must be in [0.001, 10000], got 0."),
        (
            Dirichlet,
            {"alpha": float("nan")},
            "partition.alpha must be a finite number in [0.001, 10000], got nan.",
        ),
        (Grouped, {"groups": 0}, "partition.groups must be at least 1, got 0."),
        (
            IID,
            {"samples_per_peer": 0},
            'partition.samples_per_peer must be a whole number of at least 1, or "all", got 0.',
        ),
        (IID, {"alpha": 0.3}, "Unknown key partition.alpha."),
        (
            Pathological,
            {"classes": 3, "samples_per_peer": 2},
            "partition.classes is 3 but partition.samples_per_peer is 2; a peer needs",
        ),
    ],
)
def test_an_invalid_setting_is_refused_by_name(
    kind: type[Partition], values: dict[str, Any], beginning: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**values)
    assert str(refused.value).startswith(beginning)


def test_unequal_sizes_are_proportional_with_a_minimum() -> None:
    """100 by 6 : 3 : 1 : 0 with at least 15: the last two get 15, the others divide 70 by 2 : 1, as
    47 and 23."""
    assert unequal_sizes(np.array([6.0, 3.0, 1.0, 0.0]), 100, 15).tolist() == [47, 23, 15, 15]
    assert unequal_sizes(np.array([1.0, 1.0, 1.0]), 10, 3).tolist() == [4, 3, 3]
    assert unequal_sizes(np.array([1.0, 0.0]), 6, 3).tolist() == [3, 3]


skews = st.one_of(
    st.builds(
        lambda alpha: {"sizes": "dirichlet", "size_alpha": alpha},
        st.sampled_from((0.001, 0.1, 1.0, 100.0)),
    ),
    st.builds(
        lambda sigma: {"sizes": "lognormal", "size_sigma": sigma}, st.sampled_from((0.1, 1.0, 10.0))
    ),
)


@settings(max_examples=80, deadline=None)
@given(
    partition=partitions,
    skew=skews,
    supply=supplies,
    peers=st.integers(3, 12),
    seed=st.integers(0, 999),
)
def test_with_unequal_sizes_no_training_sample_is_used_twice_and_everyone_has_the_minimum(
    partition: Partition, skew: dict[str, Any], supply: list[int], peers: int, seed: int
) -> None:
    """The smallest supply is 3 classes of 12 for 12 peers, 3 samples each."""
    uneven = type(partition)(**partition.model_dump() | skew | {"min_samples": 3})
    train_labels, test_labels = labels_of(*supply), labels_of(*[5] * len(supply))
    try:
        split = uneven.split(train_labels, test_labels, peers, rng=seeded(seed))
    except PartitionError:  # a peer may hold most of the samples, but a class has only so many
        if not isinstance(partition, Pathological):
            raise
        return
    used = torch.cat(split.train)
    assert len(set(used.tolist())) == len(used)
    assert min(len(rows) for rows in split.train) >= 3
    if not isinstance(partition, Pathological):
        assert len(used) == sum(supply)
    assert all(len(rows) == 100 for rows in split.test)


def test_dirichlet_sizes_have_the_mean_and_variance_of_the_distribution() -> None:
    """Dirichlet(1) over 2,000 peers: shares with mean 1/n and standard deviation close to 1/n."""
    counts = counts_of(
        IID(sizes="dirichlet", samples_per_peer=1000, min_samples=1), [10**7], peers=2000
    )
    sizes = counts.sum(axis=1)
    assert sizes.mean() == 1000
    assert sizes.std() == pytest.approx(1000, rel=0.1)


def test_log_normal_sizes_have_their_standard_deviation() -> None:
    partition = IID(sizes="lognormal", size_sigma=0.5, samples_per_peer=1000)
    sizes = counts_of(partition, [10**7], peers=2000).sum(axis=1)
    assert sizes.mean() == 1000
    assert np.log(sizes).std() == pytest.approx(0.5, rel=0.1)


def test_unequal_iid_peers_have_the_same_label_proportions() -> None:
    counts = counts_of(IID(sizes="dirichlet", min_samples=20), [100, 300, 600], peers=8)
    sizes = counts.sum(axis=1, keepdims=True)
    assert len(set(sizes.ravel().tolist())) > 4
    assert counts.sum(axis=0).tolist() == [100, 300, 600]
    assert (np.abs(counts - sizes * [0.1, 0.3, 0.6]) <= 2).all()


def test_unequal_peers_of_a_group_share_its_proportions() -> None:
    counts = counts_of(
        Grouped(groups=2, alpha=0.3, sizes="lognormal", min_samples=20), [500] * 4, peers=8
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert np.abs(shares[:4] - shares[0]).max() < 0.1
    assert np.abs(shares[4:] - shares[4]).max() < 0.1
    assert len(set(counts.sum(axis=1).tolist())) > 4


def test_unequal_pathological_peers_have_their_classes_with_equal_counts_up_to_one() -> None:
    counts = counts_of(
        Pathological(classes=2, sizes="dirichlet", samples_per_peer=100), [5000] * 10, peers=20
    )
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert all(np.ptp(rows[rows > 0]) <= 1 for rows in counts)
    assert counts.sum() == 2000


@pytest.mark.parametrize(
    ("partition", "supply", "peers", "beginning"),
    [
        (
            IID(sizes="dirichlet", min_samples=6),
            [10, 10],
            4,
            "partition.min_samples is 6 but the 4 peers have 5 training samples on average; lower",
        ),
        (
            Pathological(classes=1, sizes="lognormal", min_samples=20),
            [20, 400],
            20,
            (
                "partition.min_samples is 20 but 1 classes for each of 20 peers leave one with 1"
                " training samples;"
            ),
        ),
    ],
)
def test_unequal_sizes_that_the_supply_cannot_meet_are_refused(
    partition: Partition, supply: list[int], peers: int, beginning: str
) -> None:
    with pytest.raises(PartitionError) as refused:
        counts_of(partition, supply, peers)
    assert str(refused.value).startswith(beginning)


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (
            IID,
            {"sizes": "zipf"},
            "partition.sizes must be 'equal', 'dirichlet' or 'lognormal', got 'zipf'.",
        ),
        (
            IID,
            {"min_samples": 2},
            "partition.min_samples needs unequal partition.sizes: dirichlet or lognormal; omit it.",
        ),
        (
            IID,
            {"size_alpha": 2},
            "partition.size_alpha needs partition.sizes=dirichlet, which is equal; omit it.",
        ),
        (
            IID,
            {"size_sigma": 2, "sizes": "dirichlet"},
            "partition.size_sigma needs partition.sizes=lognormal, which is dirichlet; omit it.",
        ),
        (
            Pathological,
            {"sizes": "dirichlet", "min_samples": 1},
            (
                "partition.classes is 2 but partition.min_samples is 1; a peer needs a sample of"
                " each class."
            ),
        ),
    ],
)
def test_a_setting_of_other_sizes_is_refused(
    kind: type[Partition], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**values)
    assert str(refused.value) == sentence


def test_a_quarter_is_held_out_for_validation_in_the_proportions_of_the_labels() -> None:
    """12 + 4 + 4 samples: 3 + 1 + 1 are held out. Together they are the samples of the split
    without validation."""
    train, test = labels_of(12, 4, 4), labels_of(20, 20, 20)
    iid = IID().split(train, test, 1, rng=seeded())
    split = IID(validation=0.25).split(train, test, 1, rng=seeded())
    assert torch.bincount(train[split.validation[0]]).tolist() == [3, 1, 1]
    assert torch.bincount(train[split.train[0]]).tolist() == [9, 3, 3]
    assert (
        torch.cat([split.train[0], split.validation[0]]).sort().values.tolist()
        == iid.train[0].tolist()
    )
    assert split.test[0].tolist() == iid.test[0].tolist()
    assert iid.validation == ()


@settings(max_examples=40, deadline=None)
@given(
    partition=partitions, share=st.floats(0.001, 0.999), supply=supplies, seed=st.integers(0, 999)
)
def test_every_peer_trains_on_a_sample_and_validates_with_another(
    partition: Partition, share: float, supply: list[int], seed: int
) -> None:
    held = partition.model_copy(update={"validation": share})
    split = held.split(labels_of(*supply), labels_of(*[5] * len(supply)), 4, rng=seeded(seed))
    for rows, held_out in zip(split.train, split.validation, strict=True):
        assert min(len(rows), len(held_out)) >= 1
        assert not set(rows.tolist()) & set(held_out.tolist())


def test_a_peer_with_one_sample_cannot_hold_one_out() -> None:
    with pytest.raises(PartitionError) as refused:
        IID(validation=0.5).split(labels_of(2), labels_of(2), 2, rng=seeded())
    assert str(refused.value).startswith(
        "partition.validation is 0.5, but a peer has a single training sample;"
    )
