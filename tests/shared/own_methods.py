"""Methods of a user's own, as in a module beside a config: `method=own_methods:PushSum`."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dispfl import (
    GossipMethod,
    Layout,
    PackedModel,
    PeerState,
    ServerMethod,
    TensorSpec,
    Trainer,
    average_of,
)


class PushSum(GossipMethod):
    """Gossip over any graph: models are averaged together with a weight, which divides them.

    x <- mean of x_j, o <- mean of o_j, over ourselves and who sends to us; z = x / o is trained.
    """

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        return {"push_sum": TensorSpec()}

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        state = super().start(weights, layout, density, seed=seed, peer=peer)
        first = 1 + int(peer) / 4
        x = PackedModel.pack(first * weights, state.model.mask)
        return replace(state, model=x.with_tensors(push_sum=first))

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        models = {**received, trainer.peer: state.model}
        x = torch.zeros(state.model.mask.size)
        push_sum = torch.zeros(())
        for name in sorted(models):
            x += models[name].over(state.model.values) / len(models)
            push_sum += models[name].tensors["push_sum"] / len(models)
        learned = trainer.learn(x / push_sum, state.model.mask)
        model = PackedModel.pack(learned * push_sum, state.model.mask)
        return PeerState(model.with_tensors(push_sum=push_sum), model.mask, trainer.buffers)


class Scaffold(ServerMethod):
    """SCAFFOLD (Karimireddy et al. 2020), option II: gradients are corrected by control variates.

    y <- y - lr (g(y) - c_k + c);  c_k' = c_k - c + (x - y) / (steps lr);  both changes are sent.
    """

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        return {"control": TensorSpec((layout.size,))}

    def start_server(self, weights: Tensor, layout: Layout) -> PeerState:
        server = super().start_server(weights, layout)
        control = torch.zeros(layout.size)
        return replace(server, model=server.model.with_tensors(control=control))

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        x, mask = received.unpack()
        c = received.tensors["control"]
        c_k = state.memory.get("control", torch.zeros_like(c))
        lr = trainer.settings.rate(trainer.t, trainer.T)
        losses = []
        trainer.begin(x, mask)
        for inputs, labels in trainer.batches():
            losses.append(trainer.backward(inputs, labels))
            trainer.network.weights.sub_(trainer.network.grad - c_k + c, alpha=lr)
        y = trainer.end(torch.stack(losses).mean())

        next_c_k = c_k - c + (x - y) / (len(losses) * lr)
        upload = PackedModel.pack(y, mask).with_tensors(control=next_c_k - c_k)
        model = PackedModel.pack(y, mask)
        memory = {"control": next_c_k}
        return PeerState(model, model.mask, trainer.buffers, memory, upload=upload)

    def aggregate(
        self, server: PeerState, uploads: Mapping[str, PackedModel], samples: Mapping[str, int]
    ) -> PeerState:
        x, mask = server.model.unpack()
        mean = torch.zeros_like(x)
        control = server.model.tensors["control"].clone()
        for peer in sorted(uploads):
            mean += uploads[peer].over(x) / len(uploads)
            control += uploads[peer].tensors["control"] / 5
        model = PackedModel.pack(mean, mask)
        return PeerState(model.with_tensors(control=control), model.mask)


class Prototypes(GossipMethod):
    """Peers average with those whose classes look alike: by the mean outputs of each class."""

    def tensors(self, layout: Layout) -> Mapping[str, TensorSpec]:
        classes = layout.sizes[-1]
        return {
            "prototypes": TensorSpec((classes, classes)),
            "counts": TensorSpec((classes,), dtype="int64"),
        }

    def start(
        self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str
    ) -> PeerState:
        state = super().start(weights, layout, density, seed=seed, peer=peer)
        classes = layout.sizes[-1]
        nothing = {
            "prototypes": torch.zeros(classes, classes),
            "counts": torch.zeros(classes, dtype=torch.int64),
        }
        return replace(state, model=state.model.with_tensors(**nothing))

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        own_weights, mask = state.model.unpack()
        own_prototypes = state.model.tensors["prototypes"]
        models = {**received, trainer.peer: state.model}
        similarities = []
        for name in sorted(models):
            held = models[name].tensors["counts"] > 0
            distance = (models[name].tensors["prototypes"] - own_prototypes)[held].square().sum()
            similarities.append(-distance)
        shares = torch.stack(similarities).softmax(0)
        mixed = torch.zeros_like(own_weights)
        for share, name in zip(shares, sorted(models), strict=True):
            mixed += share * models[name].over(own_weights)
        model = PackedModel.pack(trainer.learn(mixed, mask), mask)
        beside = self.measured(trainer, model, len(own_prototypes))
        return PeerState(model.with_tensors(**beside), model.mask, trainer.buffers)

    def measured(self, trainer: Trainer, model: PackedModel, classes: int) -> dict[str, Tensor]:
        """Return the mean output of each class on the training data, and the classes' samples."""
        network = trainer.network
        network.load(model.flat(), trainer.buffers)
        total = torch.zeros(classes, classes)
        counts = torch.zeros(classes, dtype=torch.int64)
        with torch.no_grad():
            for x, y in trainer.train.batches(50):
                total.index_add_(0, y, network(x))
                counts += torch.bincount(y, minlength=classes)
        return {"prototypes": total / counts.clamp(min=1)[:, None], "counts": counts}


class Undeclared(PushSum):
    """Sends what it does not declare."""

    def publish(self, state: PeerState) -> PackedModel:
        return state.model.with_tensors(secret=torch.zeros(3))


class Forgotten(PushSum):
    """Loses its tensor after the first step."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        after = super().step(trainer, state, received)
        return replace(after, model=replace(after.model, tensors={}))


class ForgottenUpload(Scaffold):
    """Uploads a model without its control variate."""

    def step(self, trainer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        after = super().step(trainer, state, received)
        assert after.upload is not None
        return replace(after, upload=replace(after.upload, tensors={}))


class Diverging(PushSum):
    """Divides by zero in round 1, at one peer."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        after = super().step(trainer, state, received)
        if (trainer.peer, trainer.t) != ("001", 1):
            return after
        infinite = torch.ones(()) / 0
        return replace(after, model=after.model.with_tensors(push_sum=infinite))


class LargestWeights(GossipMethod):
    """Peers send the largest twentieth of their weights."""

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        return [False] * len(layout.sizes)

    def publish(self, state: PeerState) -> PackedModel:
        weights, mask = state.model.unpack()
        largest = weights.abs().topk(len(weights) // 20).indices
        return PackedModel.pack(weights, torch.zeros_like(mask).index_fill(0, largest, True))

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        models = {**received, trainer.peer: state.model}
        mask = state.model.mask
        mixed = average_of((models[name] for name in sorted(models)), mask.unpack())
        model = PackedModel.under(trainer.learn(mixed, mask), mask)
        return PeerState(model, mask, trainer.buffers)


class LargestUnderMask(LargestWeights):
    """The same, requested with the receiver's mask."""

    pulls_masked = True
