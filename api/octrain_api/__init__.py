"""The HTTP service and its controller: the sole owner of the database."""
