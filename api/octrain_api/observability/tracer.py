"""The tracing of a process, by its settings.

Without an endpoint nothing of OpenTelemetry is imported.
"""

from octrain_api.observability.tracing import Tracing
from octrain_api.settings import TracingSettings

__all__ = ["make_tracing"]


def make_tracing(settings: TracingSettings, service: str) -> Tracing:
    """Tracing to the endpoint of the settings, or none. Raises RuntimeError when the packages are
    missing: `pip install 'octrain[tracing]'`."""
    if settings.endpoint is None:
        return Tracing()
    try:
        from octrain_api.observability.otel import OtelTracing
    except ImportError as error:
        raise RuntimeError(
            f"OCTRAIN_TRACING_ENDPOINT is set, but {error.name} is not installed: "
            "pip install 'octrain[tracing]'"
        ) from error
    return OtelTracing(settings, service)
