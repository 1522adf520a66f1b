"""The local stack: Postgres, Valkey, the API, the controller and workers on one machine."""
