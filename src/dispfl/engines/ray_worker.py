"""A Ray worker: some of a federation's peers in one process, with their data and states.

The driver selects the peer that takes its step next, and receives the result. The worker requests
the models that its peers receive from other workers while it trains. Models travel as encoded
messages where that changes their values; otherwise as they are, which takes less time, and only
their size is that of a message.
"""

import platform
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from dispfl.clock.schedule import ModelMessage
from dispfl.core.allocator import keep_heap
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.samples import PeerData
from dispfl.engines.base import PeerStates, deliver_upload, fetch_here, simulated_step
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round.context import PeerTask, RunContext, RunData, StepResult
from dispfl.round.exchange import (
    DeliveredModel,
    decode_model,
    deliver,
    encode_model,
    requested_mask,
    sent_in,
    sent_model,
    task_senders,
)
from dispfl.round.late_models import AskedModels
from dispfl.round.round import task_state

CONCURRENT_STEPS = 2
"""One peer trains while the messages of the next one are fetched."""
CONCURRENCY = {"step": CONCURRENT_STEPS, "respond": 1}
"""Calls of a worker that may run at the same time."""
WORKER_LOST = RayActorError, NodeDiedError, OutOfMemoryError, ObjectLostError
"""Ray's exceptions for a lost worker, or for its lost results."""


class ModelMissingError(Exception):
    """A worker does not have a model of one of its peers yet."""


def get(pending: Any) -> Any:
    """Return a call's result; an exception of the worker is raised as itself."""
    try:
        return ray.get(pending)
    except RayTaskError as problem:
        raise problem.cause from None


@dataclass(frozen=True)
class ModelArrays:
    """A model as arrays, which Ray moves between processes faster than tensors."""

    values: NDArray[np.float32]
    bits: NDArray[np.uint8]
    tensors: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, model: PackedModel) -> "ModelArrays":
        """Return the arrays of a model."""
        tensors = {name: tensor.numpy() for name, tensor in model.tensors.items()}
        return cls(model.values.numpy(), model.mask.bits.numpy(), tensors)

    def model(self, like: Mask) -> PackedModel:
        """Return the model, whose mask is of the same kind as another one of the federation.

        The arrays that Ray returns are read-only, which tensors must not be, so they are copied.
        """
        tensors = {name: torch.from_numpy(array.copy()) for name, array in self.tensors.items()}
        mask = replace(like, bits=torch.from_numpy(self.bits.copy()))
        return PackedModel(torch.from_numpy(self.values.copy()), mask, tensors)


@dataclass(frozen=True)
class Response:
    """A model that another worker's peer receives, and what sending it costs."""

    content: ModelArrays | bytes
    paper: int
    wire: int


@dataclass(frozen=True)
class RemoteResult:
    """A finished step as the worker reports it to the driver."""

    result: StepResult
    upload: bytes | None
    """The message to the server."""
    seconds: float


@ray.remote(concurrency_groups=CONCURRENCY)  # type: ignore[call-overload]
class Worker:
    """Trains its peers one after another on one thread.

    Meanwhile it serves their models to other workers.
    """

    def __init__(self, name: str, context: RunContext, folder: Path) -> None:
        keep_heap()
        self._folder = folder
        self._context = context
        self._network = context.network()
        self._codec = context.codec
        self._states = PeerStates(context, Checkpoints(folder, name))
        self._rounds = 0
        self._tasks: Mapping[str, PeerTask] = {}
        self._needed: Mapping[str, Collection[int]] | None = None
        """Of the asynchronous round that ends: the models that later steps may average."""
        self._workers: Mapping[int, Any] = {}
        self._assignment: Mapping[str, int] = {}
        self._training = threading.Lock()
        self._writing = threading.Lock()
        self._stop = threading.Event()

    def add_peers(self, data: Mapping[str, PeerData], rounds: int) -> None:
        """Add these peers, with their states after this many rounds."""
        if not self._folder.is_dir():
            raise ConfigError(  # not a `DamagedError`: the checkpoint itself is fine
                f"The machine {platform.node()} does not see {self._folder}. On a cluster the run"
                " directory (--out) must be on a file system that all machines share."
            )
        self._set_data(self._context.data.with_peers(data))
        self._states.restore(rounds, data)
        self._rounds = rounds

    def remove_peers(self, peers: Collection[str]) -> None:
        """Remove these peers, which another worker has from now on."""
        data = self._context.data
        remaining = {peer: data.peers[peer] for peer in data.peers if peer not in peers}
        self._set_data(replace(data, peers=remaining))
        self._states.drop(peers)

    def _set_data(self, data: RunData) -> None:
        self._context = replace(self._context, data=data)

    def partial_round(self, t: int) -> dict[str, StepResult]:
        """Restore the steps of round t that were finished before an interruption."""
        return self._states.partial_round(t, self._context.data.peers)

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each of this worker's peers, if it is online, requests models from."""
        return self._states.choices(t, graph)

    def asked_models(self, senders: Mapping[str, Sequence[str]]) -> dict[str, AskedModels]:
        """Return what this worker's peers ask for in the next round."""
        return self._states.asked_models(senders)

    def message_sizes(self, asked: Mapping[str, AskedModels]) -> list[ModelMessage]:
        """Return the messages that this worker's peers send in the next round."""
        return self._states.message_sizes(asked)

    def set_workers(self, workers: Mapping[int, Any], assignment: Mapping[str, int]) -> None:
        """Set the other workers, and which of them has which peer."""
        self._workers = workers
        self._assignment = assignment

    def set_tasks(self, tasks: Sequence[PeerTask]) -> list[str]:
        """Set the round's tasks; return the peers whose steps are on the disk.

        All tasks come in one call, because they share much data.
        """
        self._tasks = {task.peer: task for task in tasks}
        self._stop.clear()
        return list(self.partial_round(self._rounds))

    def begin_steps(self) -> None:
        """Begin the steps of an asynchronous round, perhaps after an interruption."""
        self._stop.clear()

    def end_round(self, rounds: int) -> None:
        """End a round, so that this many are finished.

        A worker that replaced a lost one may have done so already.
        """
        if self._rounds < rounds:
            if self._needed is None:
                self._states.end_round()
            else:
                self._states.end_steps(self._needed)
            self._rounds = rounds

    def flush(self, t: int) -> None:
        """Write the finished steps of round t that are not on the disk yet."""
        with self._writing:
            self._states.flush(t)

    def save_steps(self, t: int, needed: Mapping[str, Collection[int]]) -> None:
        """Save the states after asynchronous round t; `needed` has the models to keep."""
        self._needed = needed
        with self._writing:
            self._states.save_steps(t, needed)
            self._states.flush(t)

    def get_state(self, peer: str, evaluated: bool) -> PeerState:
        """Return a peer's state, or the one that it was evaluated with."""
        return (self._states.evaluated if evaluated else self._states.current)[peer]

    def evaluated_peers(self) -> list[str]:
        """Return the peers that were evaluated with a global model."""
        return list(self._states.evaluated)

    @ray.method(concurrency_group="step")
    def step(self, peer: str) -> RemoteResult | None:
        """Run a peer's task; None if a worker that it had to request models from is lost."""
        task = self._tasks[peer]
        taken = self._take(task)
        if taken is None:
            return None
        result, seconds = taken
        context = self._context
        result, delivery = deliver_upload(context, self._codec, task, result)
        with self._writing:
            result = self._states.finish(task, result)
        if delivery is None:
            return RemoteResult(result, None, seconds)
        message = delivery.message or encode_model(
            context, self._codec, delivery.model, None, peer, SERVER, task.t
        )
        return RemoteResult(replace(result, upload=None), message, seconds)

    @ray.method(concurrency_group="step")
    def async_step(self, task: PeerTask) -> RemoteResult | None:
        """Run an asynchronous step; None if another worker lacks a model that it needs."""
        taken = self._take(task)
        if taken is None:
            return None
        result, seconds = taken
        with self._writing:
            result = self._states.finish_step(task, result)
        return RemoteResult(result, None, seconds)

    def _take(self, task: PeerTask) -> tuple[StepResult, float] | None:
        """Take a step; return its result and its seconds; None if a worker with a model is lost."""
        context = self._context
        states = self._states.current
        state = task_state(context, task, states)
        fetch_own = fetch_here(context, self._codec, task, states)
        try:
            remote = self._request_remote(task, state)
        except (*WORKER_LOST, ModelMissingError):
            return None

        def fetch(sender: str, mask: Mask | None) -> DeliveredModel:
            return remote[sender] if sender in remote else fetch_own(sender, mask)

        with self._training:
            torch.set_num_threads(1)
            began = time.perf_counter()
            result = simulated_step(
                context, self._codec, self._network, task, state, fetch, self._check_stop
            )
            return result, time.perf_counter() - began

    @ray.method(concurrency_group="respond")
    def respond(
        self,
        task: PeerTask,
        senders: Sequence[str],
        request: bytes | None,
    ) -> list[Response]:
        """Return the models of this worker's peers for the task of another's peer."""
        torch.set_num_threads(1)
        context = self._context
        codec = self._codec
        mask = None if request is None else codec.decode_request(request)
        responses = []
        for sender in senders:
            try:
                model = sent_model(context, task, sender, self._states.current)
            except KeyError:  # this worker has replaced a lost one
                raise ModelMissingError from None
            t = sent_in(task, sender)
            delivery = deliver(context, codec, model, mask, sender, task.peer, t)
            content = delivery.message or ModelArrays.of(delivery.model)
            responses.append(Response(content, delivery.paper, delivery.wire))
        return responses

    @ray.method(concurrency_group="respond")
    def stop(self) -> None:
        """Stop training between two batches."""
        self._stop.set()

    def _request_remote(self, task: PeerTask, state: PeerState) -> dict[str, DeliveredModel]:
        """Return the models of the senders that other workers have."""
        by_worker: dict[int, list[str]] = {}
        for sender in task_senders(task):
            if sender != SERVER and sender not in self._states.current:
                by_worker.setdefault(self._assignment[sender], []).append(sender)
        if not by_worker:
            return {}
        mask = requested_mask(self._context, state)
        request = None if mask is None else self._codec.encode_request(mask)
        pending = [
            self._workers[worker].respond.remote(task, senders, request)
            for worker, senders in by_worker.items()
        ]
        deliveries = {}
        for senders, responses in zip(by_worker.values(), get(pending), strict=True):
            for sender, response in zip(senders, responses, strict=True):
                if isinstance(response.content, bytes):
                    model = decode_model(self._codec, response.content, mask)
                else:
                    model = response.content.model(state.next_mask)
                deliveries[sender] = DeliveredModel(model, response.paper, response.wire)
        return deliveries

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("stopped between two batches")
