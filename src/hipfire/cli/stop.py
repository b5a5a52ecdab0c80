"""`hipfire stop`: end this user's server, and no other process.

The record that the server wrote is only believed if the process is proven to be the one that wrote it.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from hipfire.base import log
from hipfire.base.errors import ValidationError
from hipfire.cli.background import end_server, forget
from hipfire.cli.remote import Remote
from hipfire.cli.remote_wire import Address
from hipfire.cli.serving import configured_address, recorded_server
from hipfire.cli.settings import WHOLE, load_settings


def stop(
    port: Annotated[int | None, WHOLE] = None,
    /,
    *,
    force: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """End the server that runs; running replies are finished first, for at most 30 seconds.

    Parameters
    ----------
    port
        Only if the server listens there.
    force
        Drop running replies, and kill it if it does not end within 5 seconds.
    """
    config = load_settings()
    usual = configured_address(config)
    known = recorded_server(config)
    wanted = Address(usual.host, port if port is not None else usual.port)
    if known is None or not known.alive:
        if known is not None:
            forget(known.record)
        health = Remote(wanted).health()
        if health is not None:
            raise ValidationError(
                f"the server at {wanted}, process {health.pid}, is not in this home's record",
                hint="stop it where it was started",
            )
        log.logger().info("no server is running")
        return
    if port is not None and known.record.port not in (None, port):
        raise ValidationError(
            f"the server of this home listens at port {known.record.port}, not {port}",
            hint="`hipfire stop` without a port ends it",
        )
    if known.fault is not None:
        state = "is removed" if forget(known.record) else "cannot be removed"
        raise ValidationError(
            f"nothing was stopped: {known.fault}", hint=f"the record was out of date and {state}"
        )
    end_server(known.record, force=force)
    log.logger().info(f"stopped process {known.record.pid}")
