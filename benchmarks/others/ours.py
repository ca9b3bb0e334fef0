"""dispfl's side."""

from work import LR, PROX, WEIGHT_DECAY, Work, end_of_round

from dispfl import DPSGD, Ditto, FedAvg, Federation, Method, RandomRegular, Train


def method(work: Work) -> Method:
    """Return the method of the work."""
    global_epochs, personal_epochs = work.ditto_epochs
    match work.method:
        case "fedavg":
            return FedAvg(cohort=work.peers)
        case "ditto":
            return Ditto(
                cohort=work.peers,
                global_epochs=global_epochs,
                personal_epochs=personal_epochs,
                prox_mu=PROX,
            )
        case _:
            return DPSGD()


def federation(work: Work) -> Federation:
    """Return the peers, which are evaluated on two samples, after the last round only."""
    x, y = work.data(0)
    test_data = (x[:2], y[:2])
    return Federation(
        work.network,
        [(work.data(peer), test_data) for peer in range(work.peers)],
        method(work),
        RandomRegular(degree=1),
        train=Train(
            epochs=work.epochs,
            batch_size=work.batch,
            lr=LR,
            lr_decay=1.0,
            weight_decay=WEIGHT_DECAY,
            clip_norm=0,
        ),
        eval_every=work.rounds,
        rounds=work.rounds,
    )


if __name__ == "__main__":
    work = Work.from_environment()
    federation(work).run(callbacks=[lambda run: end_of_round()], progress=False, fast=work.fast)
