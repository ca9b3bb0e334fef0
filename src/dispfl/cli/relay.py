"""`dispfl relay`: connect sites that have no open port, without being trusted."""

from pathlib import Path
from typing import Annotated

import typer


def relay(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on, such as 0.0.0.0:443.")
    ],
    members: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Who may use it: a signed roster, invites, a list of fingerprints, or a folder of"
            " these; several with several options.",
        ),
    ],
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address where sites reach it, if it differs."),
    ] = None,
    identity: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder of its own key and certificate, made at the first start."
        ),
    ] = Path("relay-identity"),
    cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A certificate of a public authority, with its chain."),
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --cert.")] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections of one member at the same time.")
    ] = 256,
    max_gb_per_hour: Annotated[
        float, typer.Option(min=0.001, help="Gigabytes of one member in an hour.")
    ] = 200.0,
    max_hours: Annotated[
        float, typer.Option(min=0.01, help="Hours after which a connection is closed.")
    ] = 24.0,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which Prometheus reads its metrics, such as 127.0.0.1:9464.",
        ),
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log as JSON, one object per line.")
    ] = False,
) -> None:
    """Run a relay: it connects sites that only connect outward.

    It is trusted with nothing: it passes on the sites' own TLS connections,
    and sees who talks to whom, when and how much. Only the members in
    --members may use it; the files are read again when they change. The line
    that it prints is what sites write as relays into site.toml (--relay).

    Example: dispfl relay --listen 0.0.0.0:443 --advertise relay.example.org:443
    --members hearts.roster
    """
    from dispfl.peer.run_relay import RelaySettings, run_relay
    from dispfl.peer.transport.relay_server import HOUR, RelayLimits

    limits = RelayLimits(
        connections=max_connections,
        hourly_bytes=max_gb_per_hour * 1e9,
        max_seconds=max_hours * HOUR,
    )
    settings = RelaySettings(listen, members, advertise, identity, cert, key, metrics, limits)
    typer.echo(f"Sites reach this relay at: {settings.address()}")
    run_relay(settings, log_json=log_json)
