"""The network of a site: its transport, and TLS contexts that follow the member list."""

import asyncio
from collections import Counter

from cryptography import x509

from dispfl.errors import ConfigError, DispflError
from dispfl.peer.clocks import wrong_clock
from dispfl.peer.membership import sync
from dispfl.peer.membership.address import RelayAddress
from dispfl.peer.membership.audit_log import changes, limited
from dispfl.peer.membership.identity import client_context, pin, server_context
from dispfl.peer.membership.member_list import MemberList
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node_context import NodeContext
from dispfl.peer.outbox.reader import OutboxReader
from dispfl.peer.outbox.sealing import can_seal
from dispfl.peer.outbox.state import OutboxState
from dispfl.peer.outbox.storage import StorageAccess
from dispfl.peer.setup.local_setup import LocalSetup
from dispfl.peer.setup.site_config import OUTBOX_NEEDS_PUSH
from dispfl.peer.site import Site
from dispfl.peer.transport.bandwidth import Bandwidth
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from dispfl.peer.transport.relay_client import RelayClient, RelayState
from dispfl.wire.codec import HEADER
from dispfl.wire.tensors import max_tensor_bytes

CLOCK_INTERVAL = 30.0
"""Seconds between two comparisons of the members' clocks."""
MEMBERS_INTERVAL = 0.5
"""Seconds between two checks of the members file."""
BODY_MARGIN = 4096
"""Bytes that a body may exceed the largest message by, so that the codec reports what is wrong with
it."""


class SiteNetwork:
    """The transport and its TLS contexts, which trust new members while it runs."""

    def __init__(
        self,
        site: Site,
        setup: LocalSetup,
        membership: SiteMembership,
        limits: Limits,
        guard: RequestGuard,
    ) -> None:
        if site.info.outbox and setup.run.pulls:
            raise ConfigError(OUTBOX_NEEDS_PUSH, key="outbox")
        self._site = site
        self.limits = limits
        self._generation = site.members.generation
        self._pinned: set[x509.Certificate] = set(site.members.pinned())
        self.client_tls = client_context(site.identity, self._pinned)
        self.server_tls = server_context(site.identity, self._pinned)

        layout = setup.layout
        mask_bytes = layout.size // 8
        value_bytes = 4 * (layout.size + len(layout.sizes))
        largest_request = HEADER.size + mask_bytes + BODY_MARGIN
        max_request = {"sync": sync.MAX_BODY_BYTES, "model": largest_request}
        tensor_bytes = max_tensor_bytes(setup.run.tensors)
        largest_response = largest_request + value_bytes + tensor_bytes
        max_response = {"sync": sync.MAX_BODY_BYTES, "model": largest_response}
        self.relays = RelayClient(
            site.identity,
            limits,
            relays_of=membership.relays,
            fingerprint_of=membership.fingerprint,
            own=site.info.relay_addresses,
            ca_bundle=site.info.ca_bundle,
            may_connect=site.info.may_connect,
        )
        self.outbox_state = OutboxState.load(site.run_folder)
        sealing_key = None
        if not setup.run.pulls and can_seal():
            sealing_key = site.make_sealing_key()
        bandwidth = Bandwidth(limits.bytes_per_second)
        self.storage_access = StorageAccess(limits, bandwidth, ca_bundle=site.info.ca_bundle)
        self.outboxes = OutboxReader(
            site.name,
            membership,
            sealing_key,
            self.storage_access,
            max_response["model"],
            self.outbox_state.seen,
            guard.refused,
        )
        self.transport = HttpsTransport(
            site.name,
            site.info.listen_address,
            client=self.client_tls,
            server=self.server_tls,
            identify=membership.identify,
            address=membership.address,
            max_request=lambda kind: max_request.get(kind, 0),
            max_response=lambda kind: max_response.get(kind, 0),
            limits=limits,
            guard=guard,
            may_connect=site.info.may_connect,
            relays=self.relays,
            outboxes=self.outboxes,
            bandwidth=bandwidth,
        )

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes sent and received on the sockets, including TLS and HTTP, and those of objects in
        outboxes."""
        counters = [*self.transport.counters.traffic.values(), self.storage_access.counter]
        return {
            "sent": sum(counter.sent for counter in counters),
            "received": sum(counter.received for counter in counters),
        }

    def relay_problems(self) -> dict[str, str | None]:
        """By relay of this site: why others do not reach it there; None if they do."""
        problems = {}
        for relay, state in self.relays.states.items():
            problem = None if state.is_connected else state.problem or "not connected yet"
            problems[f"wss://{relay.address}"] = problem
        return problems

    def log_relays(self, ctx: NodeContext) -> None:
        """Log when others begin to reach this site by a relay, and when they no longer do."""

        def log(relay: RelayAddress, state: RelayState) -> None:
            fields: dict[str, object] = {"relay": f"wss://{relay.address}"}
            if state.problem is not None:
                fields["detail"] = state.problem
            ctx.log("relay" if state.is_connected else "relay lost", fields)

        self.relays.on_change = log

    def log_outboxes(self, ctx: NodeContext) -> None:
        """Log what is refused of members' outboxes."""

        def log(peer: str, reason: str | None, detail: str) -> None:
            if reason is None:
                ctx.peer_log.event(peer, "outbox read again")
            else:
                ctx.peer_log.event(peer, "bad outbox", reason=reason, detail=detail)

        self.outboxes.log = log

    async def follow_members(self) -> None:
        """Trust certificates that were accepted since the last call, and only current ones."""
        generation = self._site.members.generation
        if generation == self._generation:
            return
        pinned = set(self._site.members.pinned())
        if self._pinned - pinned:  # certificates cannot be removed from a context
            self.server_tls = await asyncio.to_thread(server_context, self._site.identity, pinned)
            self.transport.use_server_context(self.server_tls)
        for certificate in pinned - self._pinned:
            pin(self.client_tls, certificate)
            pin(self.server_tls, certificate)
        self._generation = generation  # last: what fails is tried again
        self._pinned = pinned

    async def watch_clocks(self, ctx: NodeContext) -> None:
        """Log whose clock is wrong, once, by the dates in the members' responses."""
        logged: set[str | None] = set()
        while True:
            await asyncio.sleep(CLOCK_INTERVAL)
            ahead = {}
            for name in list(ctx.status.peers):
                seconds = self.transport.clock_ahead(name)
                if seconds is not None:
                    ahead[name] = seconds
            wrong = wrong_clock(ahead)
            if wrong is not None and wrong.is_certain and wrong.name not in logged:
                logged.add(wrong.name)
                site = wrong.name or ctx.name
                ctx.log("wrong clock", {"peer": site, "seconds_ahead": round(wrong.ahead)})

    async def watch_members(self, ctx: NodeContext, members: MemberList) -> None:
        """Apply, save and log changes of the member list, by other processes and by members.

        `members` is the list that was read when the node started.
        """
        list_file = self._site.members.file
        address_changes = Counter[str]()
        last_problem = ""
        for problem in list_file.problems:
            ctx.log("problem", {"detail": f"{list_file.path}: {problem}"})
        while True:
            try:
                before = members
                members = list_file.current()
                try:
                    await self.follow_members()
                finally:  # also if that fails: it needs some space on the disk
                    for change in limited(changes(before, members), address_changes):
                        if change.event == "revoked":
                            await self.transport.disconnect(change.member)
                        ctx.log(change.event, {"peer": change.member or None, **change.detail})
                await ctx.compute(list_file.save)
                last_problem = ""
            except (DispflError, OSError) as problem:
                if str(problem) != last_problem:
                    last_problem = str(problem)
                    ctx.log("problem", {"detail": last_problem})
            await asyncio.sleep(MEMBERS_INTERVAL)
