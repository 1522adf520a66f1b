"""The training library: FP8 engines, conversion and the training loop, without any service."""
