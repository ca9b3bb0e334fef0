"""A site's data contract: which rows a node uses, when it takes in new ones, and what never
changes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import torch
from messages import refused
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.data.contract import FILE, DataChanges, DataContract
from dispfl.errors import ConfigError, DataError, RunError
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import free_ports
from dispfl.peer.peer import Peer
from dispfl.peer.run_site import run_node, run_site
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.site_data import DataWatch, SiteData
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.store import PrivateRounds
from dispfl.trust import remember_site

MakeSite = Callable[..., Site]
PATIENCE = 60.0
HEADER = "age,pressure,diagnosis\n"
Row = tuple[float, ...]


def patients(count: int, first: int = 0) -> list[str]:
    """Different rows; the older half is ill."""
    rows = []
    for k in range(first, first + count):
        age = 20 + 7 * k % 60
        rows.append(f"{age},{100 + k / 8},{'ill' if age > 50 else 'well'}\n")
    return rows


ROWS = patients(200)


def write(site: Site, rows: list[str], name: str = "patients.csv") -> None:
    (site.folder / name).write_text(HEADER + "".join(rows))


@pytest.fixture
def make_site(tmp_path: Path) -> MakeSite:
    def make(rounds: int = 2, data: Mapping[str, object] | None = None, **more: object) -> Site:
        own_data = {"path": "patients.csv", "label": "diagnosis", "standardize": True}
        values = {
            "rounds": rounds,
            "model": {"name": "mlp"},
            "train": {"epochs": 1, "batch_size": 32},
            "data": {**own_data, **(data or {})},
            **more,
        }
        [port] = free_ports(1)
        info = SiteInfo(name="alice", listen=f"127.0.0.1:{port}")
        site = Site.create(tmp_path / "alice", info, SiteConfig.from_values(values).to_toml())
        write(site, ROWS)
        return site

    return make


def read(site: Site) -> SiteData:
    return SiteData.read(site, site.config())


def begin(site: Site) -> SiteData:
    """Make the contract, as the first start of the node does."""
    data = read(site)
    site.run_folder.mkdir(exist_ok=True)
    data.begin(lambda event, fields: None)
    return data


def change_setting(site: Site, before: str, after: str) -> Site:
    file = site.folder / "site.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    return Site.open(site.folder)


def used_rows(data: SiteData) -> tuple[set[Row], set[Row]]:
    """The training rows and the test rows that the node uses, as they are in the table."""
    scaling = data.dataset.normalization
    assert scaling is not None
    mean = torch.tensor(scaling.mean)
    std = torch.tensor(scaling.std)
    peer_data = data.peer_data()
    parts = []
    for samples in (peer_data.train, peer_data.test):
        inputs, _ = next(samples.batches(10_000))
        raw = (inputs * std + mean).tolist()
        parts.append({tuple(round(value, 3) for value in row) for row in raw})
    return parts[0], parts[1]


def test_after_a_restart_new_rows_wait_and_no_training_row_becomes_a_test_row(
    make_site: MakeSite,
) -> None:
    site = make_site()
    train, test = used_rows(begin(site))
    write(site, [*ROWS, *patients(40, first=500)])
    restarted = read(site)
    assert used_rows(restarted) == (train, test)
    assert (restarted.changes.new, restarted.changes.removed) == (40, 0)
    events: list[tuple[str, Mapping[str, object]]] = []
    restarted.begin(lambda event, fields: events.append((event, fields)))
    [(event, fields)] = events
    assert event == "data changed"
    assert str(fields["rows"]).startswith("40 new (")
    assert f"dispfl peer data {site.folder} --refresh" in str(fields["detail"])


def test_a_refresh_takes_in_new_rows_and_moves_no_other(make_site: MakeSite) -> None:
    site = make_site()
    train, test = used_rows(begin(site))
    write(site, [*ROWS, *patients(40, first=500)])
    changes = Peer(site).data(refresh=True).changes
    train_after, test_after = used_rows(read(site))
    assert train < train_after
    assert test < test_after
    assert len(train_after) - len(train) == changes.new_training
    assert len(test_after) - len(test) == changes.new_test
    assert changes.new == 40
    assert not read(site).changes


def test_the_scaling_stays_that_of_the_first_start(make_site: MakeSite) -> None:
    """Children with another unit of pressure, who would change the mean of every column."""
    site = make_site()
    scaling = begin(site).dataset.normalization
    write(site, [*ROWS, *[f"{2 + k / 10},{14 + k / 10},well\n" for k in range(100)]])
    assert read(site).dataset.normalization == scaling
    read(site).refresh()
    assert read(site).dataset.normalization == scaling


def test_removed_rows_are_no_longer_used(make_site: MakeSite) -> None:
    site = make_site()
    train, test = used_rows(begin(site))
    write(site, ROWS[50:])
    data = read(site)
    train_after, test_after = used_rows(data)
    assert train_after < train
    assert test_after < test
    assert (data.changes.new, data.changes.removed) == (0, 50)


def test_a_corrected_label_waits_for_a_refresh_and_its_row_stays_on_its_side(
    make_site: MakeSite,
) -> None:
    site = make_site()
    data = begin(site)
    train, test = used_rows(data)
    corrected = ROWS[0].replace("well", "ill")
    write(site, [corrected, *ROWS[1:]])
    assert read(site).changes in (DataChanges(1, 0, 1, 0), DataChanges(0, 1, 0, 1))
    assert len(read(site).peer_data().train) + len(read(site).peer_data().test) == 199
    read(site).refresh()
    assert used_rows(read(site)) == (train, test)


def test_a_second_copy_of_a_row_is_a_new_row(make_site: MakeSite) -> None:
    site = make_site()
    begin(site)
    write(site, [*ROWS, ROWS[0], ROWS[0]])
    data = read(site)
    assert data.changes.new == 2
    assert len(data.peer_data().train) + len(data.peer_data().test) == 200


def test_reordered_rows_are_the_same_data(make_site: MakeSite) -> None:
    site = make_site()
    digest = begin(site).status().digest
    write(site, list(reversed(ROWS)))
    assert not read(site).changes
    assert read(site).status().digest == digest


def test_with_a_larger_test_share_rows_that_were_trained_on_are_left_out(
    make_site: MakeSite,
) -> None:
    site = make_site()
    train, test = used_rows(begin(site))
    site = change_setting(site, "[data]", "[data]\ntest_share = 0.5")
    data = read(site).refresh()
    train_after, test_after = used_rows(data)
    assert test_after == test
    assert train_after < train
    assert data.status().left_out == len(train) - len(train_after) > 0


def test_a_row_that_was_removed_after_training_does_not_return_as_a_test_row(
    make_site: MakeSite,
) -> None:
    site = make_site(data={"test_path": "others.csv"})
    write(site, patients(20, first=900), "others.csv")
    begin(site)
    write(site, ROWS[10:])
    read(site).refresh()
    write(site, [*patients(20, first=900), *ROWS[:10]], "others.csv")
    data = read(site).refresh()
    assert len(data.peer_data().test) == 20
    assert data.status().left_out == 10


def test_test_data_that_contain_training_rows_from_the_start_are_used_as_they_are(
    make_site: MakeSite,
) -> None:
    site = make_site(data={"test_path": "patients.csv"})
    begin(site)
    assert len(read(site).peer_data().test) == 200
    assert read(site).refresh().status().left_out == 0


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_model_without_its_contract_is_neither_trained_further_nor_exported(
    make_site: MakeSite, tmp_path: Path, damage: str
) -> None:
    site = make_site(rounds=1)
    run_site(site)
    file = site.run_folder / FILE
    content = file.read_bytes()
    file.unlink()
    if damage == "damaged":
        file.write_bytes(content[:100])
    with refused(RunError):
        local_setup(site)
    with refused(RunError):
        Peer(site).export(tmp_path / "model.safetensors")


def test_other_columns_and_classes_are_refused(make_site: MakeSite) -> None:
    site = make_site()
    begin(site)
    swapped = HEADER.replace("age,pressure", "pressure,age")
    (site.folder / "patients.csv").write_text(swapped + "".join(ROWS))
    with refused(DataError):
        read(site)
    write(site, [*ROWS, "51,133,kuru\n"])
    with refused(DataError):
        read(site)


def test_without_any_row_of_the_contract_the_refresh_is_named(make_site: MakeSite) -> None:
    site = make_site()
    begin(site)
    write(site, patients(100, first=700))
    with refused(DataError):
        read(site).peer_data()
    assert len(read(site).refresh().peer_data().train) > 0


def test_validation_rows_stay_validation_rows(make_site: MakeSite) -> None:
    site = make_site(validation=0.25)

    def validated() -> set[Row]:
        validation = read(site).peer_data().validation
        assert validation is not None
        inputs, labels = next(validation.batches(10_000))
        return {(*row, label) for row, label in zip(inputs.tolist(), labels.tolist(), strict=True)}

    begin(site)
    before = validated()
    write(site, [*ROWS, *patients(40, first=500)])
    assert validated() == before
    read(site).refresh()
    assert validated() > before


def test_tensors_of_a_function_have_a_contract_and_a_dataset_is_compared_by_its_counts(
    make_site: MakeSite, tmp_path: Path
) -> None:
    """Of a Dataset, which may be slow or random to read, rows are not known one by one."""
    program = """
import torch
from torch.utils.data import Dataset

points = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
labels = (points.sum(1) > 1.5).long()

class Points(Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, k):
        return points[self.rows[k]], int(labels[self.rows[k]])

def tensors():
    return (points[:COUNT], labels[:COUNT]), (points[50:], labels[50:])

def datasets():
    return Points(range(COUNT)), Points(range(50, 60))
"""
    for name in ("tensors", "datasets"):
        [port] = free_ports(1)
        values = {"data": {"factory": f"of_{name}:{name}"}, "model": {"name": "mlp"}}
        info = SiteInfo(name=name, listen=f"127.0.0.1:{port}")
        config = SiteConfig.from_values(values).to_toml()
        site = Site.create(tmp_path / name, info, config)
        remember_site(site.folder)
        file = site.folder / f"of_{name}.py"
        file.write_text(program.replace("COUNT", "40"))
        begin(site)
        saved = DataContract.load(site.run_folder)
        assert saved is not None
        assert (saved.train is None) == (name == "datasets")
        assert saved.counts == (40, 10)
        more = DataContract(saved.inputs, "", 0.0, (45, 10), None, None)
        assert saved.changes(more) == DataChanges(new_training=5)


# a running node


class Events(list[tuple[str, Mapping[str, object]]]):
    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        self.append((event, fields))

    async def until(self, event: str, times: int = 1) -> Mapping[str, object]:
        """Wait for an event, or for a number of them, and return the last one's fields."""
        async with asyncio.timeout(PATIENCE):
            while [name for name, _ in self].count(event) < times:
                await asyncio.sleep(0.02)
        return dict(self)[event]

    def rounds(self) -> int:
        return [name for name, _ in self].count("round")


def play(site: Site, story: Callable[[Events], Awaitable[None]]) -> Events:
    """Run a site's node while the story goes on, and stop it at the end of that."""
    events = Events()

    async def run() -> None:
        deadlines = Deadlines(min=0.1, startup=0.1)
        running = asyncio.create_task(run_node(site, local_setup(site), deadlines, events))
        await asyncio.wait(
            [running, asyncio.create_task(events.until("round", 2))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert not running.done(), running.exception()
        await story(events)
        running.cancel()
        await asyncio.wait([running], timeout=PATIENCE)

    asyncio.run(run())
    return events


def test_a_running_node_takes_in_new_rows_between_two_rounds_when_its_operator_says_so(
    make_site: MakeSite,
) -> None:
    site = make_site(rounds=100_000)

    async def story(events: Events) -> None:
        write(site, [*ROWS, *patients(40, first=500)])
        await events.until("round", events.rounds() + 2)
        assert "data" not in dict(events)
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["peer", "data", str(site.folder), "--refresh"]
        )
        assert result.output.splitlines()[-1] == (
            "Refreshed: the node uses these rows before its next round."
        )
        fields = await events.until("data")
        assert str(fields["rows"]).startswith("40 new (")
        assert int(str(fields["training"])) + int(str(fields["test"])) == 240
        await events.until("round", events.rounds() + 2)

    events = play(site, story)
    assert [name for name, _ in events].count("data") == 1


def test_with_reload_a_node_takes_in_changed_files_and_survives_unusable_ones(
    make_site: MakeSite,
) -> None:
    site = make_site(rounds=100_000, data={"reload": True})

    async def story(events: Events) -> None:
        write(site, ROWS[50:])
        fields = await events.until("data")
        assert str(fields["rows"]).startswith("0 new (0 training, 0 test), 50 removed (")
        write(site, [*ROWS, "half a li"])
        problem = await events.until("data problem")
        assert "line 202" in str(problem["detail"])
        await events.until("round", events.rounds() + 2)
        write(site, ROWS)
        await events.until("data", 2)

    before = used_rows(read(site))
    play(site, story)
    assert used_rows(read(site)) == before


def test_with_reload_rows_that_changed_while_the_node_was_stopped_are_taken_in(
    make_site: MakeSite,
) -> None:
    site = make_site(data={"reload": True})
    begin(site)
    write(site, [*ROWS, *patients(40, first=500)])
    events = Events()
    watch = DataWatch(read(site), events)
    peer_data = watch.new_data()
    assert peer_data is not None
    assert len(peer_data.train) + len(peer_data.test) == 240
    assert watch.new_data() is None


def test_with_privacy_each_round_is_accounted_with_the_number_of_rows_it_used(
    make_site: MakeSite,
) -> None:
    site = make_site(
        rounds=1000,
        data={"standardize": False, "classes": ["well", "ill"]},
        privacy={"noise_multiplier": 4.0},
    )

    async def story(events: Events) -> None:
        write(site, [*ROWS, *patients(100, first=500)])
        await asyncio.to_thread(Peer(site).data, refresh=True)
        await events.until("data")
        await events.until("round", events.rounds() + 2)

    play(site, story)
    rates = [taken.rate for taken in PrivateRounds(site.run_folder).begun.taken]
    train, _ = used_rows(read(site))
    assert len(rates) == 2
    assert rates[1] == 32 / len(train) < rates[0]


@pytest.mark.parametrize("key", ["data.classes", "validation"])
def test_with_privacy_no_row_decides_about_others(make_site: MakeSite, key: str) -> None:
    data: dict[str, object] = {"standardize": False}
    if key == "validation":
        program = "def load(site):\n    from torch.utils.data import ConcatDataset, TensorDataset\n"
        program += "    import torch\n    x, y = torch.rand(40, 2), torch.arange(40) % 2\n"
        program += "    return ConcatDataset([TensorDataset(x, y)]), (x, y)\n"
        data = {"factory": "fn:load", "classes": ["a", "b"]}
        values = {"validation": 0.2, "privacy": {"epsilon": 4.0}, "data": data, "model": "mlp"}
        site = make_site()
        (site.folder / "fn.py").write_text(program)
        config = SiteConfig.from_values(values)
        with refused(ConfigError, key=key):
            SiteData.read(site, config).peer_data()
        return
    site = make_site(data=data, privacy={"epsilon": 4.0})
    with refused(ConfigError, key=key):
        local_setup(site)


# what the operator sees


def test_the_command_shows_the_data_and_what_changed(make_site: MakeSite) -> None:
    site = make_site(validation=0.25)
    first = CliRunner().invoke(app, ["peer", "data", str(site.folder), "--refresh"])
    assert "first start of the node" in first.output
    data = begin(site)
    write(site, [*ROWS[1:], *patients(3, first=500)])
    result = CliRunner().invoke(app, ["peer", "data", str(site.folder)])
    assert result.exit_code == 0, result.output
    facts = {}
    for line in result.output.splitlines()[:-1]:
        name, _, text = line.partition("  ")
        facts[name] = text.strip()
    status = data.status()
    assert facts["digest"] == str(status.digest)[:16]
    assert facts["classes"] == "ill, well"
    assert facts["columns"] == "age, pressure"
    assert facts["scaling"].startswith("age ")
    assert facts["changed"].startswith("3 new (")
    assert result.output.splitlines()[-1] == (
        f"New rows are not used before: dispfl peer data {site.folder} --refresh"
    )
    refreshed = CliRunner().invoke(app, ["peer", "data", str(site.folder), "--refresh"])
    assert (
        refreshed.output.splitlines()[-1] == "Refreshed: the node uses these rows when it starts."
    )
    again = CliRunner().invoke(app, ["peer", "data", str(site.folder), "--refresh"])
    assert again.output.splitlines()[-1] == "Nothing to refresh: all rows are in use."


def test_a_data_set_of_the_catalogue_has_no_contract(tmp_path: Path) -> None:
    [port] = free_ports(1)
    info = SiteInfo(name="bob", listen=f"127.0.0.1:{port}")
    site = Site.create(tmp_path / "bob", info, SiteConfig.from_values({}).to_toml())
    status = Peer(site).data()
    assert (status.source, status.kind, status.digest) == ("fashion-sample", "images", None)
    assert Peer(site).data(refresh=True) == status


def test_a_site_that_is_moved_with_its_data_keeps_working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hospital").mkdir()
    monkeypatch.chdir(tmp_path / "hospital")
    Path("patients.csv").write_text(HEADER + "".join(ROWS))
    settings = ["data.path=patients.csv", "data.label=diagnosis", "model=mlp"]
    Peer.create("site", name="alice", listen="127.0.0.1:1", overrides=settings)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospital").rename(tmp_path / "clinic")
    moved = Peer.open("clinic/site")
    assert moved.data().source == str(tmp_path / "clinic" / "patients.csv")
