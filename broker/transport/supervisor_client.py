"""The gateway's client of the supervisor channel (`protocol.channel`), on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from msgspec import structs

from protocol.channel import SUPERVISOR_FD, Channel, ChannelReader, ChannelWriter
from protocol.supervisor_messages import DesiredModels, ModelStates

log = logging.getLogger(__name__)


class SupervisorClient(Channel):
    """Client of the supervisor: sends the desired models, receives their states."""

    variable = SUPERVISOR_FD

    def __init__(self, line: socket.socket) -> None:
        super().__init__(line)
        line.setblocking(False)
        self._writer = ChannelWriter(line)
        self._reader = ChannelReader(ModelStates)
        self._on_model_states: Callable[[ModelStates], None] | None = None
        self.is_serving = False
        """Whether this gateway serves clients."""

    def start(self, on_model_states: Callable[[ModelStates], None]) -> None:
        """Call `on_model_states` with each report of model states, at once if one has arrived."""
        self._on_model_states = on_model_states
        asyncio.get_running_loop().add_reader(self._line, self._read)
        self._read()

    def send_desired(self, desired: DesiredModels) -> None:
        """Send the desired models; an unchanged message is not sent again."""
        serving = [*desired.serving, os.getpid()] if self.is_serving else desired.serving
        self._writer.send(structs.replace(desired, serving=serving))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line)
        super().close()

    def _read(self) -> None:
        try:
            data = self.receive()
        except BlockingIOError:
            return
        if not data:  # the supervisor has exited; the gateway is made to end with it
            asyncio.get_running_loop().remove_reader(self._line)
            return
        try:
            model_states = self._reader.feed(data)
        except ValueError as error:
            log.error("invalid message from the supervisor: %s", error)
            return
        if model_states is not None and self._on_model_states is not None:
            self._on_model_states(model_states)
