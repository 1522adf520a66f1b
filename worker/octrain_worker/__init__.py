"""The worker on a GPU node: Celery app, node agent and attempt supervisor."""
