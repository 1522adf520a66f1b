"""Sinks: the same telemetry to TensorBoard files, an MLflow server, or Weights & Biases.

Each sink is a process of its own that follows the telemetry file. What it has not sent yet lies in
that file, so it needs no queue, and neither its failure nor its silence reaches the training: the
trainer learns of both and tells them in an event.

Secrets are no part of a spec. A sink takes them from its environment:

* MLflow: ``MLFLOW_TRACKING_TOKEN``, or ``MLFLOW_TRACKING_USERNAME`` and
  ``MLFLOW_TRACKING_PASSWORD``. They are sent only to the server of ``MLFLOW_TRACKING_URI``; where
  that is set, a spec may name no other.
* Weights & Biases: ``WANDB_API_KEY``, for the server of ``WANDB_BASE_URL``.
"""

from fp8core.telemetry.sinks.launch import Sinks
from fp8core.telemetry.sinks.requirements import check_sinks

__all__ = ["Sinks", "check_sinks"]
