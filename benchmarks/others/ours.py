"""dispfl's side."""

from work import LR, PROX, WEIGHT_DECAY, Work, end_of_round

from dispfl import DPSGD, Ditto, FedAvg, Federation, RandomRegular, Train

work = Work.given()
of_global, of_personal = work.ditto_epochs
methods = {
    "fedavg": FedAvg(cohort=work.peers),
    "ditto": Ditto(
        cohort=work.peers, global_epochs=of_global, personal_epochs=of_personal, prox_mu=PROX
    ),
    "gossip": DPSGD(),
}
train = Train(
    epochs=work.epochs,
    batch_size=work.batch,
    lr=LR,
    lr_decay=1.0,
    weight_decay=WEIGHT_DECAY,
    clip_norm=0,
)
one = tuple(part[:2] for part in work.data(0))
federation = Federation(
    work.network,
    [
        (work.data(peer), one) for peer in range(work.peers)
    ],  # evaluated on two samples, after the last round only
    methods[work.method],
    RandomRegular(degree=1),
    train=train,
    eval_every=work.rounds,
    rounds=work.rounds,
)
federation.run(callbacks=[lambda run: end_of_round()], progress=False)
