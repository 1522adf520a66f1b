"""How the broker is reached: TLS, with an own certificate authority where the settings name one."""

import ssl
from typing import Any

from octrain_api.settings import BrokerSettings


def tls_options(settings: BrokerSettings) -> dict[str, Any]:
    """What a Redis client is told beside the URL: nothing without TLS (`redis://`)."""
    if not settings.url.startswith("rediss://"):
        return {}
    options: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    if settings.ca_file is not None:
        options["ssl_ca_certs"] = settings.ca_file
    return options


def celery_tls(settings: BrokerSettings) -> dict[str, Any]:
    """The same as Celery's `broker_use_ssl` takes it."""
    options = tls_options(settings)
    if options:
        options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return options
