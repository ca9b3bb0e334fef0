"""Who still has to hear whom: a state is forgotten when nobody does, and soon."""

from collections.abc import Callable

import torch

from dispfl.core.packed import PackedModel
from dispfl.engines.listening import Listening
from dispfl.methods.dispfl import DisPFL
from dispfl.round import start
from dispfl.topology import RandomRegular, Ring
from dispfl.work import Part, Setting

MakeSetting = Callable[..., Setting]


def parts_of(setting: Setting) -> list[Part]:
    heard = setting.topology.heard(setting.seed, 0, setting.roster)
    return [Part(peer, 0, heard) for peer in setting.roster]


def test_in_a_ring_a_state_is_unheard_when_its_peer_and_both_neighbours_are_done(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=4, topology=Ring())
    parts = parts_of(setting)
    listening = Listening(setting, parts, start(setting))
    unheard = [sorted(listening.unheard_after(part)) for part in parts]
    assert unheard == [[], [], ["001"], ["000", "002", "003"]]


def most_at_once(setting: Setting, order: list[Part]) -> int:
    """How many states there are at most, this round's and the next one's."""
    listening = Listening(setting, order, start(setting))
    now, most = len(order), 0
    for done, part in enumerate(order, 1):
        most = max(most, now + done)
        now -= len(listening.unheard_after(part))
    assert now == 0
    return most


def test_the_order_keeps_fewer_states_than_the_rosters(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=40, topology=RandomRegular(degree=4))
    parts = parts_of(setting)
    order = Listening(setting, parts, start(setting)).in_order()
    assert sorted(part.peer for part in order) == setting.roster
    assert most_at_once(setting, order) < most_at_once(setting, parts) < 80


def test_nothing_is_forgotten_while_peers_are_only_judged(make_setting: MakeSetting) -> None:
    setting = make_setting(peers=3, method=DisPFL())
    shared = PackedModel.pack(torch.zeros(67), torch.ones(67, dtype=torch.bool))
    parts = [Part(peer, 0, shared=shared, idle=True) for peer in setting.roster]
    listening = Listening(setting, parts, start(setting))
    assert [listening.unheard_after(part) for part in parts] == [[], [], []]
    assert [part.peer for part in listening.in_order()] == setting.roster
