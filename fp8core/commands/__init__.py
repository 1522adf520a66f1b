"""The commands of ``python -m fp8core``, one module each."""
