"""Celery's settings on a node: those under which a message is a pointer and nothing more."""

from __future__ import annotations

from celery import Celery

from octrain_worker.celery_app import celery_settings
from octrain_worker.settings import WorkerSettings


def configured() -> Celery:
    """As Celery itself understands the settings: a name that it does not know has no effect."""
    app = Celery("octrain")
    app.conf.update(celery_settings(WorkerSettings(), "node.one", 3))
    return app


def test_a_message_is_taken_once_and_never_kept_back() -> None:
    conf = configured().conf
    # Taken is acknowledged: a task that runs for a week would come again after visibility_timeout.
    assert conf.task_acks_late is False
    assert conf.task_ignore_result is True
    assert conf.task_track_started is False
    # None waits behind a long one in this worker while another node is free.
    assert conf.worker_disable_prefetch is True
    assert conf.worker_prefetch_multiplier == 1
    assert list(conf.accept_content) == ["json"]
    assert conf.task_serializer == "json"
    assert conf.task_default_queue == "node.one"
    assert conf.worker_concurrency > 3


def test_a_dead_broker_is_noticed_and_waited_for() -> None:
    conf = configured().conf
    transport = conf.broker_transport_options
    assert 0 < transport["socket_timeout"] <= 10
    assert 0 < transport["health_check_interval"] <= 15
    assert transport["socket_keepalive"] is True
    assert transport["visibility_timeout"] == 3600
    assert conf.broker_connection_retry_on_startup is True
    assert conf.broker_connection_max_retries is None


def test_celery_knows_every_setting() -> None:
    known = set(Celery("octrain").conf)
    assert set(celery_settings(WorkerSettings(), "node.one", 1)) <= known
