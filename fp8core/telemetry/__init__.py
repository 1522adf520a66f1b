"""The trainer's one output channel: an append-only local file of numbered records.

One JSON object a line, ``{"seq", "time", "type", ...}``. Whoever ships the file (or nobody) is no
concern of the writer, and neither the network nor the disk is one of the training loop: records go
into a bounded queue, and a thread appends them. ``seq`` counts from 1 without gaps and goes on
after a restart; a line torn by a crash is cut off when the file is opened again. Importing this
loads no torch: the supervisor imports it too.

Record types and their fields:

=============  ====================================================================
``phase``      ``phase``: loading, reference, converting, training, evaluating or saving
``metrics``    ``step``, ``values``: name to number (NaN and infinities as strings)
``progress``   ``step``, ``total_steps``, ``tokens``, ``eta_seconds`` (null: unknown)
``event``      ``kind``, ``message``, ``data``
``checkpoint`` ``step``, ``path`` (relative to the workdir), ``kind`` (periodic, final,
               stop), ``best``, ``metric``
``artifact``   ``kind`` (model, report, conversion, checkpoint, telemetry), ``path``, ``step``
=============  ====================================================================
"""

from fp8core.telemetry.numbers import decode_number, encode_number
from fp8core.telemetry.record_file import read_records
from fp8core.telemetry.writer import TelemetryWriter

__all__ = ["TelemetryWriter", "decode_number", "encode_number", "read_records"]
