"""A node: registered with the API, alive by heartbeats, shut down in bounded time."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from octrain_worker.agent.leftovers import LeftoverRemover
from octrain_worker.agent.node_metrics import HostReader, NodeSampler, NvmlReader, SampleSender
from octrain_worker.agent.planner import Planner
from octrain_worker.agent.supervisors import Handle, Supervisors
from octrain_worker.api_client import (
    ApiClient,
    ApiRefused,
    ApiUnavailable,
    PlacedAttempt,
    Registration,
)
from octrain_worker.attempt_folder import is_attempt_id
from octrain_worker.capabilities import EngineProbe, Gpu, find_gpus
from octrain_worker.clock import boot_id
from octrain_worker.settings import WorkerSettings
from octrain_worker.supervisor.environment import trainer_environment
from octrain_worker.supervisor.main import Assignment

__all__ = ["Node"]

logger = logging.getLogger(__name__)

_VERSION = "0.1.0"
_TICK_SECONDS = 0.2
_SHUTDOWN_SECONDS = 8.0
_SWEEP_SECONDS = 3600.0
_FAREWELL_SECONDS = 1.0
# Ctrl-C reaches a whole terminal session, and its launcher sends SIGTERM as well: one request.
_SAME_REQUEST_SECONDS = 1.0


class Node:
    """Everything of a node but the Celery worker that brings it attempts."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._client = ApiClient(
            settings.api.api_url,
            settings.api.node_key.get_secret_value(),
            ca_file=settings.api.ca_file,
        )
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._released = threading.Event()
        self._stopped_at = 0.0
        self._on_stop: Callable[[], None] = lambda: None
        self._gpus: list[Gpu] = []
        self._description: dict[str, Any] = {}
        self._supervisors: Supervisors | None = None
        self._registration: Registration | None = None
        self._draining = False

    @property
    def queue(self) -> str:
        assert self._registration is not None
        return self._registration.queue

    @property
    def slots(self) -> int:
        return int(self._description["cpu_slots"]) + len(self._gpus)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT ask for a shutdown; a second one for an immediate one."""
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGINT, self._request_stop)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """``callback`` runs, in the signal handler, when a shutdown is asked for."""
        self._on_stop = callback

    def start(self) -> bool:
        """Registers, however long the API takes to be there, and begins to live.

        False when a shutdown was asked for first. Raises ``ApiRefused`` for a bad key.
        """
        self._gpus = find_gpus()
        self._description = self._describe()
        if self.stopping:
            return False
        registration = self._register()
        if registration is None:
            return False
        self._registration = registration
        self._supervisors = Supervisors(self._settings, registration.node_id, slots=self.slots)
        self._supervisors.adopt_all()
        planner = Planner(self._settings, registration.node_id, self._stopping)
        bodies = (("heartbeat", self._beat), ("watch", self._watch), ("planner", planner.run))
        for name, body in bodies:
            threading.Thread(target=body, name=name, daemon=True).start()
        self._sample(registration.node_id)
        logger.info("node %s is %s", self._settings.node.name, registration.node_id)
        return True

    def run_attempt(
        self, job_id: str, attempt_id: str, attempt: int, traceparent: str | None = None
    ) -> None:
        """Has an attempt supervised and returns when its supervisor is gone, or at shutdown.

        A further message of the same attempt is done with at once: waiting too, it would keep a
        place from other attempts for as long as this one runs.
        """
        assert self._supervisors is not None
        if self.stopping:
            return  # the relay sends it again
        if not is_attempt_id(attempt_id):
            # Whoever can write to the broker must not be able to name folders of this machine.
            logger.error("a message is passed over: %.200r is no attempt's id", attempt_id)
            return
        assignment = Assignment(attempt_id, job_id, attempt, traceparent)
        handle: Handle | None = self._supervisors.start(assignment)
        if handle is None or not handle.waited_for.acquire(blocking=False):
            return
        while not self._released.is_set():
            if handle.ended.wait(0.5):
                return

    def wait_until_shut_down(self) -> None:
        self._stopping.wait()
        self._released.wait()

    def _request_stop(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._stopping.is_set():
            self._stopped_at = now
            self._stopping.set()
            threading.Thread(target=self._shut_down, name="shutdown", daemon=False).start()
            self._on_stop()
        elif now - self._stopped_at > _SAME_REQUEST_SECONDS:
            self._hurry.set()

    def _shut_down(self) -> None:
        logger.info("shutting down: jobs save and stop")
        # Before any job is released: it would be placed here again.
        farewell = threading.Thread(target=self._say_farewell, name="farewell", daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_SECONDS)
        try:
            if self._supervisors is not None:
                self._supervisors.shut_down(_SHUTDOWN_SECONDS, self._hurry)
        finally:
            self._released.set()

    def _say_farewell(self) -> None:
        if self._registration is None or self._supervisors is None:
            return
        try:
            self._client.node_heartbeat(
                self._registration.node_id, self._supervisors.active(), stopping=True
            )
        except (ApiUnavailable, ApiRefused) as error:
            logger.warning("the API does not hear that this node shuts down: %s", error)

    def _describe(self) -> dict[str, Any]:
        settings = self._settings
        device = "cuda" if self._gpus else "cpu"
        probe = EngineProbe(
            device,
            environment=trainer_environment("probe", extra_names=settings.trainer.environment),
        )
        slots = settings.node.cpu_slots
        if slots is None:
            slots = 0 if self._gpus else 1
        kinds = (["cuda"] if self._gpus else []) + (["cpu"] if slots else [])
        return {
            "name": settings.node.name,
            "boot_id": boot_id(),
            "hostname": socket.gethostname(),
            "version": _VERSION,
            "device_kinds": kinds,
            "cpu_slots": slots,
            "gpus": [gpu.as_json() for gpu in self._gpus],
            "engines": probe.result(),
            "roots": [str(root) for root in settings.storage.roots],
            "private_roots": settings.private_storage,
            "artifact_url": settings.artifact_url,
        }

    def _register(self) -> Registration | None:
        delay = 0.2
        while not self.stopping:
            try:
                return self._client.register(self._description)
            except ApiUnavailable as error:
                at = self._settings.api.api_url
                logger.warning("the node cannot register yet at %s: %s", at, error)
            self._stopping.wait(delay)
            delay = min(delay * 2, 5.0)
        return None

    def _sample(self, node_id: str) -> None:
        gpus = NvmlReader([gpu.index for gpu in self._gpus])
        SampleSender(
            NodeSampler(gpus, HostReader()),
            self._settings.node_metrics_file,
            lambda samples: self._client.node_metrics(node_id, samples),
            interval=self._settings.node.metrics_seconds,
            stop=self._stopping,
        ).start()

    def _beat(self) -> None:
        assert self._registration is not None
        remover = LeftoverRemover(self._settings.artifact_url)
        while not self._stopping.wait(self._registration.heartbeat_interval_seconds):
            try:
                self._beat_once(self._registration.node_id, remover)
            except ApiUnavailable as error:
                logger.warning("node heartbeat: %s", error)
            except ApiRefused as error:
                logger.error("node heartbeat: %s", error)
                if error.status == 404:
                    self._register_again()
            except Exception:  # without this thread the node would be taken for lost
                logger.exception("a heartbeat of the node failed")

    def _beat_once(self, node_id: str, remover: LeftoverRemover) -> None:
        assert self._supervisors is not None
        removed = remover.done()
        answer = self._client.node_heartbeat(node_id, self._supervisors.active(), removed)
        draining = answer.wanted == "drain"
        if draining != self._draining:
            self._draining = draining
            logger.info(
                "the node drains: it is given no more jobs"
                if draining
                else "the node drains no more"
            )
            self._supervisors.keep_spare(not draining)
        remover.told(removed)
        remover.take(answer.leftovers)
        self._start_missed(answer.placed)

    def _start_missed(self, placed: list[PlacedAttempt]) -> None:
        """Begins attempts whose message did not come: the broker may be away, or the connection to
        it dead without anybody being told. A message that comes late finds them begun."""
        assert self._supervisors is not None
        for one in placed:
            if self.stopping or one.attempt_id in self._supervisors.active():
                continue
            logger.warning("attempt %s is begun without its message", one.attempt_id)
            try:
                self._supervisors.start(Assignment(one.attempt_id, one.job_id, one.attempt))
            except (OSError, ValueError):
                logger.exception("attempt %s cannot be begun", one.attempt_id)

    def _register_again(self) -> None:
        """The API does not know the node any more; under its name it gets the same id back."""
        try:
            again = self._client.register(self._description)
        except (ApiUnavailable, ApiRefused) as error:
            logger.error("the node cannot register again: %s", error)
            return
        assert self._registration is not None
        if again.queue != self._registration.queue:
            logger.error("the API gave the node a new id; restart the worker to take it up")

    def _watch(self) -> None:
        assert self._supervisors is not None
        swept_at = -math.inf
        while not self._stopping.wait(_TICK_SECONDS):
            try:
                self._supervisors.tick()
                if time.monotonic() - swept_at > _SWEEP_SECONDS:
                    swept_at = time.monotonic()
                    self._supervisors.remove_finished()
            except Exception:  # without this thread nobody would close what the dead have left
                logger.exception("the supervisors could not be looked after this time")
