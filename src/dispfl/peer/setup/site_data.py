"""A site's own data under its contract: which rows its node uses, and when it takes in new ones."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from torch import Tensor

from dispfl.core.rng import stream_seed
from dispfl.core.samples import PeerData, Samples
from dispfl.data.contract import FILE, DataChanges, DataContract
from dispfl.data.custom import data_folder, data_source, located
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.labelled import InputFormat, LabelledDataset
from dispfl.data.rows import are_validation_rows
from dispfl.data.split import hold_out
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, DataError, DispflError, RunError
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site
from dispfl.peer.state.log import EventLog


@dataclass(frozen=True)
class DataStatus:
    """What a site's data are, and which of their rows its node uses."""

    source: str
    """The file, the folder, the function, or the data set of the catalogue or the hub."""
    kind: str
    """`table`, `images` or `arrays`."""
    training: int
    """Rows that the site trains on."""
    validation: int
    test: int
    digest: str | None
    """Of the contract's rows; None for a data set of the catalogue."""
    classes: list[str]
    columns: list[str]
    mean: list[float] | None
    """The scaling, per column or channel, that the model is trained with; None without one."""
    std: list[float] | None
    contract: float | None
    """When the rows were taken in, as a Unix time; None before the first start."""
    changes: DataChanges
    """Rows that are new or removed since then."""
    left_out: int
    """Test rows that are not used, because they were trained on before."""


@dataclass(frozen=True, eq=False)
class SiteData:
    """A site's data as they are now, and the contract that says which of their rows it uses."""

    site: Site
    config: SiteConfig
    dataset: LabelledDataset
    present: DataContract | None = None
    """The contract that all present rows would have; None for data of the catalogue, which do not
    change."""
    saved: DataContract | None = None
    """The contract of the site's run; None before its first start."""
    signature: "Signature" = ()
    """The signature of the files before they were read."""

    @classmethod
    def read(cls, site: Site, config: SiteConfig) -> "SiteData":
        """Read the data that a site's settings name, in the format that its model is trained in."""
        if not isinstance(config.data, CustomData):
            return cls(site, config, load_dataset(config.data, task=config.task))
        signature = _signature(_files_of(site, config.data))
        saved = DataContract.load(site.run_folder)
        if saved is None and Checkpoints(site.run_folder / "checkpoints").finished_rounds():
            raise RunError(
                f"{site.run_folder / FILE} is missing, which has the scaling and the rows that the"
                f" model was trained with. Restore it from a backup, or delete {site.run_folder}"
                " to start again."
            )
        dataset = load_dataset(
            config.data,
            task=config.task,
            site=site.name,
            seed=config.seed,
            folder=site.folder,
            inputs=saved.inputs if saved else None,
        )
        present = DataContract.of(dataset, saved)
        return cls(site, config, dataset, present, saved, signature)

    @property
    def contract(self) -> DataContract | None:
        """The contract in force."""
        return self.saved or self.present

    @property
    def changes(self) -> DataChanges:
        """The rows that are new or removed since the contract was made."""
        if self.saved is None or self.present is None:
            return DataChanges()
        return self.saved.changes(self.present)

    @property
    def reloads(self) -> bool:
        """Whether new rows are used without being asked for."""
        return isinstance(self.config.data, CustomData) and self.config.data.reload

    def file_signature(self) -> "Signature":
        """Return the signature of the files as they are now."""
        assert isinstance(self.config.data, CustomData)
        return _signature(_files_of(self.site, self.config.data))

    @property
    def refresh_command(self) -> str:
        """What the operator types to use new rows."""
        return f"dispfl peer data {quote(str(self.site.folder))} --refresh"

    def peer_data(self) -> PeerData:
        """Return the samples that the site trains on, tests with and validates with."""
        train, test = self.dataset.samples(augment=self.config.data.augment)
        train_rows: Tensor | None = None
        test_rows: Tensor | None = None
        if self.contract is not None:
            train_rows, test_rows = self.contract.rows_of(self.dataset)
        peer_data = PeerData(_take(train, train_rows), _take(test, test_rows))
        if not self.config.validation:
            return peer_data

        if train_rows is None:
            train_rows = torch.arange(len(train))
        training, validation = self._hold_out(train_rows)
        return replace(peer_data, train=train.take(training), validation=train.take(validation))

    def _hold_out(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Divide training rows into those for training and those for validation."""
        share = self.config.validation
        if self.dataset.row_ids is None:
            if self.config.privacy.enabled and isinstance(self.config.data, CustomData):
                raise ConfigError(
                    f"validation is {share:g}, but with privacy no sample may decide which others"
                    " are trained on. Set it to 0, or let data.factory return tensors.",
                    key="validation",
                )
            rng = np.random.default_rng(stream_seed(self.config.seed, "validation", self.site.name))
            return hold_out(rows, self.dataset.train_labels, share, rng, "validation")

        is_validation = are_validation_rows(self.dataset.row_ids.train[rows], share)
        training = rows[~is_validation]
        validation = rows[is_validation]
        for part, name in ((training, "training"), (validation, "validation")):
            if not len(part):
                raise DataError(
                    f"validation is {share:g}, but of {len(rows)} training rows none is a {name}"
                    " row: their content decides. Add rows, or set validation=0."
                )
        return training, validation

    def status(self) -> DataStatus:
        """Describe the data."""
        settings = self.config.data
        source = settings.name
        if isinstance(settings, CustomData):
            source = data_source(settings, self.site.folder)
        own_data = self.peer_data()
        inputs = InputFormat.of(self.dataset)
        status = DataStatus(
            source=source,
            kind=inputs.kind,
            training=len(own_data.train),
            validation=len(own_data.validation or ()),
            test=len(own_data.test),
            digest=None,
            classes=list(inputs.classes),
            columns=list(inputs.columns),
            mean=None,
            std=None,
            contract=None,
            changes=self.changes,
            left_out=0,
        )
        if inputs.normalization is not None:
            mean, std = inputs.normalization
            status = replace(status, mean=list(mean), std=list(std))
        if self.contract is not None:
            contract = self.contract
            status = replace(status, digest=contract.digest, left_out=contract.left_out)
        if self.saved is not None:
            status = replace(status, contract=self.saved.made)
        return status

    def begin(self, log: EventLog) -> None:
        """Make the contract at the first start; later, log which rows are not used."""
        if self.present is None:
            return
        if self.saved is None:
            self.present.save(self.site.run_folder)
        elif self.changes and not self.reloads:
            waiting = f"new rows are not used before {self.refresh_command}"
            log("data changed", {"rows": str(self.changes), "detail": waiting})

    def refresh(self) -> "SiteData":
        """Put all present rows under the contract; return the data with that.

        A running node takes them in before its next round.
        """
        if self.present is None or self.saved is None:
            return self  # they do not change, or are taken in at the first start
        self.present.save(self.site.run_folder)
        return replace(self, saved=self.present)


def _take(samples: Samples, rows: Tensor | None) -> Samples:
    return samples if rows is None else samples.take(rows)


class DataWatch:
    """Looks, between two rounds, for rows that the node shall take in.

    That is when `dispfl peer data --refresh` has renewed the contract, or with `data.reload` when
    the files have changed. Files that cannot be used are logged once, and training continues with
    the data in memory.
    """

    def __init__(self, data: SiteData, log: EventLog) -> None:
        self._data = data
        self._log = log
        self._signature = data.signature
        if data.present is not None and data.saved is None:  # the contract was just made
            self._signature = data.file_signature()
        elif data.reloads and data.changes:  # it is renewed in the first round
            self._signature = ()

    def new_data(self) -> PeerData | None:
        """Return the site's samples if others shall be used since the last call."""
        data = self._data
        if data.present is None:
            return None
        signature = data.file_signature()
        if signature == self._signature:
            return None
        self._signature = signature
        try:
            return self._read()
        except (DispflError, OSError) as problem:
            detail = f"{problem} Training continues with the data in memory."
            self._log("data problem", {"detail": detail})
            return None

    def _read(self) -> PeerData | None:
        data = SiteData.read(self._data.site, self._data.config)
        if data.reloads and data.changes:
            data = data.refresh()
            self._signature = data.file_signature()
        earlier = self._data.contract
        self._data = data
        assert earlier is not None
        assert data.contract is not None
        changes = earlier.changes(data.contract)
        if not changes:
            return None
        peer_data = data.peer_data()
        counts = {"training": len(peer_data.train), "test": len(peer_data.test)}
        self._log("data", {"rows": str(changes), **counts})
        return peer_data


Signature = tuple[tuple[str, int, int, int], ...]
"""Name, number, size and time of change of files: another one means other contents."""


def _files_of(site: Site, settings: CustomData) -> list[Path]:
    """The contract, and the files and folders of the data if they are reloaded."""
    paths = [site.run_folder / FILE]
    if settings.reload:
        home = data_folder(settings, site.folder)
        for name in (settings.path, settings.test_path):
            if name:
                paths.append(located(home, name))
    return paths


def _signature(paths: Iterable[Path]) -> Signature:
    """Return the signature of files, and of all files in folders; missing ones have none."""
    entries = []
    for path in paths:
        for file in _walk(path):
            try:
                status = file.stat()
            except OSError:
                continue
            entries.append((str(file), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(entries))


def _walk(path: Path) -> Iterator[Path]:
    """The file, or all files in the folder."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)
