"""The Celery side of a node: one queue, one task that is only a pointer.

Celery carries no state that matters. Messages are acknowledged when taken (a message that is lost
is sent again by the controller, one that comes twice is answered by the claim), results are
ignored, nothing is prefetched, nothing but JSON is accepted. The threads pool keeps the worker
answering while tasks wait, and lets them start processes.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import warnings
from typing import Any

from celery import Celery
from celery.apps.worker import Worker
from celery.exceptions import SecurityWarning
from celery.worker import state

from octrain_worker.agent.node import Node
from octrain_worker.settings import WorkerSettings
from octrain_worker.tracing import sane_traceparent

__all__ = ["RUN_ATTEMPT", "celery_settings", "make_app", "run_worker"]

logger = logging.getLogger(__name__)

RUN_ATTEMPT = "octrain.run_attempt"
_EXIT_SECONDS = 3.0


def make_app(settings: WorkerSettings, node: Node) -> Celery:
    """The Celery application of this node, with its one task."""
    app = Celery("octrain", broker=settings.broker.redis_url)
    app.conf.update(celery_settings(settings, node.queue, node.slots))

    @app.task(name=RUN_ATTEMPT, ignore_result=True, bind=True)
    def run_attempt(self: Any, job_id: str, attempt_id: str, attempt: int) -> None:
        """Starts the attempt's supervisor, and waits for it so that Celery shows it as running."""
        traceparent = sane_traceparent((self.request.headers or {}).get("traceparent"))
        node.run_attempt(job_id, attempt_id, attempt, traceparent)

    return app


def celery_settings(settings: WorkerSettings, queue: str, slots: int) -> dict[str, Any]:
    """Celery's settings on a node that reads ``queue`` and runs up to ``slots`` jobs at a time."""
    return {
        "broker_use_ssl": _broker_tls(settings) or None,
        "accept_content": ["json"],
        "task_serializer": "json",
        "task_default_queue": queue,
        "task_ignore_result": True,
        "task_acks_late": False,
        "task_track_started": False,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        # No soft shutdown: a worker that ends leaves its supervisors at work, and their tasks here
        # have nothing to finish.
        "worker_pool": "threads",
        # A place for every slot, and as many for supervisors that are still reporting.
        "worker_concurrency": 2 * max(1, slots) + 2,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 15,
        },
    }


def _broker_tls(settings: WorkerSettings) -> dict[str, Any]:
    """What the broker's client is told for `rediss://`: certificates are always verified."""
    if not settings.broker.redis_url.startswith("rediss://"):
        return {}
    options: dict[str, Any] = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    if settings.api.ca_file is not None:
        options["ssl_ca_certs"] = str(settings.api.ca_file)
    return options


class _NodeWorker(Worker):
    """Celery's worker, but for its signal handlers: the node's own are in place already."""

    def install_platform_tweaks(self, worker: Any) -> None:
        return None


def run_worker(settings: WorkerSettings, node: Node) -> int:
    """Consumes the node's queue until a shutdown is asked for; the process's exit code."""
    app = make_app(settings, node)
    # Celery warns a root user of pickle, which is not accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = _NodeWorker(
        app=app,
        hostname=f"{settings.node.name}@{os.uname().nodename}",
        queues=[node.queue],
        loglevel="INFO",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )

    def stop() -> None:
        state.should_stop = 0
        threading.Thread(target=_leave_anyway, args=(node,), daemon=True).start()

    node.on_stop(stop)
    if not node.stopping:
        worker.start()
    if not node.stopping:
        logger.error("the Celery worker ended by itself with %s", worker.exitcode)
        return worker.exitcode or 1
    node.wait_until_shut_down()
    return 0


def _leave_anyway(node: Node) -> None:
    """Celery's own shutdown waits for the broker, which may be away: not beyond ours."""
    node.wait_until_shut_down()
    if not threading.Event().wait(_EXIT_SECONDS):
        logging.shutdown()
        os._exit(0)
