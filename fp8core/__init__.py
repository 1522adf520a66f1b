"""The training library: FP8 engines, conversion and the training loop, usable without any service."""
